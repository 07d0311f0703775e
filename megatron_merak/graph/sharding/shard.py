"""Which parameters of a captured model are sharded over the tensor-parallel ranks, how, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import prod

from torch.fx import Node

from megatron_merak.counting import counted
from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..capture.captured import Captured
from ..ir.names import place
from ..ir.nodes import op_name
from .assumptions import AS_PLANNED, Assumptions
from .expert_features import features_of
from .experts import DIVIDED, adapted_experts, divided_experts
from .known import ALIKE, Known
from .pins import Pins, check_pins, conflict_error, extents, spec_of
from .placement import Decision, Layout, NodeLayout, PlanConflict
from .propagate import propagated
from .roles import roles
from .rules import RULES, STARTERS

CHOICES = ("column", "row", "replicate", "vocabulary")


@dataclass(frozen=True)
class TensorRules:
    """How the user wants parameters to be sharded: (glob pattern of names, choice) pairs; the first
    match counts.

    ``column`` shards the output features (a table's rows count as such), ``row`` the input
    features, ``vocabulary`` the rows of an embedding or output layer, ``replicate`` nothing.
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "TensorRules":
        """Return the rules of "PATTERN=CHOICE; PATTERN=CHOICE". Raises PlanError for
        anything else.
        """
        rules = []
        for part in filter(None, (part.strip() for part in text.replace("\n", ";").split(";"))):
            pattern, sign, choice = (piece.strip() for piece in part.partition("="))
            if not sign or not pattern or choice not in CHOICES:
                reason = f"a rule is PATTERN=CHOICE with one of {', '.join(CHOICES)}"
                raise PlanError(
                    "tensor-parallel rule", repr(part), reason, "Write e.g. '*.o_proj.weight=row'"
                )
            rules.append((pattern, choice))
        return cls(tuple(rules))

    def match(self, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return (choice, pattern) by canonical name of a parameter.

        names: every known name of a parameter -> its canonical name.

        Raises PlanError for a pattern that matches nothing.
        """
        matches: dict[str, tuple[str, str]] = {}
        for pattern, choice in self.rules:
            matched = [names[name] for name in names if fnmatchcase(name, pattern)]
            if not matched:
                example = next(iter(names), "")
                reason = f"it matches none of the model's parameters, such as {example}"
                raise PlanError(
                    "tensor-parallel rule", pattern, reason, "Correct the pattern, or leave it out"
                )
            for name in matched:
                matches.setdefault(name, (choice, pattern))
        return matches


@dataclass(frozen=True, eq=False)
class Sharding:
    """How a captured model is sharded over ``tp`` ranks.

    tensors:   by parameter, how it is sharded.
    reasons:   by parameter, why it is sharded so, or replicated.
    decisions: by node, what a rank does for it; a node without one is computed as captured, by
               every rank.
    layouts:   by node, how its value is sharded.
    experts:   number of ranks that divide experts.
    shards:    number of neighbours among these that shard each expert.
    room:      how many times the rows that a rank gets of another one if all get as many it has
               room for; None: for as many as there are.
    """

    tp: int
    tensors: Mapping[str, TensorSharding]
    reasons: Mapping[str, str]
    decisions: Mapping[Node, Decision] = field(default_factory=dict, repr=False)
    layouts: Mapping[Node, NodeLayout] = field(default_factory=dict, repr=False)

    experts: int = 1
    shards: int = 1
    room: float | None = None

    def ranks_of(self, tensor: TensorSharding) -> int:
        """Return the number of ranks that shard a tensor."""
        return self.experts if tensor.experts else self.tp

    def share(self) -> float:
        """Return the fraction of all parameters that one rank stores."""
        stored = sum(prod(t.local_shape(0, self.ranks_of(t))) for t in self.tensors.values())
        return stored / sum(prod(t.shape) for t in self.tensors.values())


def _replicated(captured: Captured) -> dict[str, TensorSharding]:
    return {name: TensorSharding(name, tuple(shape)) for name, shape in captured.shapes.items()}


def shard(
    captured: Captured,
    tp: int,
    rules: TensorRules | None = None,
    pins: Pins | None = None,
    vocabulary_multiple: int = 1,
    complete: bool = False,
    experts: int = 1,
    shards: int = 1,
    room: float | None = None,
) -> Sharding:
    """Decide how every parameter and value of a capture is sharded.

    pins:                how a plan, or another capture of the same model, shards parameters, by
                         name; these are sharded just so.
    vocabulary_multiple: a vocabulary is padded to a multiple of this x tp, unless pins say
                         otherwise.
    experts:             ranks that divide the experts of grouped products: ``tp``, or more if copies of
                         a layer divide them; 1: none do.
    shards:              neighbours among these that shard each expert.
    room:                see ``Sharding``.
    complete:            pins are those of a plan and must name every parameter of the capture, and
                         no other.

    Raises PlanError if a rule or pin cannot be met, or no weight can be sharded.
    """
    pins = pins or {}
    whole = _replicated(captured)
    divided: dict[str, TensorSharding] = {}
    together = experts == tp and shards == 1
    if experts > 1 and not together:
        graph = captured.module.graph
        features = features_of(graph, shards) if shards > 1 else None
        divided = divided_experts(graph, whole, experts // shards)
        divided = divided if features is None else features.sharded(divided, shards)
    _check_divided(divided, pins, experts, complete)
    # weights of experts are no affair of tensor-parallel ranks then
    pins = {name: whole.get(name, pin) if pin.experts else pin for name, pin in pins.items()}
    check_pins(captured, tp, pins, complete)
    pins = {name: pin for name, pin in pins.items() if name not in divided}
    names = {name: name for name in captured.shapes} | dict(captured.aliases)
    names = {name: canonical for name, canonical in names.items() if canonical in captured.shapes}
    requested = (rules or TensorRules()).match(names)
    if tp == 1:
        reasons = dict.fromkeys(whole, "replicated: one tensor-parallel rank")
        padded = {name: pin for name, pin in pins.items() if name in whole and pin.padded}
        reasons |= dict.fromkeys(padded, "whole: padded") | dict.fromkeys(divided, DIVIDED)
        return Sharding(
            1, whole | padded | divided, reasons, experts=experts, shards=shards, room=room
        )
    pins = {name: pin for name, pin in pins.items() if name in whole}
    walk = partial(
        propagated, captured, tp, RULES, STARTERS, vocabulary_multiple=vocabulary_multiple
    )
    adapted = adapted_experts(captured.module.graph, whole, tp) if together else {}
    assumptions = _assumptions(captured, requested, together, divided)
    assumptions.pins = {name: spec_of(tensor) for name, tensor in adapted.items()}
    try:
        free = p = walk(assumptions=assumptions)
    except PlanConflict as conflict:
        reason = f"{op_name(conflict.node)} in {place(conflict.node)} {conflict.why}"
        raise PlanError("--expert-model-parallel-size", tp, reason, "Use 1") from conflict
    unpinned = {name: _tensor(t, p.sharded_parameters.get(name)) for name, t in whole.items()}
    edited = [name for name, pin in pins.items() if spec_of(pin) != spec_of(unpinned[name])]
    if edited:
        assumptions = _assumptions(captured, requested, together, divided)
        assumptions.pins = {name: spec_of(pin) for name, pin in pins.items()}
        try:
            p = walk(assumptions=assumptions)
        except PlanConflict as conflict:
            raise conflict_error(conflict, pins, unpinned, edited) from conflict
    tensors = {
        name: pins.get(name) or _tensor(t, p.sharded_parameters.get(name))
        for name, t in whole.items()
    }
    tensors |= divided
    reasons = {name: _reason(p, free, name, name in edited) for name in tensors}
    reasons |= dict.fromkeys((*divided, *adapted), DIVIDED)
    _check_requests(reasons, requested, pins)
    if together and not pins and DIVIDED not in reasons.values():
        reason = "the model has no grouped product of experts whose number it divides"
        raise PlanError("--expert-model-parallel-size", tp, reason, "Use 1, or another size")
    if not p.sharded_parameters and not pins and not divided:
        why = next(
            (f"{name} is {text}" for name, text in reasons.items()), "the graph reads no parameter"
        )
        reason = f"no weight can be sharded over {tp} ranks: {why}"
        raise PlanError(
            "tensor parallel size", tp, reason, "Use 1, or a size that divides heads and features"
        )
    return Sharding(
        tp, tensors, reasons, p.decisions, p.layouts, experts=experts, shards=shards, room=room
    )


def _check_divided(
    divided: Mapping[str, TensorSharding], pins: Pins, experts: int, complete: bool
) -> None:
    """Raise PlanError unless pins say what of copies of a layer divide."""
    for name, pin in pins.items():
        if pin.experts and name not in divided:
            reason = "the plan has it divided by experts, and its experts are not divided so"
            raise PlanError("sharding of", name, reason, "Let experts be false")
        if name in divided and complete and not pin.experts:
            reason = f"{experts} ranks divide experts, and the plan has it {pin.describe()}"
            remedy = f"Let dim be {divided[name].dim} and experts true"
            raise PlanError("sharding of", name, reason, remedy)
        if name not in divided or not pin.experts:
            continue
        own = divided[name]
        if spec_of(pin) != spec_of(own):
            reason = f"its experts are along dimension {own.dim}, in {counted(len(extents(own)), 'block')}"
            remedy = f"Let dim be {own.dim} and blocks {own.blocks}"
            raise PlanError("sharding of", name, reason, remedy)
        if (pin.shards, pin.within, pin.within_blocks) != (
            own.shards,
            own.within,
            own.within_blocks,
        ):
            reason = f"the plan has it {pin.describe()}, and it is {own.describe()}"
            remedy = (
                f"Let shards be {own.shards}, within {own.within} and within_blocks "
                f"{own.within_blocks}"
            )
            raise PlanError("sharding of", name, reason, remedy)


def _assumptions(
    captured: Captured,
    requested: Mapping[str, tuple[str, str]],
    experts: bool,
    divided: Mapping[str, TensorSharding],
) -> Assumptions:
    assumptions = Assumptions(roles(captured), experts=experts)
    assumptions.banned.update(dict.fromkeys(divided, DIVIDED))
    for name, (choice, pattern) in requested.items():
        if choice == "replicate":
            assumptions.banned[name] = f"the rule {pattern}=replicate asks for it"
    assumptions.row = tuple(name for name, (choice, _) in requested.items() if choice == "row")
    return assumptions


def _tensor(replicated: TensorSharding, layout: Layout | None) -> TensorSharding:
    if layout is None:
        return replicated
    even = len(dict.fromkeys(layout.blocks)) == 1
    blocks = len(layout.blocks) if even else layout.blocks
    return TensorSharding(
        replicated.name, replicated.shape, layout.dim, blocks, padded=layout.padded or None
    )


def _reason(p: Known, free: Known, name: str, edited: bool) -> str:
    """Return why a parameter is sharded as it is, or replicated.

    free:   what is known without a plan.
    edited: whether the plan shards this parameter otherwise.
    """
    if name not in p.sharded_parameters:
        if edited:
            return f"replicated: {AS_PLANNED}"
        return _why_replicated(free if name in p.assumptions.pins else p, name)
    why = p.reasons.get(name) or free.reasons.get(name, ALIKE)
    if not edited:
        return why
    how, _, remark = why.partition("; ")
    kind = how.partition(":")[0] if ":" in how else "sharded"
    return f"{kind}: {AS_PLANNED}" + (f"; {remark}" if remark else "")


def _why_replicated(p: Known, name: str) -> str:
    banned = p.assumptions.ban_reason(name)
    if banned:
        return f"replicated: {banned}"
    if name in p.replicated:
        return f"replicated: {p.replicated[name]}"
    node = next((node for node, parameter in p.parameter_names.items() if parameter == name), None)
    users = [user for user in node.users if user.op == "call_function"] if node else []
    if not users:
        return "replicated: nothing computes with it"
    return f"replicated: {op_name(users[0])} in {place(users[0])} works on replicated values"


def _check_requests(
    reasons: Mapping[str, str],
    requested: Mapping[str, tuple[str, str]],
    pins: Mapping[str, TensorSharding],
) -> None:
    """Raise PlanError if a parameter is not sharded as the user's rules want it."""
    acceptable = {
        "column": ("column", "vocabulary"),
        "row": ("row",),
        "vocabulary": ("vocabulary", "column"),
    }
    for name, (choice, pattern) in requested.items():
        kind = reasons[name].partition(" ")[0].rstrip(":")
        if kind not in acceptable.get(choice, ("replicated",)):
            cannot = (
                f"the plan says otherwise: {name}"
                if name in pins
                else f"{name} cannot be sharded so: it"
            )
            reason = f"{cannot} is {reasons[name]}"
            raise PlanError(
                "tensor-parallel rule",
                f"{pattern}={choice}",
                reason,
                "Leave the rule out, or change it",
            )
