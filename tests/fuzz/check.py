"""A random module on simulated ranks, through everything that a captured model goes through,
against its eager self.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.rewrite import Rewritten, rewrite
from megatron_merak.graph.lowering.split import Parts, split
from megatron_merak.graph.partition.cut import Chain, align, cut
from megatron_merak.graph.sharding.shard import Sharding, shard
from megatron_merak.runtime.engine import Interpreter, Pass, State, execute
from megatron_merak.segment import Common
from megatron_merak.tensor_parallel import derive_seed
from tests.fuzz.draw import BATCH, LENGTH, Recipe
from tests.fuzz.edits import edited
from tests.fuzz.grammar import mixture, recipe, source
from tests.fuzz.simulated import Place, simulated
from tests.graph.lockstep import reduce_partial, shard_of
from tests.graph.stages import sink_of

CPU = torch.device("cpu")
# of a gradient's largest entry
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}
# gradients this small beside others are alike
SMALL = {torch.float64: 1e-3, torch.float32: 1e-2, torch.bfloat16: 0.1}


# why experts cannot be divided so, which is no mistake
REFUSED = ("no grouped product", "it does not divide the", "cannot have even parts")


class Mismatch(AssertionError):
    """A module that is not its eager self."""


@dataclass(frozen=True)
class Way:
    """How a module is run.

    dtype:    of its parameters.
    edits:    the seed of what a plan says of some; 0: nothing.
    sequence: whether replicated work is sharded along the sequence.
    cp:       number of ranks that divide sequences.
    kind:     how they exchange, see ``shard_contexts``.
    inner:    neighbours that exchange heads, likewise.
    ep:       parts that experts are divided into; with ``etp`` as many as all ranks, or ``tp``.
    etp:      ranks that shard each expert.
    """

    tp: int
    stages: int = 1
    recompute: bool = False
    fused: bool = True
    dtype: torch.dtype = torch.float64
    edits: int = 0
    sequence: bool = False
    cp: int = 1
    kind: str | None = None
    inner: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def divides(self) -> bool:
        """Whether all ranks divide experts, beside those that share weights."""
        return self.etp > 1 or self.ep > self.tp


@dataclass
class Subject:
    """A module and all that is known of it: its batches, its capture and its chain."""

    recipe: Recipe
    dtype: torch.dtype = torch.float64
    text: str = ""  # instead of the recipe's
    model: nn.Module = field(init=False)
    example: dict[str, Tensor] = field(init=False)
    batch: dict[str, Tensor] = field(init=False)

    def __post_init__(self):
        scope: dict = {}
        self.text = self.text or source(self.recipe)
        exec(compile(self.text, f"fuzz_{self.recipe.seed}.py", "exec"), scope)
        generator = torch.Generator().manual_seed(self.recipe.seed)
        self.model = scope["Module"]().to(self.dtype)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
        self.example, self.batch = (self._batch(generator) for _ in range(2))
        self.captured: Captured = capture(self.model, self.example, dtype=self.dtype)
        self.chain: Chain = cut(self.captured)
        self.random = "F.dropout" in self.text
        self._wanted: tuple[Tensor, dict[str, Tensor]] | None = None

    def _batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        draw = {"size": (BATCH, LENGTH), "generator": generator}
        return {
            name: torch.randint(0, min(self.recipe.vocabulary, 67), **draw)
            for name in ("ids", "labels")
        }

    def wanted(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The eager loss and gradients of the batch."""
        if self._wanted is None:
            loss = self.model(**self.batch)
            named = dict(self.model.named_parameters())
            grads = torch.autograd.grad(
                loss, list(named.values()), allow_unused=True, materialize_grads=True
            )
            self._wanted = loss.detach(), dict(zip(named, grads, strict=True))
        return self._wanted

    def made(self, way: Way) -> "Made":
        """What every rank runs of the batch, made from the capture of the other batch."""
        experts = {"experts": way.ep * way.etp, "shards": way.etp}
        sharding = shard(self.captured, way.tp, **experts)
        if way.edits:
            pins = edited(sharding.tensors, way.tp, way.edits)
            sharding = shard(self.captured, way.tp, pins=pins, complete=True, **experts)
            assert sharding.tensors == pins
        captured, chain, first = self.captured, self.chain, sharding
        partial: tuple[str, ...] = ()
        if captured.guards:
            partial = tuple(name for name, tensor in sharding.tensors.items() if tensor.dim is None)
            if captured.guards.broken(self.batch):
                captured = capture(self.model, self.batch, dtype=self.dtype)
                chain = align(cut(captured), chain)
                sharding = shard(captured, way.tp, pins=first.tensors, **experts)
        ranks = [
            rewrite(
                captured,
                chain,
                sharding,
                rank,
                tp=way.tp,
                partial=partial,
                sequence_parallel=way.sequence,
                cp_rank=cp_rank,
                cp=way.cp,
                cp_comm_type=way.kind,
                cp_inner=way.inner,
                expert_rank=cp_rank * way.tp + rank,
            )
            for cp_rank in range(way.cp)
            for rank in range(way.tp)
        ]
        for program in ranks if way.fused else ():
            fuse(program.graph)
        return Made(sharding, ranks, chain)


