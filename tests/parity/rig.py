"""What each rank runs, and how the parts that the ranks hand back become full tensors again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_merak.checkpoint.store import Shard
from megatron_merak.parallel.buffers import Flat, ParameterBuffer
from megatron_merak.parallel.mesh import Mesh, build_mesh
from megatron_merak.plan import Grid
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.tensor_parallel import derive_seed
from megatron_merak.training.trainer import Trainer
from tests.engines import gpt_trainer, gradient_step
from tests.ranks import run_ranks

from .batches import replica_batch
from .cases import Case, bound

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """One rank's view of a run. ``stray``: elements outside of every HuggingFace tensor (padding)
    that are not zero.
    """

    evaluated: float | None
    first_loss: float | None
    gradients: list[Shard]
    curve: list[float | None]
    norms: list[float]
    weights: list[Shard]
    stray: int


@dataclass(frozen=True)
class Run:
    """A run put together from all ranks: full tensors, the curve that the last stage saw."""

    evaluated: float
    first_loss: float
    gradients: Tensors
    curve: list[float]
    norms: list[float]
    weights: Tensors


def disturb(trainer: Trainer) -> None:
    """Add noise, a function of the tensor's name, to all initial weights: zero biases and unit
    norms hide errors.
    """
    trainer.model.gatherer.gather()
    for shard in trainer.model.shards(trainer.model.buffer.data):
        generator = torch.Generator().manual_seed(derive_seed("noise", shard.name))
        scale = 0.2 if len(shard.shape) == 1 else 0.1
        noise = torch.randn(shard.shape, generator=generator).mul_(scale)
        shard.tensor.add_(part_of(noise, shard).to(shard.tensor))
    trainer.model.buffer.seal(trainer.model.buffer.buckets)
    trainer.optimizer.refresh_master()


def slab_of(full: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The slab of a full tensor that ``shard`` has a part of; all of it where there is none."""
    if shard.slab is None:
        return full
    dim, start, stop = shard.slab
    return full.narrow(dim, start, stop - start)


