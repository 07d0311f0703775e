"""Training steps that are measured: models, ways to train them, FLOPs and bytes. Imports
no torch.
"""

from dataclasses import dataclass, replace

from megatron_merak.cluster import find_device
from megatron_merak.errors import PlanError

SEQUENCE = 4096
# bf16 weights, fp32 masters, gradients and both moments; HuggingFace's autocast keeps fp32 weights
# and bf16 copies.
STATE_BYTES = 18
GPT = "gpt"
CAPTURED = "captured"
TRAINER = "trainer"
TITLES = {
    GPT: "pretrain_gpt.py",
    CAPTURED: "pretrain_hf.py",
    TRAINER: "MerakTrainer",
    "hf": "HF Trainer",
    "hf-compile": "HF Trainer, torch_compile",
}
# What TrainingArguments are told beside what all are told.
SETTINGS = {
    TRAINER: {},
    "hf": {},
    "hf-compile": {"torch_compile": True},
}


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's layers: RMSNorm, rotary embedding, SwiGLU.

    experts:   MLPs of a layer, of which a token takes ``active``.
    lora:      rank of the adapters on queries and values, the only weights that are trained; 0: all
               weights are.
    recompute: of all layers, with a loss in chunks of 1024 tokens.
    qwen:      as Qwen2 has them: queries, keys and values have biases, and the head is the
               embedding.
    """

    title: str
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int
    rotary_base: int = 10000
    experts: int = 1
    active: int = 1
    lora: int = 0
    recompute: bool = False
    qwen: bool = False

    @property
    def _keys(self) -> int:
        return self.hidden // self.heads * self.groups

    def _weights(self, experts: int) -> int:
        """Of the matrices that ``experts`` of a layer, everything beside them and the head are."""
        attention = self.hidden * (2 * self.hidden + 2 * self._keys)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return (
            self.layers * (attention + router + experts * 3 * self.hidden * self.ffn)
            + self.hidden * self.vocabulary
        )

    @property
    def adapters(self) -> int:
        """Weights of the adapters."""
        return self.layers * self.lora * (3 * self.hidden + self._keys)

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        biases = self.layers * (self.hidden + 2 * self._keys) if self.qwen else 0
        embedding = 0 if self.qwen else self.vocabulary * self.hidden
        return self._weights(self.experts) + embedding + norms + biases + self.adapters

    @property
    def state_bytes(self) -> int:
        """Of weights, gradients and optimizer; of frozen weights alone where there are adapters."""
        if self.lora:
            return 2 * (self.parameters - self.adapters) + STATE_BYTES * self.adapters
        return STATE_BYTES * self.parameters

    def flops(self, tokens: int, sequence: int, all_scores: bool = False) -> int:
        """Of a step's forward and backward: every matrix product with a weight three times, with a
        frozen one twice, and causal attention with half of its scores, with ``all_scores`` with
        all. Recomputation does not count.
        """
        product = (
            4 * self._weights(self.active) + 6 * self.adapters
            if self.lora
            else 6 * self._weights(self.active)
        )
        attention = 3 * 2 * self.layers * self.hidden * sequence * (2 if all_scores else 1)
        return tokens * (product + attention)


_SEVEN = Shape(
    "Llama-2-7B", layers=32, hidden=4096, heads=32, groups=32, ffn=11008, vocabulary=32000
)
_EIGHT = Shape(
    "Llama-3.1-8B",
    layers=32,
    hidden=4096,
    heads=32,
    groups=8,
    ffn=14336,
    vocabulary=128256,
    rotary_base=500000,
    recompute=True,
)
SHAPES = {
    "7b": _SEVEN,
    "1.7b": Shape("1.7B", layers=24, hidden=2048, heads=16, groups=16, ffn=8192, vocabulary=32000),
    "7b-12": replace(_SEVEN, title="12 layers of Llama-2-7B", layers=12),
    "8b": _EIGHT,
    "8b-lora": replace(_EIGHT, title="Llama-3-8B, LoRA 16", lora=16, recompute=False),
    "qwen": Shape(
        "Qwen2.5-1.5B",
        layers=28,
        hidden=1536,
        heads=12,
        groups=2,
        ffn=8960,
        vocabulary=151936,
        rotary_base=1000000,
        qwen=True,
    ),
    "moe": Shape(
        "Mixtral of 0.9B",
        layers=16,
        hidden=1024,
        heads=16,
        groups=8,
        ffn=2048,
        vocabulary=32000,
        experts=8,
        active=2,
    ),
}

# on a device with less memory than its weights, gradients and optimizer need
STAND_INS = {"7b": "7b-12"}


def tiny(shape: Shape) -> Shape:
    """The same kind of model in a size for a CPU that only tries the code."""
    groups = 2 if shape.groups < shape.heads else 4
    return replace(
        shape,
        layers=2,
        hidden=64,
        heads=4,
        groups=groups,
        ffn=96,
        vocabulary=512,
        lora=min(shape.lora, 4),
    )


@dataclass(frozen=True)
class Row:
    """One measurement: a model, how it is trained, and the micro-batches of a step."""

    model: str
    contestant: str
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.contestant} {self.micro_batches}"


def row_of(name: str) -> Row:
    """The row of a name such as "7b gpt 8". Raises ValueError."""
    words = name.split()
    if (
        len(words) != 3
        or words[0] not in SHAPES
        or words[1] not in TITLES
        or not words[2].isdigit()
    ):
        models, ways = ", ".join(SHAPES), ", ".join(TITLES)
        raise ValueError(
            f"{name}: it is no row. Give a model ({models}), a way ({ways}) and micro-batches"
        )
    return Row(words[0], words[1], int(words[2]))


def that_fits(row: Row, memory: int | None) -> Row:
    """The row, or that of the model which stands in for its own where that needs more than a device
    has.

    memory: bytes of the device; None where that is no limit.
    """
    smaller = STAND_INS.get(row.model)
    if memory is None or smaller is None or SHAPES[row.model].state_bytes <= memory:
        return row
    return replace(row, model=smaller)


def peak(device: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name: 989e12 of H100 and H200; None where it is not in
    the table.
    """
    try:
        return find_device(device).bfloat16_flops
    except PlanError:
        return None
