"""What is left of training steps beside products and attention, as the planner counts it: bytes of
element-wise passes, and on a CPU operations that the host starts.

Small models are trained as any other, and the two rates follow from their steps. So they include
what no single operation shows, such as what the caches keep between two of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..cluster import CLUSTERS, Device
from ..cluster.link_times import explained
from ..config import Config, ModelConfig, OptimizerConfig, TrainConfig
from ..parallel.mesh import build_mesh
from ..planner import plan
from ..preflight.stopwatch import timings
from ..stages.gpt_model import GPTModel, traced_gpt
from ..training.gpt_blueprint import by_formulas
from ..training.trainer import Trainer
from .shapes import ModelShape

_MICROBATCHES = 2
_FASTEST = 2  # times the speed of copies, which caches give at most
_PER = 1e9  # a bandwidth of which the planner's seconds count bytes
_START = 1e-3  # seconds, as _PER


@dataclass(frozen=True)
class Reference:
    """A small GPT. llama: with Llama's layers, else GPT-2's."""

    llama: bool
    hidden: int
    length: int
    samples: int

    def config(self, dtype: str) -> Config:
        model = ModelConfig(
            num_layers=2,
            hidden_size=self.hidden,
            ffn_hidden_size=4 * self.hidden,
            num_attention_heads=max(self.hidden // 64, 1),
            seq_length=self.length,
            vocab_size=2 * self.hidden,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        if self.llama:
            model = replace(
                model,
                normalization="RMSNorm",
                swiglu=True,
                position_embedding_type="rope",
                disable_bias_linear=True,
                untie_embeddings_and_output_weights=True,
            )
        train = TrainConfig(
            micro_batch_size=self.samples,
            global_batch_size=_MICROBATCHES * self.samples,
            train_iters=1000,
            bf16=dtype == "bfloat16",
            fp16=dtype == "float16",
        )
        return Config(model=model, train=train, optimizer=OptimizerConfig(lr=1e-4))

    @property
    def shape(self) -> ModelShape:
        """What of it is measured first."""
        model = self.config("float32").model
        return ModelShape(
            self.samples * self.length,
            self.hidden,
            model.num_attention_heads,
            groups=model.query_groups,
            ffn=model.ffn_size,
            vocabulary=model.padded_vocab_size(1),
            length=self.length,
        )


_SMALL = Reference(llama=False, hidden=64, length=64, samples=1)
OF = {
    "cpu": (
        _SMALL,
        Reference(llama=False, hidden=256, length=256, samples=2),
        Reference(llama=True, hidden=256, length=256, samples=2),
    ),
    "cuda": (
        Reference(llama=False, hidden=4096, length=4096, samples=1),
        Reference(llama=True, hidden=4096, length=4096, samples=1),
    ),
}


def step_seconds(reference: Reference, dtype: str, device: torch.device, seconds: float) -> float:
    """Return the median seconds of a step of one rank. seconds: that its steps take together."""
    config = reference.config(dtype)
    made = plan(config, 1)
    mesh = build_mesh(made.grid, 0, device)
    trainer = Trainer(config, GPTModel(by_formulas(traced_gpt(config), config, made), config, mesh))
    batches = [_batch(config) for _ in range(_MICROBATCHES)]
    return median(timings(lambda: trainer.step(batches), device, seconds))


def _batch(config: Config) -> dict[str, torch.Tensor]:
    train, model = config.train, config.model
    shape = (train.micro_batch_size, model.seq_length)
    ids = torch.arange(shape[0] * shape[1]).view(shape) % (model.vocab_size or 1)
    return {
        "tokens": ids,
        "labels": ids,
        "loss_mask": torch.ones(shape),
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
    }


def passes_of(
    device: Device, dtype: str, copies: float, steps: Sequence[tuple[Reference, float]]
) -> Device:
    """Return the device with the memory bandwidth, and the ``dispatch`` where it has one, with which
    plans of the references take as long as their steps did.

    device: with measured products and attention.
    copies: bytes per second of a copy.
    steps:  references with the seconds of a step.
    """
    rows = []
    for reference, took in steps:
        config = reference.config(dtype)
        bare = _predicted(config, device, 1e30, 0.0)
        counted = (_predicted(config, device, _PER, 0.0) - bare) * _PER
        starts = (_predicted(config, device, 1e30, _START) - bare) / _START
        # of what is left at least as much as caches could do
        left = max(took - bare, counted / copies / _FASTEST)
        rows.append((starts if device.dispatch else 0.0, counted, left))
    dispatch, each = explained(rows)
    return replace(device, memory_bandwidth=1 / each, dispatch=dispatch)


def _predicted(config: Config, device: Device, bandwidth: float, dispatch: float) -> float:
    changed = replace(device, memory_bandwidth=bandwidth, dispatch=dispatch)
    return plan(config, 1, replace(CLUSTERS["cpu"], device=changed)).predicted_time
