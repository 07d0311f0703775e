"""Which weights of a captured model are divided over the tensor-parallel ranks, how, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Node

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from .captured import Captured
from .nodes import op_name
from .placement import Again, Decision, Layout, Split
from .propagate import Choices, Propagation, place
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
    pins: Mapping[str, TensorSharding] | None = None,
    vocabulary_multiple: int = 1,
) -> Sharding:
    """Decide for every parameter of a capture.

    ``pins``: what another capture of the same model decided; parameters named there come out the same.
    ``vocabulary_multiple``: a vocabulary is padded to a multiple of this x tp.
    Raises PlanError when a rule or pin cannot be met, or when not one weight can be divided.
    """
    names = {name: name for name in captured.shapes} | dict(captured.aliases)
    asked = (rules or TensorRules()).of({name: real for name, real in names.items() if real in captured.shapes})
    whole = {name: TensorSharding(name, tuple(shape)) for name, shape in captured.shapes.items()}
    if tp == 1:
        return Sharding(1, whole, dict.fromkeys(whole, "whole: one tensor-parallel rank"))
    choices = _choices(captured, tp, asked, pins or {})
    p = _propagate(captured, tp, choices, vocabulary_multiple)
    tensors = {name: _tensor(t, p.held.get(name)) for name, t in whole.items()}
    reasons = {name: p.why.get(name) or _whole_because(p, name) for name in tensors}
    _check(tensors, reasons, asked, pins or {})
    if not p.held:
        why = next((f"{name} is {text}" for name, text in reasons.items()), "the graph reads no parameter")
        reason = f"not one weight can be divided over {tp} ranks: {why}"
        raise PlanError("tensor parallel size", tp, reason, "Use 1, or a size that divides heads and features")
    return Sharding(tp, tensors, reasons, p.decisions, p.layouts)


def _choices(
    captured: Captured, tp: int, asked: Mapping[str, tuple[str, str]], pins: Mapping[str, TensorSharding]
) -> Choices:
    choices = Choices(roles(captured))
    for name, (choice, pattern) in asked.items():
        if choice == "replicate":
            choices.banned[name] = f"the rule {pattern}=replicate asks for it"
    choices.row = tuple(name for name, (choice, _) in asked.items() if choice == "row")
    for name, pin in pins.items():
        if name not in captured.shapes:
            continue
        if pin.dim is None:
            choices.banned[name] = "another capture of the model decided so"
        elif pin.padded is None:
            extent = pin.shape[pin.dim]
            blocks = (extent // pin.blocks,) * pin.blocks if isinstance(pin.blocks, int) else pin.blocks
            if len(blocks) > 1:
                choices.blocks[choices.role(name), extent] = blocks
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


def _check(
    tensors: Mapping[str, TensorSharding],
    reasons: Mapping[str, str],
    asked: Mapping[str, tuple[str, str]],
    pins: Mapping[str, TensorSharding],
) -> None:
    for name, pin in pins.items():
        if name in tensors and tensors[name] != pin:
            reason = f"this capture makes it {_text(tensors[name])} ({reasons[name]}), the first one {_text(pin)}"
            remedy = "Capture both from the same model, or set tensor-parallel rules that hold in both"
            raise PlanError("sharding of", name, reason, remedy)
    for name, (choice, pattern) in asked.items():
        kind = reasons[name].partition(" ")[0]
        met = {"column": ("column", "vocabulary"), "row": ("row",), "vocabulary": ("vocabulary", "column")}
        if choice != "replicate" and kind not in met[choice]:
            reason = f"{name} cannot be divided so: it is {reasons[name]}"
            raise PlanError("tensor-parallel rule", f"{pattern}={choice}", reason, "Leave the rule out, or change it")


def _text(tensor: TensorSharding) -> str:
    if tensor.dim is None:
        return "whole"
    padded = f", padded to {tensor.padded}" if tensor.padded else ""
    return f"divided along dimension {tensor.dim} in {tensor.blocks} block(s){padded}"