def part_of(full: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The elements of a full tensor that ``shard`` holds."""
    full = slab_of(full, shard)
    if shard.dim is None:
        return full
    return torch.cat(
        [full.narrow(shard.dim, start, stop - start) for start, stop in shard.intervals], shard.dim
    )


def new_trainer(case: Case, mesh: Mesh) -> Trainer:
    config = case.config()
    trainer = gpt_trainer(config, make_plan(config, case.world), mesh)
    disturb(trainer)
    return trainer


def spoil(buffer: ParameterBuffer) -> None:
    """Make every gradient NaN: a step must not read what an earlier one left."""
    buffer.allocate(buffer.main_grad, buffer.buckets)
    for name in buffer.slots:
        for gradient in (buffer.grad(name), *buffer.own_grad(name)):
            gradient.fill_(torch.nan)


def parts(trainer: Trainer, flat: Flat) -> list[Shard]:
    return [
        replace(shard, tensor=shard.tensor.to("cpu", copy=True))
        for shard in trainer.model.shards(flat)
    ]


def _stray(trainer: Trainer, flat: Flat) -> int:
    rest = torch.cat(
        [flat[bucket.start : bucket.stop] for bucket in reversed(trainer.model.buffer.buckets)]
    )
    for shard in trainer.model.shards(rest):
        shard.tensor.zero_()
    return int(rest.count_nonzero())


def train(case: Case, mesh: Mesh) -> Outcome:
    """Evaluate the first batch, take its gradient, then train for ``case.steps`` optimizer steps
    from there.
    """
    trainer = new_trainer(case, mesh)
    buffer = trainer.model.buffer
    evaluated = trainer.model.mean_loss(replica_batch(case, 0, mesh.dp_rank))
    spoil(buffer)
    first_loss = gradient_step(trainer, replica_batch(case, 0, mesh.dp_rank))
    trainer.model.gatherer.full(buffer.own_gradient())  # where replicas have shards
    gradients, stray = parts(trainer, buffer.main_grad), _stray(trainer, buffer.main_grad)
    reports = [trainer.step(replica_batch(case, step, mesh.dp_rank)) for step in range(case.steps)]
    assert not any(report.skipped for report in reports)
    losses, norms = [report.loss for report in reports], [report.grad_norm for report in reports]
    trainer.model.gatherer.gather()
    stray += _stray(trainer, buffer.data)
    return Outcome(
        evaluated, first_loss, gradients, losses, norms, parts(trainer, buffer.data), stray
    )


def mesh_of(case: Case, rank: int = 0, device: torch.device = CPU) -> Mesh:
    return build_mesh(
        Grid(tp=case.tp, dp=case.dp, pp=case.pp), rank, device, instances=case.instances
    )


def train_all(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """All cases in one process, one set of groups per layout."""
    meshes: dict[tuple, Mesh] = {}
    outcomes = []
    for case in cases:
        key = (case.layout, case.instances)
        if key not in meshes:
            meshes[key] = mesh_of(case, rank)
        outcomes.append(train(case, meshes[key]))
    return outcomes


def launch(cases: Sequence[Case]) -> dict[Case, Sequence[Outcome]]:
    """What every rank saw of each case, all cases of one world size in one launch of processes."""
    runs = {}
    for world in sorted({case.world for case in cases}):
        chosen = [case for case in cases if case.world == world]
        if world == 1:
            outcomes = [train_all(0, 1, chosen)]
        else:
            outcomes = run_ranks(train_all, world, chosen, timeout=60.0 + sum(map(bound, chosen)))
        runs |= dict(zip(chosen, zip(*outcomes, strict=True), strict=True))
    return runs


def run_all(cases: Sequence[Case]) -> dict[Case, Run]:
    return {case: put_together(outcomes) for case, outcomes in launch(cases).items()}


def one(values: Sequence) -> object:
    """The one value that all ranks report who report any."""
    values = [value for value in values if value is not None]
    assert values and all(value == values[0] for value in values), f"ranks disagree: {values}"
    return values[0]


def put_together(outcomes: Sequence[Outcome]) -> Run:
    assert [outcome.stray for outcome in outcomes] == [0] * len(outcomes), "padding is not zero"
    return Run(
        one([outcome.evaluated for outcome in outcomes]),
        one([outcome.first_loss for outcome in outcomes]),
        assemble([outcome.gradients for outcome in outcomes]),
        [one(losses) for losses in zip(*(outcome.curve for outcome in outcomes), strict=True)],
        one([outcome.norms for outcome in outcomes]),
        assemble([outcome.weights for outcome in outcomes]),
    )


def assemble(ranks: Sequence[Sequence[Shard]]) -> Tensors:
    """Full tensors out of the owners' parts. Every element has one owner; whoever else holds it has
    the same bits.
    """
    full: Tensors = {}
    owners: Tensors = {}
    shards = [shard for rank in ranks for shard in rank]
    for shard in shards:
        if shard.name not in full:
            full[shard.name] = torch.full(shard.shape, torch.nan, dtype=shard.tensor.dtype)
            owners[shard.name] = torch.zeros(shard.shape, dtype=torch.int64)
        if shard.owner:
            _place(full[shard.name], shard)
            _place(
                owners[shard.name],
                replace(shard, tensor=torch.ones_like(shard.tensor, dtype=torch.int64)),
            )
    for name, count in owners.items():
        assert bool((count == 1).all()), (
            f"{name}: elements have {count.min()} to {count.max()} owners"
        )
    for shard in shards:
        assert torch.equal(shard.tensor, part_of(full[shard.name], shard)), (
            f"{shard.name}: copies differ between ranks"
        )
    return full


def _place(full: torch.Tensor, shard: Shard) -> None:
    full = slab_of(full, shard)
    if shard.dim is None:
        full.copy_(shard.tensor) if full.dtype != torch.int64 else full.add_(shard.tensor)
        return
    position = 0
    for start, stop in shard.intervals:
        target = full.narrow(shard.dim, start, stop - start)
        source = shard.tensor.narrow(shard.dim, position, stop - start)
        target.copy_(source) if full.dtype != torch.int64 else target.add_(source)
        position += stop - start
