"""What is measured: the model, the training recipe, and the list of cases. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

ONE = "one"
PIPELINE = "pp2"
TENSOR = "tp2"
DATA = "dp2"
LAYOUTS = {ONE: (1, 1, 1), PIPELINE: (1, 2, 1), TENSOR: (2, 1, 1), DATA: (1, 1, 2)}
PRECISIONS = ("fp32", "bf16")
OURS = {  # contestant -> its module
    "ours": "benchmarks.step.ours",
    "ours-captured": "benchmarks.step.ours_captured",
    "ours-torch": "benchmarks.step.ours",
}
ROWS = {
    "ours": "ours",
    "ours-captured": "ours, from HuggingFace's model",
    "ours-torch": "ours, without compiled kernels",
}
COMPILED = "huggingface-compiled"  # the peer's model under torch.compile
PEER_OF = {
    ONE: "huggingface",
    PIPELINE: "torch-pipelining",
    TENSOR: "torch-tensor-parallel",
    DATA: "huggingface-ddp",
}


@dataclass(frozen=True)
class ModelShape:
    """A Llama with an untied head, and the batch of one step: `micro_batches` sequences in all,
    whatever the layout.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    mlp: int = 1376
    vocabulary: int = 32000
    sequence: int = 256
    micro_batch: int = 1
    micro_batches: int = 8
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence * self.micro_batch * self.micro_batches

    @property
    def parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


QUICK = ModelShape(layers=2, hidden=64, heads=2, mlp=128, vocabulary=512, sequence=32)


@dataclass(frozen=True)
class Recipe:
    """Everything the optimizer needs; the same for every contestant. Weight decay applies to
    matrices only.
    """

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


RECIPE = Recipe()


@dataclass(frozen=True)
class Case:
    """One contestant in one layout. `first_stage_layers` is the pipeline split, None where there is
    no pipeline.
    """

    contestant: str
    layout: str
    precision: str
    tuned: bool
    first_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        tp, pp, dp = LAYOUTS[self.layout]
        return tp * pp * dp

    @property
    def group(self) -> str:
        """Cases of one group do the same work in the same precision on the same number of
        processes.
        """
        return f"{self.precision} {self.layout}"

    @property
    def row(self) -> str:
        """What the table calls this contestant inside its group."""
        if self.contestant in OURS:
            return ROWS[self.contestant]
        flavour = "tuned alike" if self.tuned else "out of the box"
        split = (
            ""
            if self.first_stage_layers is None
            else f" (first stage: {self.first_stage_layers} layers)"
        )
        return f"{self.contestant}, {flavour}{split}"

    @property
    def name(self) -> str:
        return f"{self.group} {self.row}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks of this contestant have besides the common ones."""
        return {"MERAK_EXT": "0"} if self.contestant == "ours-torch" else {}


def all_cases(shape: ModelShape, splits: tuple[int, ...]) -> Iterator[Case]:
    """Every case, group by group. A tuned pipeline runs once per split in `splits`; the fastest one
    counts.
    """
    for precision in PRECISIONS:
        for layout, peer in PEER_OF.items():
            yield from (
                Case(name, layout, precision, tuned=True) for name in ("ours", "ours-captured")
            )
            stock, tuned = Case(peer, layout, precision, False), Case(peer, layout, precision, True)
            if layout != PIPELINE:
                yield from (stock, tuned)
                continue
            yield replace(stock, first_stage_layers=shape.layers // 2)
            yield from (replace(tuned, first_stage_layers=split) for split in splits)


def kernel_cases() -> Iterator[Case]:
    """One process: ours with and without compiled kernels, and what PyTorch's compiler makes of the
    peer.
    """
    for precision in PRECISIONS:
        names = ("ours", "ours-torch", "ours-captured", COMPILED, PEER_OF[ONE])
        yield from (Case(name, ONE, precision, tuned=True) for name in names)