@dataclass(frozen=True)
class Made:
    """What the ranks of a layout run."""

    sharding: Sharding
    programs: list[Rewritten]
    chain: Chain


class Rank:
    """One simulated rank: its parameters and an engine per stage."""

    def __init__(self, subject: Subject, made: Made, way: Way, place: Place):
        real = dict(subject.model.named_parameters(remove_duplicate=False))
        self.place, self.tp = place, way.tp
        index = place.cp_rank * way.tp + place.tp_rank
        program = made.programs[index]
        units = len(made.chain.units)
        self.parameters = {
            name: nn.Parameter(shard_of(real[name].detach(), tensor, index, made.sharding))
            for name, tensor in made.sharding.tensors.items()
        }
        wide = torch.promote_types(way.dtype, torch.float32)
        self.sink = sink_of(dict.fromkeys(self.parameters.values(), wide))
        borders = [round(i * units / way.stages) for i in range(way.stages + 1)]
        self.parts: list[Parts] = []
        self.engines: list[Interpreter] = []
        self.states: list[State] = []
        for first, last in zip(borders, borders[1:], strict=False):
            if first == last:
                continue
            parts = split(program, range(first, last))
            again = [(unit,) for unit in range(first, last)] if way.recompute else ()
            outputs = [value.name for value in parts.targets] + list(parts.results)
            segments = parts.segments(self.parameters, self.sink)
            self.parts.append(parts)
            self.engines.append(
                Interpreter(
                    segments,
                    again,
                    outputs,
                    place.tp,
                    weights=self.sink,
                    device=CPU,
                    groups=place.groups if way.divides else place.without_experts,
                )
            )

    def start(self, stage: int, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Pass:
        state = State(Common(self.parts[stage].prelude(batch), self._seed), True)
        for value in self.parts[stage].sources:
            arrived = values[value.name]
            assert (arrived.shape, arrived.dtype) == (value.shape, value.dtype), value
            state.values[value.name] = arrived.clone()
        self.states.append(state)
        return Pass(self.engines[stage], state, self.engines[stage].forward_runs)

    def _seed(self, segment) -> None:
        shard = segment.random_shard(self.place.tp_rank, self.place.cp_rank, self.tp)
        torch.default_generator.manual_seed(derive_seed(5, segment.unit, segment.index, shard))

    def leaving(self, stage: int) -> dict[str, Tensor]:
        names = [*(value.name for value in self.parts[stage].targets), *self.parts[stage].results]
        return {name: self.engines[stage].take(self.states[stage], name) for name in names}

    def turn(self, stage: int, grads: Mapping[str, Tensor | None]) -> Pass:
        for name, grad in grads.items():
            if grad is not None:
                self.states[stage].add_grad(name, grad)
        return Pass(
            self.engines[stage],
            self.states[stage],
            self.engines[stage].backward_runs(self.states[stage]),
        )

    def entering(self, stage: int) -> dict[str, Tensor | None]:
        state = self.states[stage]
        found = {
            value.name: state.take_grad(value.name)
            for value in self.parts[stage].sources
            if value.grad
        }
        assert state.leftovers() == [] and state.values == {}, (
            state.leftovers(),
            list(state.values),
        )
        return found

    def gradients(self) -> dict[str, Tensor]:
        return {name: self.sink.grads[p].total for name, p in self.parameters.items()}


def run(ranks: Sequence[Rank], batch: Mapping[str, Tensor]) -> list[Tensor]:
    """One step of ranks that share this process, stage by stage: their losses."""
    values: list[dict[str, Tensor]] = [{} for _ in ranks]
    stages = range(len(ranks[0].engines))
    for stage in stages:
        execute([rank.start(stage, batch, v) for rank, v in zip(ranks, values, strict=True)])
        values = [rank.leaving(stage) for rank in ranks]
    losses = [found["loss"] for found in values]
    grads: list[dict[str, Tensor | None]] = [{"loss": torch.ones_like(loss)} for loss in losses]
    for stage in reversed(stages):
        execute([rank.turn(stage, g) for rank, g in zip(ranks, grads, strict=True)])
        grads = [rank.entering(stage) for rank in ranks]
    return losses


def step(subject: Subject, way: Way) -> tuple[Sharding, list[Tensor], list[dict[str, Tensor]]]:
    """(sharding, every rank's loss, every rank's gradients) of one step on the batch."""
    made = subject.made(way)
    with simulated(way.tp, way.cp, way.inner) as places:
        ranks = [Rank(subject, made, way, place) for place in places]
        losses = run(ranks, subject.batch)
    found = [rank.gradients() for rank in ranks]
    divided = {name for name, tensor in made.sharding.tensors.items() if tensor.experts}
    reduce_partial(found, made.programs[0].partial, way.tp, divided)
    return made.sharding, losses, found


def step_of_process(
    subject: Subject, way: Way, rank: int
) -> tuple[Sharding, Tensor, dict[str, Tensor]]:
    """The same of this process as one of ``way.tp`` real ones."""
    made = subject.made(way)
    one = Rank(subject, made, way, Place(rank, 0, tp=dist.group.WORLD))
    (loss,) = run([one], subject.batch)
    found = one.gradients()
    for name in made.programs[0].partial:
        dist.all_reduce(found[name])
    return made.sharding, loss, found


def check(subject: Subject, way: Way) -> float | None:
    """The share of the parameters that a rank holds, None where nothing can be sharded, or not as a
    plan says, after comparing the loss and every gradient with those of the eager module. Raises
    Mismatch."""
    try:
        sharding, losses, found = step(subject, way)
    except PlanError as error:
        if "no weight can be sharded" in str(error) or way.edits and error.what == "sharding of":
            return None
        if way.ep * way.etp > 1 and any(words in str(error) for words in REFUSED):
            return None
        raise
    if subject.random:
        _compare_with_itself(subject, way, losses, found)
        return sharding.share()
    for rank, (loss, grads) in enumerate(zip(losses, found, strict=True)):
        compare(subject, way, sharding, rank, loss=loss, found=grads)
        whole = [name for name, tensor in sharding.tensors.items() if tensor.dim is None]
        if not torch.equal(loss, losses[0]) or not all(
            torch.equal(grads[name], found[0][name]) for name in whole
        ):
            raise Mismatch(f"what is replicated differs on rank {rank}")
    return sharding.share()


def compare(
    subject: Subject,
    way: Way,
    sharding: Sharding,
    rank: int,
    loss: Tensor,
    found: Mapping[str, Tensor],
) -> None:
    """Compare what one rank found with the eager module. Raises Mismatch."""
    wanted, grads = subject.wanted()
    allowed = TOLERANCE[way.dtype]
    if not abs(loss - wanted) <= allowed * max(1.0, abs(float(wanted))):
        raise Mismatch(
            f"loss {float(loss)!r} on rank {rank}, {float(wanted)!r} of the eager module"
        )
    scale = max(float(grad.abs().max()) for grad in grads.values())
    for name, tensor in sharding.tensors.items():
        expected = shard_of(grads[name], tensor, rank, sharding)
        error, own = float((found[name] - expected).abs().max()), float(expected.abs().max())
        if not error <= allowed * max(own, SMALL[way.dtype] * scale):
            raise Mismatch(
                f"gradient of {name} on rank {rank}: off by {error:.3e}, its largest is {own:.3e}"
            )
        padding = shard_of(torch.ones_like(grads[name]), tensor, rank, sharding) == 0
        if found[name][padding].any():
            raise Mismatch(f"the padding of {name} has a gradient on rank {rank}")


def _compare_with_itself(
    subject: Subject, way: Way, losses: list[Tensor], found: list[dict[str, Tensor]]
) -> None:
    """Where random numbers are drawn: not those of the eager module, but the same in every layout
    of stages.
    """
    other = replace(way, stages=1 if way.stages > 1 else 2, recompute=not way.recompute)
    _, again, others = step(subject, other)
    if not all(
        torch.equal(a, losses[0]) and torch.equal(b, losses[0])
        for a, b in zip(losses, again, strict=True)
    ):
        raise Mismatch(f"loss {float(losses[0])!r}, and {float(again[0])!r} in other stages")
    for one, two in zip(found, others, strict=True):
        for name in one:
            if not torch.allclose(one[name], two[name], rtol=1e-9, atol=1e-12):
                raise Mismatch(f"the gradient of {name} depends on the stages")


def ways(seed: int) -> list[Way]:
    """How the module of a seed is run: on two and on four ranks, in other stages each, on parts of
    the sequence, and on context ranks; few in low precision.
    """
    recompute = seed // 3 % 2 == 1
    fused = seed // 6 % 4 != 0
    dtype = {11: torch.float32, 23: torch.bfloat16}.get(seed % 24, torch.float64)
    kind = (None, "all_gather", "p2p")[seed // 4 % 3]
    return [
        Way(2, 1 + seed % 3, recompute, fused, dtype=dtype),
        Way(4, 1 + (seed + 1) % 3, not recompute, fused, dtype=dtype),
        Way(2 + seed % 2, 1 + (seed + 2) % 3, recompute, fused, dtype=dtype, sequence=True),
        Way(
            1 + seed % 2,
            1 + seed % 2,
            recompute,
            fused,
            dtype=dtype,
            sequence=seed % 4 < 2,
            cp=2,
            kind=kind,
        ),
    ]


def ways_of_experts(seed: int) -> list[Way]:
    """How a mixture of a seed is run: with features of experts, or whole ones, on ranks that share
    weights, sequences or both.
    """
    recompute = seed // 3 % 2 == 1
    fused = seed // 6 % 4 != 0
    kind = "all_gather" if seed // 4 % 2 else None
    shared = [{"tp": 2, "sequence": True, "cp": 3, "ep": ep, "etp": 6 // ep} for ep in (6, 3, 2, 1)]
    sequences = [{"tp": 1, "cp": 2, "ep": ep, "etp": 2 // ep} for ep in (2, 1)]
    weights = [
        {"tp": 2, "sequence": True, "ep": 2},
        {"tp": 3, "sequence": True, "ep": 3},
        {"tp": 4, "sequence": True, "ep": 4},  # which cannot share six tokens
        {"tp": 2, "sequence": True, "cp": 3, "ep": 2},
    ]
    layouts = [shared[seed % 4], sequences[seed % 2], weights[seed // 2 % 4]]
    layouts += [{"tp": 2, "sequence": seed % 2 == 1}, {"tp": 1, "cp": 2 + seed % 2}]
    return [
        Way(**layout, stages=1 + (seed + at) % 3, recompute=recompute, fused=fused, kind=kind)
        for at, layout in enumerate(layouts)
    ]


def cases(seed: int) -> list[tuple[Recipe, list[Way]]]:
    """The modules of a seed, and how each is run: of every fourth seed also a mixture."""
    found = [(recipe(seed), ways(seed))]
    return [*found, (mixture(seed), ways_of_experts(seed))] if seed % 4 == 0 else found


def shrink(made: Recipe, way: Way) -> tuple[Recipe, str]:
    """The smallest module found that still fails, and how it fails."""
    text = failure(made, way)
    again = True
    while again:
        again = False
        for index in range(len(made.pieces)):
            smaller = made.without(index)
            found = failure(smaller, way)
            if found:
                made, text, again = smaller, found, True
                break
    return made, text


def failure(made: Recipe, way: Way) -> str:
    """How a module fails, "" if it does not."""
    try:
        check(Subject(made, way.dtype), way)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def report(made: Recipe, way: Way) -> str:
    """A failing module as a reader wants it: small, with how it was run."""
    smaller, text = shrink(made, way)
    return f"\nseed {made.seed}, {way}\n{text}\n\n{source(smaller)}"
