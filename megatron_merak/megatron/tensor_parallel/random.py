"""Random streams that differ between tensor-parallel ranks, beside the default one, which does not.

On a GPU they are of its generator, on a machine without one of the CPU's.
"""

import torch
from torch import Tensor

from ...errors import ConfigError
from ..parallel_state import (
    get_expert_model_parallel_rank,
    get_expert_tensor_parallel_rank,
    get_tensor_model_parallel_rank,
)
from ..process import PROCESS
from ..streams import MODEL_PARALLEL, CudaRNGStatesTracker, current_device

_EXPERT_PARALLEL = "expert-parallel-rng"
_DATA_PARALLEL = "data-parallel-rng"


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> CudaRNGStatesTracker:
    """Return the random streams of this process. Raises ConfigError for the kinds of them that are
    not here.
    """
    _check(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    if PROCESS.tracker is None:
        PROCESS.draw_from(CudaRNGStatesTracker())
    assert PROCESS.tracker is not None
    return PROCESS.tracker


def _check(of_te: bool, for_inference: bool, for_graphs: bool) -> None:
    kinds = (
        ("use_te_rng_tracker", of_te),
        ("inference_rng_tracker", for_inference),
        ("use_cudagraphable_rng", for_graphs),
    )
    for name, wanted in kinds:
        if wanted:
            raise ConfigError(name, True, "there is one kind of random streams", "Leave it out")


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the default stream with ``seed``, the same on all ranks of a replica; begin the stream
    of tensor-parallel regions with seed + 2718 + tp_rank, and that of experts with
    seed + 1024 + 100 ep_rank + etp_rank.

    tp_rank, ep_rank, etp_rank: None: those of ``parallel_state``.
    force_reset_rng:            no effect: streams always begin anew.
    """
    _check(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    tp_rank = get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    ep_rank = get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    etp_rank = get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.generator.manual_seed(seed)
    tracker.add(_DATA_PARALLEL, seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + tp_rank)
    tracker.add(_EXPERT_PARALLEL, seed + 1024 + 100 * ep_rank + etp_rank)


def get_expert_parallel_rng_tracker_name() -> str:
    """The name of the stream of experts."""
    return _EXPERT_PARALLEL


def get_data_parallel_rng_tracker_name() -> str:
    """The name of a stream that is seeded as the default one."""
    return _DATA_PARALLEL


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: object) -> bool:
    """Whether random streams may be drawn from in a CUDA graph."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def convert_cuda_rng_state(
    state: Tensor | torch.Generator, to_graphable: bool = False
) -> Tensor | torch.Generator:
    """Return a stream's state as a generator, which CUDA graphs take, or as a tensor.

    Raises TypeError where it is neither.
    """
    if not isinstance(state, Tensor | torch.Generator):
        raise TypeError(f"a state is a tensor or a generator, not {type(state).__name__}")
    if isinstance(state, Tensor) and to_graphable:
        generator = torch.Generator(current_device())
        generator.set_state(state)
        return generator
    if isinstance(state, torch.Generator) and not to_graphable:
        return state.get_state()
    return state
