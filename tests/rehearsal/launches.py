"""What a layer of a captured model launches on a GPU that only pretends, forward and backward, and the bytes that
those operations read and write.

    python -m tests.rehearsal.launches              prints the table of docs/gpu.md
    python -m tests.rehearsal.launches --write      writes it there
    python -m tests.rehearsal.launches --each NAME  the operations of one model's layer, in order

An operation counts unless it is a view, or gives memory alone. Some are several kernels: see ``KERNELS``.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_merak.config import Config, ModelConfig, TrainConfig
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.bundle import Bundle
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.plan import Grid
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.runtime.engine import Interpreter
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.init_captured import Initialiser
from tests.engines import gpt_model, step

from .device import DEVICE, Rehearsal
from .trainers import captured, mesh_of

LAYERS = 3  # the one in the middle is counted: it has a layer on both sides
LENGTH = 4096
# Layers of one size, so that families can be compared; GPT-2 has 32 key heads and one matrix of 4 h
SIZES = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1024,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
GPT2 = {"n_embd": 4096, "n_head": 32, "n_layer": LAYERS, "vocab_size": 1024, "n_positions": LENGTH}
WITHOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": None},
    "qwen3_moe": SIZES
    | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1792},
    "gpt2": GPT2 | WITHOUT,
    "gemma": SIZES,
    "gemma2": SIZES,
    "olmo2": SIZES,
    "cohere": SIZES,
    "nemotron": SIZES,
    "falcon_h1": SIZES
    | {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_ssm": 4096, "mamba_d_state": 64},
}
# Those that also are counted with ``--compile-pointwise``.
COMPILED = {f"{name}, compiled": name for name in ("llama", *tuple(FAMILIES)[-5:])}
# Kernels of an operation that has more than one: a norm's backward and then the sum over its rows; attention's backward
# and what is before and after it.
KERNELS = {
    "rms_norm_backward": 2,
    "layer_norm_backward": 2,
    "add_rms_norm_backward": 2,
    "add_layer_norm_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    # products of all groups in 16 bits, and what adds them to fp32
    "add_products_": 2,
    # sums over rows are a kernel of their own
    "compiled_backward_with_sums": 2,
}
# Operations of ours whose kernels read dense tensors: of any other they make a copy first, which no dispatcher sees.
_READ_DENSE = ("norm", "gated", "bias_gelu")
_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
FLAGS = "the GPT of flags"
# Adapters of rank 16 over a frozen model in bf16: fp32 by peft, which training computes in bf16.
ADAPTED: Mapping[str, tuple[str, ...]] = {
    "llama, LoRA of q and v": ("q_proj", "v_proj"),
    "llama, LoRA of all linear layers": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}
NAMES = (*FAMILIES, *ADAPTED, FLAGS, *COMPILED)
BEGIN = "<!-- written by python -m tests.rehearsal.launches --write -->"
END = "<!-- end of launches -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


@dataclass
class Direction:
    """Operations of a layer's forward or backward, in order, and the bytes of their tensors.

    products: whether an operation is a matrix product, or attention.
    """

    operations: list[str] = field(default_factory=list)
    bytes_beside_products: int = 0

    @property
    def launches(self) -> int:
        return len(self.operations)

    @property
    def kernels(self) -> int:
        return sum(KERNELS.get(name, 1) for name in self.operations)

    def add(self, func: Any, tensors: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if func.namespace == "merak" and any(word in name for word in _READ_DENSE):
            copied = [x for x in _read_dense(name, tensors) if not x.is_contiguous()]
            self.operations += [f"clone inside {name}"] * len(copied)
        self.operations.append(name)
        if name == "add_products_":
            into, left = tensors[:2]
            self.bytes_beside_products += into.numel() * (into.element_size() + left.element_size())
        elif not any(word in name for word in ("mm", "attention", "product_by_group")):
            self.bytes_beside_products += sum(x.numel() * x.element_size() for x in tensors)


def _read_dense(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of an operation that a kernel reads row after row: of norms, what is normed may be
    heads of a wider product.
    """
    of_norm = "norm" in name
    if name.endswith("norm"):
        return tensors[1:2] if name.startswith("add") else []
    return tensors[: 2 if of_norm and name.startswith("add") else 1]


