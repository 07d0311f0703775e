"""What pieces of random modules are drawn with: seeded choices of shapes, names and operations."""

import random
from dataclasses import dataclass, replace

BATCH, LENGTH = 2, 6


WIDTHS = (32, 48, 67, 70, 66, 129, 24)


HEAD = """import torch
import torch.nn.functional as F
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
"""


@dataclass(frozen=True)
class Recipe:
    """What a module is made of: sizes, and (piece, its stream) in order."""

    seed: int
    hidden: int
    vocabulary: int
    tied: bool
    pieces: tuple[tuple[str, int], ...]
    loss: tuple[str, int]

    def without(self, index: int) -> "Recipe":
        return replace(self, pieces=self.pieces[:index] + self.pieces[index + 1 :])


class Draw:
    """One piece being written: its random choices, its parameters and its lines. ``x`` is what it
    reads.
    """

    def __init__(self, stream: int, name: str, hidden: int):
        self.rng = random.Random(stream)
        self.name, self.hidden = name, hidden
        self.made: list[str] = []
        self.lines: list[str] = []
        self.count = 0

    def one(self, *choices):
        return self.rng.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{self.name}_{kind}{self.count}"

    def weight(self, *shape: int) -> str:
        name = self.fresh("w")
        self.made.append(f"self.{name} = nn.Parameter(torch.zeros({', '.join(map(str, shape))}))")
        return f"self.{name}"

    def linear(self, into: int, out: int, bias: bool | None = None) -> str:
        name = self.fresh("linear")
        bias = self.maybe(0.4) if bias is None else bias
        self.made.append(f"self.{name} = nn.Linear({into}, {out}, bias={bias})")
        return f"self.{name}"

    def buffer(self, value: str) -> str:
        name = self.fresh("b")
        self.made.append(f"self.register_buffer('{name}', {value}, persistent=False)")
        return f"self.{name}"

    def let(self, value: str) -> str:
        name = self.fresh("v")
        self.lines.append(f"{name} = {value}")
        return name


