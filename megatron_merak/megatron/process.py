"""What Megatron-LM's interface keeps for a whole process, since its functions take no argument for
it: the groups of this rank, the virtual stage that is being built, and the random streams.

The only state of a process in this package. Nothing outside ``megatron_merak.megatron`` reads it.
"""

from .groups import Groups
from .streams import CudaRNGStatesTracker


class Process:
    """What is kept.

    groups:         None before ``initialize_model_parallel``.
    virtual_stages: of a pipeline rank; None: it has one stage.
    virtual_stage:  index of the stage that is being built; None without virtual stages.
    tracker:        random streams; None before they are first asked for.
    """

    def __init__(self) -> None:
        self.groups: Groups | None = None
        self.virtual_stages: int | None = None
        self.virtual_stage: int | None = None
        self.tracker: CudaRNGStatesTracker | None = None

    def enter(self, groups: Groups, virtual_stages: int | None) -> None:
        """Begin to use groups."""
        self.groups = groups
        self.virtual_stages = virtual_stages
        self.virtual_stage = None if virtual_stages is None else 0

    def build(self, virtual_stage: int | None) -> None:
        """Note which virtual stage is being built."""
        self.virtual_stage = virtual_stage

    def draw_from(self, tracker: CudaRNGStatesTracker) -> None:
        """Use these random streams."""
        self.tracker = tracker

    def leave(self) -> None:
        """Forget the groups. They end with the job's own group."""
        self.groups = None
        self.virtual_stages = None
        self.virtual_stage = None


PROCESS = Process()