class _Counting(Rehearsal):
    """Notes what is launched while a unit runs."""

    def __init__(self, counted: dict[tuple[int, Kind], Direction]):
        super().__init__()
        self.counted = counted
        self.at: tuple[int, Kind] | None = None

    def _on_gpu(self, func, args: tuple, kwargs: dict, others: list[Tensor]) -> Any:
        before = self.launches
        found = super()._on_gpu(func, args, kwargs, others)
        if self.at is not None and self.launches > before:
            if func.overloadpacket.__name__ not in _MEMORY:
                inputs = tree_leaves((args, kwargs))
                # what is written into an argument is an argument already
                results = tree_leaves(found) if not _writes(func) else []
                tensors = [x for x in (*inputs, *results) if isinstance(x, Tensor)]
                self.counted.setdefault(self.at, Direction()).add(func, tensors)
        return found

    def note(self, name: str, tensors: list[Tensor]) -> None:
        """Note what is launched as one operation that no dispatcher sees."""
        if self.at is not None:
            found = self.counted.setdefault(self.at, Direction())
            found.operations.append(name)
            found.bytes_beside_products += sum(x.numel() * x.element_size() for x in tensors)

    def compiling(self) -> ExitStack:
        """What a compiler would make of bundles is one operation each way."""

        apart, apart_back = Bundle.run, Bundle.run_back

        def run(bundle: Bundle, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            if not self._is_ours(inputs[0]):
                return apart(bundle, inputs)
            results = [*map(_on_gpu, bundle.results)]
            self.note("compiled", [*inputs, *results])
            return tuple(results)

        def run_back(bundle: Bundle, inputs: list[Tensor], grads: list[Tensor]) -> tuple:
            if not self._is_ours(inputs[0]):
                return apart_back(bundle, inputs, grads)
            results = [_on_gpu(bundle.examples[place]) for place in bundle.trained]
            most = max(x.numel() for x in (*inputs, *grads))
            sums = any(x.numel() < most for x in results)
            name = "compiled_backward_with_sums" if sums else "compiled_backward"
            self.note(name, [*inputs, *grads, *results])
            return tuple(results)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(Bundle, "compile", lambda bundle, device: None))
        stack.enter_context(mock.patch.object(Bundle, "run", run))
        stack.enter_context(mock.patch.object(Bundle, "run_back", run_back))
        return stack

    @contextmanager
    def noting(self) -> Iterator[None]:
        perform = Interpreter.perform

        def noted(engine, state, done, defer=False) -> None:
            self.at = (done[1].unit, done[0])
            try:
                perform(engine, state, done, defer)
            finally:
                self.at = None

        with mock.patch.object(Interpreter, "perform", noted):
            yield


def _on_gpu(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=DEVICE)


def _writes(func: Any) -> bool:
    return any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)


def _empty(initialiser: Initialiser, name: str, seed: int) -> Tensor:
    parameter = initialiser._model.get_parameter(name)
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def model_of(name: str) -> nn.Module:
    import transformers

    family, *adapted = name.split(",")
    config = transformers.CONFIG_MAPPING[family](**FAMILIES[family])
    with init_empty_weights():
        if not adapted:
            return transformers.AutoModelForCausalLM.from_config(config).train()
        import peft

        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(ADAPTED[name]))
        return peft.get_peft_model(base, lora).train()


def _captured(name: str, length: int, mesh: Mesh) -> tuple[CapturedModel, list[Mapping]]:
    """A model, ready to train on this rank, and a micro-batch of one sample."""
    if name != FLAGS:
        ids = torch.ones(1, length, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids}
        made, batches = captured(
            model_of(COMPILED.get(name, name)),
            batch,
            mesh,
            {"compile_pointwise": name in COMPILED},
            dtype="bfloat16",
            autocast=True,
        )
        return made, batches[:1]
    model = ModelConfig(
        num_layers=LAYERS,
        hidden_size=SIZES["hidden_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=SIZES["num_key_value_heads"],
        ffn_hidden_size=SIZES["intermediate_size"],
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=SIZES["vocab_size"],
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    train = TrainConfig(micro_batch_size=1, global_batch_size=1, bf16=True)
    config = Config(model=model, train=train)
    made = gpt_model(config, make_plan(config, 1), mesh)
    return made, [made.blueprint.traced.batch]


def counted(name: str, length: int = LENGTH) -> dict[Kind, Direction]:
    """Return what the middle layer of a model launches in F and in B."""
    by_unit: dict[tuple[int, Kind], Direction] = {}
    with ExitStack() as stack:
        # nobody looks at the values of weights, which take a CPU minutes to draw
        stack.enter_context(mock.patch.object(Initialiser, "draw", _empty))
        mesh = stack.enter_context(mesh_of(Grid(), 0))
        rehearsal = stack.enter_context(_Counting(by_unit))
        stack.enter_context(rehearsal.compiling())
        made, batches = _captured(name, length, mesh)
        step(made, batches, 1e-3, 0.1)  # computes tables
        with rehearsal.noting():
            step(made, batches, 1e-3, 0.1)
    names = made.blueprint.chain.names
    middle = [unit for unit, name in enumerate(names) if f".{LAYERS // 2}." in f".{name}."]
    return {kind: _joined(by_unit, middle, kind) for kind in (Kind.F, Kind.B)}


def _joined(
    by_unit: Mapping[tuple[int, Kind], Direction], units: list[int], kind: Kind
) -> Direction:
    joined = Direction()
    for unit in units if kind is Kind.F else reversed(units):
        found = by_unit[unit, kind]
        joined.operations += found.operations
        joined.bytes_beside_products += found.bytes_beside_products
    return joined


def row(name: str) -> str:
    """The line of a model in the table."""
    found = counted(name)
    both = (found[Kind.F], found[Kind.B])
    cells = [
        *(each.launches for each in both),
        *(each.kernels for each in both),
        *(f"{each.bytes_beside_products / 1e6:,.0f}" for each in both),
    ]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |\n"


HEAD = """| model | operations forward | backward | kernels forward | backward | MB forward | backward |
|---|--:|--:|--:|--:|--:|--:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--each", choices=NAMES)
    asked = parser.parse_args()
    if asked.each:
        for kind, found in counted(asked.each).items():
            print(kind, found.launches, Counter(found.operations), *found.operations, sep="\n  ")
        return
    made = HEAD + "".join(map(row, NAMES))
    sys.stdout.write(made)
    if asked.write:
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{begin}\n{made}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