# ---- what is done with divided features ----------------------------------------------------------
UNARY = """
    {}.tanh()|F.gelu({})|F.silu({})|F.relu({})|{}.sigmoid()|{}.exp().tanh()|{}.cos()|{}.sin()|{}.square()|{}.abs()
    ({}.abs() + 0.3).sqrt()|({}.square() + 0.3).log()|({}.square() + 0.5).rsqrt()|1.0 / ({}.square() + 1.0)
    {}.clamp(min=0.1)|{}.clamp(-0.5, 0.5)|F.softplus({})|F.elu({})|{} ** 2|{} ** 0|({}.abs() + 0.2) ** 0.5|-{}
    F.leaky_relu({})|{} - 0.3|2.0 - {}|{}.masked_fill({} > 0.4, -0.7)|torch.where({} > 0, {}, 0.25)|F.hardswish({})
    {}.relu().sqrt()|({} >= 0).to({}.dtype) * {}|{}.softmax(1)|{}.softmax(0)|{}.cumsum(1)|{}.flip(1)|{}.roll(1, 1)
    torch.nan_to_num({} / ({} + 0.01 * {}.sign()))|{}.float().tanh().to({}.dtype)|torch.log1p({}.abs())|{}.sign() * {}
    F.gelu({}, approximate='tanh')|{}.detach() * {}|torch.maximum({}, -{})|{}.logsumexp(1, keepdim=True) + {}
    {} - {}.amax(1, keepdim=True)|{} / (1.0 + {}.std(1, keepdim=True))|{}.sort(1).values|{} * {}.mean(1, keepdim=True)
    {}.transpose(0, 1).contiguous().transpose(0, 1)|{}.cumsum(1) / 3.0|{}.tril()|torch.addcmul({}, {}, {}, value=0.5)
    ({}.prod(1, keepdim=True) + {})|{} / {}.norm(dim=1, keepdim=True).clamp(min=0.1)|F.pad({}, (0, 0, 1, 0))[:, 1:]
    torch.cat([{}, {}.exp().sin()], 1)[:, 3:9]|torch.stack([{}, {}.cos()]).sum(0)
    {}.unsqueeze(1).expand(-1, 3, -1, -1).mean(1)|torch.minimum({}, {}.detach())|torch.erf({})|torch.expm1({}.tanh())
    F.hardtanh({})|F.mish({})|F.logsigmoid({})|({} < 0.2).logical_not() * {}|(({} > 0) & ({} < 0.5)).to({}.dtype)
    {} - {}.floor().detach()|torch.remainder({}, 0.7)|torch.fmod({}, 0.7)|torch.xlogy({}.abs() + 0.1, {}.abs() + 0.1)
    torch.logaddexp({}, -{})|{}.movedim(1, 0).movedim(0, 1)|{}.swapaxes(0, 1).swapaxes(0, 1)|{}.atan()|{}.sinh().tanh()
    {}.unflatten(1, (2, 3)).flatten(1, 2)|{}.repeat(1, 2, 1)[:, 2:8]|{}.narrow(1, 0, 6)|{}.unsqueeze(1).squeeze(1)
    {}.permute(2, 0, 1).tril().permute(1, 2, 0)|F.pad({}, (0, 0, 0, 2), value=0.3)[:, 2:]|F.log_softmax({}, 1)
    {}.max(1, keepdim=True).values * {}|{} * {}.topk(2, 1).values[:, :1]|{}.logcumsumexp(1)|{}.tanh().cumprod(1)
    {}.var(1, keepdim=True) * {}|torch.addcdiv({}, {}, {}.square() + 1.0)|{} * torch.full_like({}, 0.3)|{} + {}.round()
    {}.argmax(1, keepdim=True).to({}.dtype) * {}|F.glu(torch.cat([{}, {}], 1), 1)|torch.cat([{}, {}], 0)[1:3]
    {}.index_copy(1, torch.tensor([2]), {}[:, :1])|{}.unfold(1, 3, 1).mean(-1).repeat(1, 2, 1)[:, :6]
    ({} > 0).any(1, keepdim=True) * {}|~({} > 0) * {}|F.threshold({}, 0.1, -1)|{}.cumsum(1).flip(1)|F.relu6({})
""".replace("\n", "|").split("|")


UNARY = [text.strip() for text in UNARY if text.strip()]


BINARY = (
    "{a} + {b}|{a} * {b}|{a} - {b}|torch.sub({a}, {b}, alpha=2)|{a} / ({b}.abs() + 0.5)|torch.maximum({a}, {b})"
    "|torch.where({a} > {b}, {a}, {b})|torch.lerp({a}, {b}, 0.3)|{b} - {a}|{a} * {b}.sigmoid()"
    "|{b} / ({a}.square() + 0.7)"
    "|{a} * torch.tanh({b}) + {b}|(({a} - {b}).abs() + 0.2) ** 0.5|torch.atan2({a}, {b}.abs() + 0.5)"
    "|({b}.abs() + 0.5) ** {a}.tanh()|({a}.abs() + 0.5) ** {b}.tanh()|torch.addcmul({b}, {a}, {a})"
).split("|")


def features(d: Draw, h: str, width: int, most: int = 3) -> str:
    """A chain of elementwise operations, and of those along other dimensions, on features [2, 6,
    width].
    """
    for _ in range(d.rng.randint(1, most)):
        if d.maybe(0.55):
            text = d.one(*UNARY)
            h = d.let(text.replace("{}", h))
            continue
        other = d.one(
            "number", "parameter", "row", "mean", "slice", "projection", "position", "constant"
        )
        b = {
            "number": lambda: d.weight(1),
            "parameter": lambda: d.weight(width),
            "row": lambda: d.weight(LENGTH, 1),
            "mean": lambda: "x.mean(-1, keepdim=True)",
            "slice": lambda: "x[..., :1]",
            "projection": lambda: f"{d.linear(d.hidden, width)}(x)",
            "position": lambda: "ids.unsqueeze(-1).to(x.dtype) / 20",
            "constant": lambda: d.buffer(f"torch.linspace(-1, 1, {width})"),
        }[other]()
        h = d.let(d.one(*BINARY).replace("{a}", h).replace("{b}", d.let(b)))
    return h
