"""Which weights of a captured model are divided over the tensor-parallel ranks, how, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Node

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..capture.captured import Captured
from ..ir.names import place
from ..ir.nodes import op_name
from .choices import AS_PLANNED, Choices
from .pins import Pins, check_pins, cut_of, refusal
from .placement import Again, Decision, Layout, Split, Stuck
from .propagate import ALIKE, Propagation
from .roles import roles
from .rules import RULES, STARTERS

CHOICES = ("column", "row", "replicate", "vocabulary")
RESTARTS_PER_WEIGHT = 4  # every walk but the last bans a weight, or finds another block of one


@dataclass(frozen=True)
class TensorRules:
    """What a user demands of weights: (glob pattern of names, choice) pairs, the first that matches counting.

    ``column`` divides the output features (a table's rows count as such), ``row`` the input features, ``vocabulary``
    the rows of an embedding or output layer, ``replicate`` nothing.
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "TensorRules":
        """From "PATTERN=CHOICE; PATTERN=CHOICE"; raises PlanError for anything else."""
        rules = []
        for part in filter(None, (part.strip() for part in text.replace("\n", ";").split(";"))):
            pattern, sign, choice = (piece.strip() for piece in part.partition("="))
            if not sign or not pattern or choice not in CHOICES:
                reason = f"a rule is PATTERN=CHOICE with one of {', '.join(CHOICES)}"
                raise PlanError("tensor-parallel rule", repr(part), reason, "Write e.g. '*.o_proj.weight=row'")
            rules.append((pattern, choice))
        return cls(tuple(rules))

    def of(self, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """name -> (choice, pattern), ``names`` mapping every known name to its canonical one. Raises PlanError."""
        found: dict[str, tuple[str, str]] = {}
        for pattern, choice in self.rules:
            matched = [names[name] for name in names if fnmatchcase(name, pattern)]
            if not matched:
                example = next(iter(names), "")
                reason = f"it matches none of the model's parameters, such as {example}"
                raise PlanError("tensor-parallel rule", pattern, reason, "Correct the pattern, or leave it out")
            for name in matched:
                found.setdefault(name, (choice, pattern))
        return found


@dataclass(frozen=True, eq=False)
class Sharding:
    """Decisions for ``tp`` ranks. ``tensors`` and ``reasons`` by parameter; ``decisions`` and ``layouts`` by node of
    the captured graph, for ``rewrite`` (a node without a decision is computed as captured, by every rank)."""

    tp: int
    tensors: Mapping[str, TensorSharding]
    reasons: Mapping[str, str]
    decisions: Mapping[Node, Decision] = field(default_factory=dict, repr=False)
    layouts: Mapping[Node, Layout] = field(default_factory=dict, repr=False)

    def share(self) -> float:
        """The part of all parameters that one rank holds."""
        held = sum(_values(t.local_shape(0, self.tp)) for t in self.tensors.values())
        return held / sum(_values(t.shape) for t in self.tensors.values())


def _values(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def shard(
    captured: Captured,
    tp: int,
    rules: TensorRules | None = None,
    pins: Pins | None = None,
    vocabulary_multiple: int = 1,
    complete: bool = False,
) -> Sharding:
    """Decide for every parameter of a capture.

    ``pins``: what a plan, or another capture of the same model, says of parameters, by name; those come out so.
    ``complete``: pins are a plan's, which says of every parameter of the capture, and of no other.
    ``vocabulary_multiple``: a vocabulary is padded to a multiple of this x tp where pins do not say otherwise.
    Raises PlanError when a rule or pin cannot be met, or when not one weight can be divided.
    """
    pins = pins or {}
    check_pins(captured, tp, pins, complete)
    names = {name: name for name in captured.shapes} | dict(captured.aliases)
    asked = (rules or TensorRules()).of({name: real for name, real in names.items() if real in captured.shapes})
    whole = {name: TensorSharding(name, tuple(shape)) for name, shape in captured.shapes.items()}
    if tp == 1:
        return Sharding(1, whole, dict.fromkeys(whole, "whole: one tensor-parallel rank"))
    pins = {name: pin for name, pin in pins.items() if name in whole}
    free = p = _propagate(captured, tp, _choices(captured, asked), vocabulary_multiple)
    found = {name: _tensor(t, p.held.get(name)) for name, t in whole.items()}
    edited = [name for name, pin in pins.items() if cut_of(pin) != cut_of(found[name])]
    if edited:
        choices = _choices(captured, asked)
        choices.pins = {name: cut_of(pin) for name, pin in pins.items()}
        try:
            p = _propagate(captured, tp, choices, vocabulary_multiple)
        except Stuck as stuck:
            raise refusal(stuck, pins, found, edited) from stuck
    tensors = {name: pins.get(name) or _tensor(t, p.held.get(name)) for name, t in whole.items()}
    reasons = {name: _reason(p, free, name, name in edited) for name in tensors}
    _check(reasons, asked, pins)
    if not p.held and not pins:
        why = next((f"{name} is {text}" for name, text in reasons.items()), "the graph reads no parameter")
        reason = f"not one weight can be divided over {tp} ranks: {why}"
        raise PlanError("tensor parallel size", tp, reason, "Use 1, or a size that divides heads and features")
    return Sharding(tp, tensors, reasons, p.decisions, p.layouts)


def _choices(captured: Captured, asked: Mapping[str, tuple[str, str]]) -> Choices:
    choices = Choices(roles(captured))
    for name, (choice, pattern) in asked.items():
        if choice == "replicate":
            choices.banned[name] = f"the rule {pattern}=replicate asks for it"
    choices.row = tuple(name for name, (choice, _) in asked.items() if choice == "row")
    return choices


def _propagate(captured: Captured, tp: int, choices: Choices, multiple: int) -> Propagation:
    most = RESTARTS_PER_WEIGHT * len(captured.shapes) + 1
    for _ in range(most):
        try:
            return Propagation(captured, tp, RULES, STARTERS, choices, multiple).run()
        except Again:
            continue
    raise AssertionError(f"propagation did not settle in {most} walks")


def _tensor(whole: TensorSharding, split: Split | None) -> TensorSharding:
    if split is None:
        return whole
    even = len(dict.fromkeys(split.blocks)) == 1
    blocks = len(split.blocks) if even else split.blocks
    return TensorSharding(whole.name, whole.shape, split.dim, blocks, split.padded or None)


def _reason(p: Propagation, free: Propagation, name: str, edited: bool) -> str:
    """Why a parameter is divided, or whole. ``free``: the walk that knows of no plan."""
    if name not in p.held:
        return f"whole: {AS_PLANNED}" if edited else _whole_because(free if name in p.choices.pins else p, name)
    why = p.why.get(name) or free.why.get(name, ALIKE)
    if not edited:
        return why
    how, _, remark = why.partition("; ")
    kind = how.partition(":")[0] if ":" in how else "divided"
    return f"{kind}: {AS_PLANNED}" + (f"; {remark}" if remark else "")


def _whole_because(p: Propagation, name: str) -> str:
    """Why every rank holds all of a parameter."""
    banned = p.choices.ban(name)
    if banned:
        return f"whole: {banned}"
    if name in p.choices.whole:
        return f"whole: {p.choices.whole[name]}"
    node = next((node for node, known in p.params.items() if known == name), None)
    users = [user for user in node.users if user.op == "call_function"] if node else []
    if not users:
        return "whole: nothing computes with it"
    return f"whole: {op_name(users[0])} in {place(users[0])} works on whole values"


def _check(reasons: Mapping[str, str], asked: Mapping[str, tuple[str, str]], pins: Pins) -> None:
    met = {"column": ("column", "vocabulary"), "row": ("row",), "vocabulary": ("vocabulary", "column")}
    for name, (choice, pattern) in asked.items():
        kind = reasons[name].partition(" ")[0].rstrip(":")
        if kind not in met.get(choice, ("whole",)):
            cannot = f"the plan says otherwise: {name}" if name in pins else f"{name} cannot be divided so: it"
            reason = f"{cannot} is {reasons[name]}"
            raise PlanError("tensor-parallel rule", f"{pattern}={choice}", reason, "Leave the rule out, or change it")
