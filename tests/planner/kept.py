"""What the units of the GPT of flags keep for their backward and send, on one tensor-parallel rank
that runs without the others.
"""

from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid, StagePlan
from megatron_merak.planner import plan
from megatron_merak.segment import Collective, Common, In, Out, Segment
from tests.engines import gpt_model

SAMPLES = 2
# of an all-reduce
SHARES = {
    Collective.NONE: 0.0,
    Collective.ALL_REDUCE: 1.0,
    Collective.REDUCE_SCATTER: 0.5,
    Collective.ALL_GATHER: 0.5,
    Collective.STACK: 0.5,
}


def gpt(model: ModelConfig, tp: int = 1, dtype: str = "float32", **parallel) -> Config:
    """A run of ``model`` with micro-batches of ``SAMPLES``."""
    return Config(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tp, **parallel),
        train=TrainConfig(
            micro_batch_size=SAMPLES, global_batch_size=SAMPLES, bf16=dtype == "bfloat16"
        ),
    )


@dataclass
class Kept:
    """Of a unit.

    saved:  bytes that its segments save for the backward, beside what enters it, parameters and
            values from the batch.
    leaves: bytes of the values that later units read.
    sent:   bytes of the all-reduces that send as much as its collectives do, in forward and
            backward.
    """

    saved: int = 0
    leaves: int = 0
    sent: list[float] = field(default_factory=lambda: [0.0, 0.0])


def kept_by(config: Config) -> list[Kept]:
    """Of each unit of the model, on its second tensor-parallel rank, or on its only one."""
    tp = config.parallel.tensor_model_parallel_size
    made = plan(config, tp)
    mesh = Mesh(Grid(tp=tp), 0 if tp == 1 else 1, torch.device("cpu"))
    rank = _Rank(len(made.units), tp)
    shape = config.model
    tokens = torch.randint(shape.vocab_size, (SAMPLES, shape.seq_length))
    samples = {
        "tokens": tokens,
        "labels": tokens.clone(),
        "loss_mask": torch.ones(tokens.shape),
        "position_ids": torch.arange(shape.seq_length).expand(tokens.shape).contiguous(),
    }
    # each unit by itself, so that no sum moves into the unit that begins with its norm
    with mock.patch.object(StagePlan, "continued", ()):
        model = gpt_model(config, made, mesh)
        (batch,) = model.from_samples([samples])
        (programs,) = model.programs.values()
        program = programs(batch, True)
    common = Common(program.prelude(batch))
    for segment in program.segments:
        rank.run(segment, common, model.parameters.weights)
    return rank.units()


class _Rank:
    """Runs the segments of a rank of ``tp``, all of which have the same values."""

    def __init__(self, units: int, tp: int):
        self.tp = tp
        self.kept = [Kept() for _ in range(units)]
        self._values: dict[str, Tensor] = {}
        # as they were before they were gathered, by name
        self._parts: dict[str, Tensor] = {}
        self._made_by: dict[str, int] = {}
        self._last_read: dict[str, int] = {}
        self._saved: list[dict[int, Tensor]] = [{} for _ in range(units)]
        self._outside: list[list[Tensor]] = [[] for _ in range(units)]

    def run(self, segment: Segment, common: Common, sink) -> None:
        unit = segment.unit
        outside = self._outside[unit]
        outside += [*common.values(), *segment.parameters]
        ins = [self._values[read.value].detach().requires_grad_(read.grad) for read in segment.ins]
        sink.getters = {}
        for read, value in zip(segment.ins, ins, strict=True):
            self._last_read[read.value] = unit
            self._receive(read, value, unit)
            if self._made_by[read.value] != unit:
                outside.append(value)
            if read.regather:
                # what is gathered again is not kept, but this rank's part of it
                sink.getters[value] = partial(self._values.get, read.value)
                outside.append(value)
                part = self._parts[read.value]
                self._saved[unit][_address(part)] = part
        with torch.autograd.graph.saved_tensors_hooks(partial(self._save, unit), _same):
            outs = segment.fn(common, *ins)
        sink.getters = {}
        for out, result in zip(segment.outs, outs, strict=True):
            self._made_by[out.value] = unit
            self._send(out, result.detach(), unit)

    def units(self) -> list[Kept]:
        for unit, kept in enumerate(self.kept):
            outside = {_address(tensor) for tensor in self._outside[unit]}
            kept.saved = sum(
                tensor.untyped_storage().nbytes()
                for address, tensor in self._saved[unit].items()
                if address not in outside
            )
        for name, unit in self._made_by.items():
            if self._last_read.get(name, len(self.kept)) > unit:
                self.kept[unit].leaves += self._values[name].nbytes
        return self.kept

    def _save(self, unit: int, tensor: Tensor) -> Tensor:
        self._saved[unit][_address(tensor)] = tensor
        return tensor

    def _receive(self, read: In, value: Tensor, unit: int) -> None:
        """Count what is done with the gradient of a value."""
        whole = self.tp if read.collective is Collective.ALL_GATHER else 1
        self.kept[unit].sent[1] += SHARES[read.collective] * value.nbytes * whole
        if read.regather:
            self.kept[unit].sent[1] += SHARES[Collective.ALL_GATHER] * value.nbytes

    def _send(self, out: Out, result: Tensor, unit: int) -> None:
        """Do what a collective does where all ranks have the same; no result shares memory with
        what the rank had.
        """
        self._parts[out.value] = result
        gathers = out.collective in (Collective.ALL_GATHER, Collective.STACK)
        whole = self.tp if gathers else 1
        self.kept[unit].sent[0] += SHARES[out.collective] * result.nbytes * whole
        match out.collective:
            case Collective.ALL_GATHER:
                result = torch.cat([result] * self.tp, 1)
            case Collective.STACK:
                result = torch.stack([result] * self.tp)
            case Collective.REDUCE_SCATTER:
                result = result.chunk(self.tp, 1)[1].clone()
            case Collective.ALL_REDUCE:
                result = result.clone()
        self._values[out.value] = result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same(tensor: Tensor) -> Tensor:
    return tensor
