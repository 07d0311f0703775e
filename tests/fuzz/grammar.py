"""Random modules as source text: pieces drawn from a seed, each [2, 6, hidden] -> [2, 6, hidden], between an embedding
and a loss. A piece draws from a stream of its own, so that a module shrinks by leaving pieces out."""

import random
import re
from collections.abc import Callable, Sequence
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
    """One piece being written: its random choices, its parameters and its lines. ``x`` is what it reads."""

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


# ---- what is done with divided features -----------------------------------------------------------------------------
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
    """A chain of elementwise operations, and of those along other dimensions, on features [2, 6, width]."""
    for _ in range(d.rng.randint(1, most)):
        if d.maybe(0.55):
            text = d.one(*UNARY)
            h = d.let(text.replace("{}", h))
            continue
        other = d.one("number", "parameter", "row", "mean", "slice", "projection", "position", "constant")
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


# ---- pieces ---------------------------------------------------------------------------------------------------------
def mlp(d: Draw) -> str:
    width = d.one(*WIDTHS)
    if d.maybe(0.4):
        fused = d.let(f"{d.linear(d.hidden, 2 * width)}(x)")
        gate, up = d.let(f"{fused}.chunk(2, -1)[0]"), d.let(f"{fused}[..., {width}:]")
        h = d.let(f"{d.one('F.silu', 'F.gelu', 'torch.tanh', 'F.relu')}({gate}) * {up}")
    else:
        h = d.let(f"{d.linear(d.hidden, width)}(x)")
    return f"{d.linear(width, d.hidden)}({features(d, h, width)})"


def low_rank(d: Draw) -> str:
    width, rank = d.one(*WIDTHS), d.one(2, 4, 8)
    h = d.let(f"{d.linear(rank, width)}({d.linear(d.hidden, rank)}(x))")
    back = d.let(f"{d.linear(width, rank)}({features(d, h, width, 2)})")
    return f"{d.linear(rank, d.hidden)}({back})"


def _rotary(d: Draw, h: str, size: int) -> str:
    """h [2, n, 6, size]."""
    angles = d.buffer(f"torch.outer(torch.arange({LENGTH}.0), torch.linspace(1, 0.1, {size // 2})).double()")
    way = d.one("halves", "pairs", "complex")
    if way == "complex":
        z = d.let(f"torch.view_as_complex({h}.double().reshape(2, -1, {LENGTH}, {size // 2}, 2))")
        turned = f"{z} * torch.polar(torch.ones_like({angles}), {angles})"
        return d.let(f"torch.view_as_real({turned}).flatten(3).to({h}.dtype)")
    if way == "pairs":
        cos, sin = (f"{angles}.{f}().repeat_interleave(2, -1).to({h}.dtype)" for f in ("cos", "sin"))
        turned = f"torch.stack((-{h}[..., 1::2], {h}[..., ::2]), -1).flatten(-2)"
    else:
        cos, sin = (f"torch.cat(({angles}, {angles}), -1).{f}().to({h}.dtype)" for f in ("cos", "sin"))
        turned = f"torch.cat((-{h}[..., {size // 2}:], {h}[..., : {size // 2}]), -1)"
    return d.let(f"{h} * {cos} + {turned} * {sin}")


def _head_norm(d: Draw, h: str, heads: int, size: int) -> str:
    way = d.one("rms", "layer", "unit", "softmax", "per head")
    if way == "layer":
        return d.let(f"F.layer_norm({h}, ({size},), {d.weight(size)}, {d.weight(size)})")
    if way == "unit":
        return d.let(f"F.normalize({h}, dim=-1)")
    if way == "softmax":
        return d.let(f"{h}.softmax(-1)")
    normed = f"{h} * torch.rsqrt({h}.square().mean(-1, keepdim=True) + 1e-3)"
    return d.let(f"{normed} * {d.weight(heads, 1, size) if way == 'per head' else d.weight(size)}")


def _scores(d: Draw, q: str, k: str, v: str, heads: int, size: int) -> str:
    if d.maybe(0.35):
        mask = d.one("is_causal=True", "attn_mask=(ids != ids[:, :1]).unsqueeze(1).unsqueeze(1) | True", "")
        return d.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{', ' + mask if mask else ''})")
    s = d.let(d.one(f"{q} @ {k}.transpose(-1, -2) / {size**0.5}", f"torch.einsum('bnqd,bnkd->bnqk', {q}, {k}) * 0.4"))
    way = d.one("causal", "key", "none", "bias", "slopes", "talking", "across", "sink")
    if way == "causal":
        s = d.let(f"{s}.masked_fill(torch.ones({LENGTH}, {LENGTH}, dtype=torch.bool).triu(1), float('-inf'))")
    elif way == "key":
        s = d.let(f"{s}.masked_fill((ids % 5 == 0).view({BATCH}, 1, 1, -1), -30.0)")
    elif way == "bias":
        s = d.let(f"{s} + {d.weight(heads, LENGTH, LENGTH)}")
    elif way == "slopes":
        s = d.let(f"{s} + torch.arange({LENGTH}) * {d.weight(heads, 1, 1)}")
    elif way == "talking":
        s = d.let(f"torch.einsum('bnqk,nm->bmqk', {s}, {d.weight(heads, heads)})")
    if way == "across":
        return d.let(f"({s}.softmax(-1) * {s}.softmax(1)) @ {v}")
    if way == "sink":
        sink = f"{d.weight(heads)}.view(1, -1, 1, 1).expand({BATCH}, -1, {LENGTH}, 1)"
        return d.let(f"torch.cat([{s}, {sink}], -1).softmax(-1)[..., :-1] @ {v}")
    return d.let(f"{s}.softmax(-1) @ {v}")


def attention(d: Draw) -> str:
    heads, size = d.one(4, 4, 8, 2, 3), d.one(2, 4, 6)
    full = heads * size
    way = d.one("chunk", "three outside", "three inside", "split", "separate", "fused head")
    h = None if way == "separate" else d.let(f"{d.linear(d.hidden, 3 * full)}(x)")
    shape = f"{BATCH}, {LENGTH}"
    if way == "three outside":
        parts = [d.let(f"{h}.view({shape}, 3, {heads}, {size}).permute(2, 0, 3, 1, 4)[{i}]") for i in range(3)]
    elif way == "three inside":
        parts = [d.let(f"{h}.view({shape}, {heads}, 3, {size})[..., {i}, :].transpose(1, 2)") for i in range(3)]
    elif way == "fused head":
        views = f"{h}.view({shape}, {heads}, {3 * size}).transpose(1, 2)"
        parts = [d.let(f"{views}.split({size}, -1)[{i}]") for i in range(3)]
    else:
        flat = {"chunk": f"{h}.chunk(3, -1)", "split": f"{h}.split({full}, -1)"}
        flats = [f"{flat[way]}[{i}]" if h else f"{d.linear(d.hidden, full)}(x)" for i in range(3)]
        parts = [d.let(f"{text}.view({shape}, {heads}, {size}).transpose(1, 2)") for text in flats]
    q, k, v = parts
    if d.maybe(0.35):
        q, k = _head_norm(d, q, heads, size), _head_norm(d, k, heads, size)
    if d.maybe(0.4):
        q, k = _rotary(d, q, size), _rotary(d, k, size)
    o = _scores(d, q, k, v, heads, size)
    if d.maybe(0.2):
        o = d.let(f"{o} * {d.weight(heads, 1, 1)}.sigmoid()")
    return f"{d.linear(full, d.hidden)}({o}.transpose(1, 2).{d.one(f'reshape({shape}, {full})', 'flatten(2)')})"


def grouped_query(d: Draw) -> str:
    heads, groups, size = 8, d.one(1, 2, 2, 4), d.one(2, 4)
    per = heads // groups
    q = d.let(f"{d.linear(d.hidden, heads * size)}(x).view({BATCH}, {LENGTH}, {heads}, {size}).transpose(1, 2)")
    if d.maybe(0.4):
        both = d.let(f"{d.linear(d.hidden, 2 * groups * size)}(x)")
        kv = [f"{both}.chunk(2, -1)[{i}]" for i in range(2)]
    else:
        kv = [f"{d.linear(d.hidden, groups * size)}(x)" for _ in range(2)]
    k, v = (d.let(f"{text}.view({BATCH}, {LENGTH}, {groups}, {size}).transpose(1, 2)") for text in kv)
    if d.maybe(0.5):
        o = d.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={d.maybe()}, enable_gqa=True)")
    else:
        spread = f".unsqueeze(2).expand(-1, -1, {per}, -1, -1).reshape({BATCH}, {heads}, {LENGTH}, {size})"
        text = d.one(f".repeat_interleave({per}, 1)", spread)
        o = _scores(d, q, d.let(k + text), d.let(v + text), heads, size)
    return f"{d.linear(heads * size, d.hidden)}({o}.transpose(1, 2).flatten(2))"


def heads_alone(d: Draw) -> str:
    """Norms, scans, mixtures and gates per head, without attention."""
    heads, size = d.one(4, 8, 2), d.one(4, 6)
    h = d.let(f"{d.linear(d.hidden, heads * size)}(x).view({BATCH}, {LENGTH}, {heads}, {size})")
    for _ in range(d.rng.randint(1, 3)):
        h = d.let(
            d.one(
                f"F.rms_norm({h}, ({size},), {d.weight(size)}, 1e-3)",
                f"F.layer_norm({h}, ({heads}, {size}))",
                f"{h} * {h}.mean((2, 3), keepdim=True).sigmoid()",
                f"{h} * {h}.sum(-1, keepdim=True).tanh()",
                f"{h} - {h}.mean(2, keepdim=True)",
                f"{h}.softmax(2)",
                f"{h} * {d.weight(heads, 1)} + {d.weight(size)}",
                f"{h}.cumsum(1) / 4",
                f"{h}.cumsum(2) / 4",
                f"torch.einsum('bsnd,nde->bsne', {h}, {d.weight(heads, size, size)})",
                f"torch.einsum('bsnd,de->bsne', {h}, {d.weight(size, size)})",
                f"torch.einsum('bsnd,bsmd->bsnm', {h}, {h}).softmax(-1) @ {h}",
                f"{h}.unbind(2)[0].unsqueeze(2) + {h}",
                f"torch.cat([{h}[:, :, :1], {h}[:, :, 1:]], 2)",
                f"{h}.transpose(1, 2).reshape({BATCH}, {heads}, -1).view_as({h}.transpose(1, 2)).transpose(1, 2)",
                f"{h} * torch.rsqrt({h}.square().mean((2, 3), keepdim=True) + 1e-3)",
                f"{h}.amax(2, keepdim=True) * {h}",
                f"{h}.index_select(2, torch.arange({heads - 1}, -1, -1))",
            )
        )
    return f"{d.linear(heads * size, d.hidden)}({h}.flatten(2))"


def wide_norm(d: Draw) -> str:
    """A norm or gate over all divided features."""
    width = d.one(*WIDTHS)
    h = d.let(f"{d.linear(d.hidden, width)}(x)")
    h = d.let(
        d.one(
            f"{h} * torch.rsqrt({h}.square().mean(-1, keepdim=True) + 1e-3) * {d.weight(width)}",
            f"F.layer_norm({h}, ({width},), {d.weight(width)}, {d.weight(width)})",
            f"{h} * {h}.mean(-1, keepdim=True).sigmoid()",
            f"{h} * {h}.sum(-1, keepdim=True).tanh()",
            f"{h} - {h}.mean(-1, keepdim=True)",
            f"{h} / (1 + {h}.norm(dim=-1, keepdim=True))",
            f"{h}.softmax(-1) * {h}",
            f"{h} - {h}.amax(-1, keepdim=True).detach()",
            f"{h} - {h}.logsumexp(-1, keepdim=True)",
            f"{h} * {h}.var(-1, keepdim=True)",
        )
    )
    return f"{d.linear(width, d.hidden)}({features(d, h, width, 1)})"


def experts(d: Draw) -> str:
    count, width = d.one(4, 2, 3), d.one(8, 12, 67)
    up, down = d.weight(count, d.hidden, width), d.weight(count, width, d.hidden)
    gate = d.let(f"{d.linear(d.hidden, count, False)}(x).softmax(-1)")
    way = d.one("einsum", "bmm", "chosen", "loop")
    if way == "einsum":
        h = d.let(f"F.silu(torch.einsum('bsh,ehf->bsef', x, {up}))")
        return f"torch.einsum('bsef,efh,bse->bsh', {h}, {down}, {gate})"
    if way == "bmm":
        tokens = d.let(f"x.reshape(1, -1, {d.hidden}).expand({count}, -1, -1)")
        h = d.let(f"torch.bmm(F.gelu(torch.bmm({tokens}, {up})), {down})")
        return f"({h} * {gate}.reshape(-1, {count}).t().unsqueeze(-1)).sum(0).view_as(x)"
    if way == "chosen":
        top = d.let(f"{gate}.topk(1, -1)")
        h = d.let(f"torch.einsum('bsh,bshf->bsf', x, {up}[{top}.indices.squeeze(-1)])")
        return f"torch.einsum('bsf,bsfh->bsh', {h}.tanh(), {down}[{top}.indices.squeeze(-1)]) * {top}.values"
    terms = [f"{gate}[..., {i}:{i + 1}] * (F.relu(x @ {up}[{i}]) @ {down}[{i}])" for i in range(count)]
    return " + ".join(terms)


def positions(d: Draw) -> str:
    """Gather and scatter along positions."""
    width = d.one(*WIDTHS)
    h = d.let(f"{d.linear(d.hidden, width)}(x)")
    index = d.let(f"(ids % {LENGTH}).unsqueeze(-1).expand(-1, -1, {width})")
    h = d.let(
        d.one(
            f"{h}.gather(1, {index})",
            f"torch.zeros_like({h}).scatter_add(1, {index}, {h})",
            f"torch.zeros_like({h}).scatter(1, {index}[:, :1], {h}[:, :1]) + {h}",
            f"{h}[:, torch.arange({LENGTH - 1}, -1, -1)]",
            f"{h}.index_select(1, torch.tensor([0, 0, 2, 1, 5, 3]))",
            f"{h}.new_zeros({BATCH}, {LENGTH}, {width}).index_add(1, torch.tensor([1, 1, 2, 3, 5, 0]), {h})",
            f"{h}.index_put((torch.tensor([0, 1]), torch.tensor([2, 3])), {h}[:, 0])",
            f"{h}[torch.tensor([1, 0])]",
            f"{h}.flatten(0, 1)[ids.flatten() % {BATCH * LENGTH}].view_as({h})",
            f"{h}.slice_scatter({h}[:, :2] * 2, 1, 3, 5)",
            f"{h}.select_scatter({h}[:, 0].tanh(), 1, 4)",
        )
    )
    return f"{d.linear(width, d.hidden)}({features(d, h, width, 1)})"


def tied(d: Draw) -> str:
    width = d.one(*WIDTHS)
    w = d.weight(width, d.hidden)
    h = features(d, d.let(f"F.linear(x, {w})"), width, 2)
    by_einsum = f"torch.einsum('bsf,fh->bsh', {h}, {w})"
    return d.one(f"{h} @ {w}", f"F.linear({h}, {w}.t())", by_einsum, f"{h}.matmul({w}) / 2")


def function_of_weight(d: Draw) -> str:
    width = d.one(*WIDTHS)
    w, v = d.weight(width, d.hidden), d.weight(d.hidden, width)
    forms = (
        "{}",
        "{}.exp() - 0.9",
        "{} * 0.5",
        "F.softplus({})",
        "{} + 0.1",
        "{}.tanh()",
        "({}.square() + 0.1).sqrt()",
    )
    w = d.one(*forms).format(w)
    w = d.one(w, f"({w}) / ({w}).norm(dim=1, keepdim=True)", f"({w}) * {d.weight(width, 1)}")
    h = features(d, d.let(f"F.linear(x, {w})"), width, 1)
    return f"F.linear({h}, {d.one(*forms).format(v)})"


def convolution(d: Draw) -> str:
    width = d.one(32, 48, 24, 67)
    name = d.fresh("conv")
    groups = d.one(width, width, width, 1)
    d.made.append(f"self.{name} = nn.Conv1d({width}, {width}, 3, groups={groups}, padding=2)")
    h = d.let(f"{d.linear(d.hidden, width)}(x).transpose(1, 2)")
    h = d.let(f"self.{name}({h})[..., :{LENGTH}].transpose(1, 2)")
    return f"{d.linear(width, d.hidden)}({features(d, h, width, 1)})"


def pieces_of_features(d: Draw) -> str:
    a, b = d.one((16, 16), (32, 16), (8, 24), (67, 67), (12, 12))
    h = d.let(f"{d.linear(d.hidden, a + b)}(x)")
    way = d.one("split", "slices", "joined", "strided", "stacked", "flip")
    if way == "joined":
        h = d.let(f"torch.cat([{d.linear(d.hidden, a)}(x), {d.linear(d.hidden, b)}(x).tanh()], -1)")
        return f"{d.linear(a + b, d.hidden)}({h})"
    if way == "strided":
        return f"{d.linear((a + b) // 2, d.hidden)}({h}[..., ::2].tanh() * {h}[..., 1::2])"
    if way == "stacked":
        return f"{d.linear(a + b, d.hidden)}(torch.stack([{h}, {h}.tanh(), {h} * 2], 1).mean(1))"
    if way == "flip":
        return f"{d.linear(a + b, d.hidden)}({h}.flip(-1))"
    first, second = (
        (f"{h}.split([{a}, {b}], -1)[0]", f"{h}.split([{a}, {b}], -1)[1]")
        if way == "split"
        else (f"{h}[..., :{a}]", f"{h}[..., {a}:]")
    )
    one = d.let(f"{d.linear(a, d.hidden)}({first}.tanh())")
    return f"{one} + {d.linear(b, d.hidden)}({features(d, d.let(second), b, 1)})"


def written(d: Draw) -> str:
    """In-place writes to values, pieces of them, and new ones."""
    width = d.one(*WIDTHS)
    h = d.let(f"{d.linear(d.hidden, width)}(x){d.one('', '.clone()', ' * 1.5')}")
    way = d.rng.randrange(7)
    number, other = d.weight(1), d.linear(d.hidden, width)
    d.lines += (
        [f"{h}[:, 1:3] = {h}[:, :2] * 2"],
        [f"{h}.mul_(0.5).add_({number})"],
        [f"{h} += {other}(x)"],
        [f"{h}[..., :8] *= 2"],
        [f"{h}[:, 0] = 0.0", f"{h}[:, 1] += {other}(x)[:, 0]"],
        [f"{h}_new = torch.zeros_like({h})", f"{h}_new[:, 2:] = {h}[:, :-2]", f"{h} = {h} + {h}_new"],
        [f"{h}_view = {h}.view(-1, {width})", f"{h}_view.clamp_(min=-0.4)", f"{h}_view[3].zero_()"],
    )[way]
    return f"{d.linear(width, d.hidden)}({features(d, h, width, 1)})"


def whole(d: Draw) -> str:
    """Work on the whole features that reads parameters."""
    return d.one(
        f"F.layer_norm(x, ({d.hidden},), {d.weight(d.hidden)}, {d.weight(d.hidden)})",
        f"x * {d.weight(1)} + {d.weight(LENGTH, 1)}",
        f"x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * {d.weight(d.hidden)}",
        f"x.cumsum(1) / {LENGTH} + {d.weight(LENGTH, d.hidden)}",
        f"{d.linear(d.hidden, d.hidden)}(x).masked_fill((ids % 3 == 0).unsqueeze(-1), 0.0)",
        f"x @ {d.weight(d.hidden, d.hidden)}",
    )


def branch(d: Draw) -> str:
    """A choice by a value of the batch, which a capture guards."""
    one, other = d.linear(d.hidden, 32, False), d.linear(32, d.hidden, False)
    d.lines += [f"{one[5:]}_h = {one}(x)", "if int(ids[0, 0]) > 15:", f"    {one[5:]}_h = {one[5:]}_h.tanh()"]
    return f"{other}({one[5:]}_h)"


def dropped(d: Draw) -> str:
    width = d.one(32, 67)
    h = d.let(f"F.dropout({d.linear(d.hidden, width)}(x), 0.3)")
    return f"F.dropout({d.linear(width, d.hidden)}({h}), 0.2)"


PIECES: dict[str, Callable[[Draw], str]] = {
    piece.__name__: piece
    for piece in (
        *(mlp, low_rank, attention, grouped_query, heads_alone, wide_norm, experts, positions, tied),
        *(function_of_weight, convolution, pieces_of_features, written, whole),
    )
}
RARE = {"branch": branch, "dropped": dropped}

LOSSES = {
    "cross entropy": "F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
    "ignored": "F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(labels % 3 == 0, -100), reduction='sum')",
    "smoothed": "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)",
    "log softmax": "-logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()",
    "log softmax rows": "-F.log_softmax(logits, -1).flatten(0, 1)[torch.arange(12), labels.flatten()].mean()",
    "nll": "F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), labels.flatten(), ignore_index=3)",
    "logsumexp": "(logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).mean()",
    "stable": "((logits - logits.amax(-1, keepdim=True)).exp().sum(-1).log() + logits.amax(-1)"
    " - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).mean()",
    "stable by max": "((logits - logits.max(-1, keepdim=True)[0]).exp().sum(-1).log() + logits.max(-1).values"
    " - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).mean() + (logits.argmax(-1) == labels).sum() / 7",
    "softmax": "-(logits.softmax(-1) + 1e-3).log().gather(-1, labels.unsqueeze(-1)).mean()",
    "smoothed by hand": "-(0.9 * logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)"
    " + 0.1 * logits.log_softmax(-1).mean(-1)).mean()",
    "one hot": "-(F.one_hot(labels, logits.shape[-1]).to(logits.dtype) * logits.log_softmax(-1)).sum(-1).mean()",
    "z": "F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * logits.logsumexp(-1).square().mean()",
    "squares": "(logits.tanh() - 0.1).square().mean()",
}


def recipe(seed: int) -> Recipe:
    """The module of a seed."""
    rng = random.Random(seed)
    names = rng.sample(list(PIECES), k=rng.randint(1, 3))
    if seed % 20 == 7:
        names.insert(rng.randrange(len(names)), "branch")
    if seed % 20 == 13:
        names.insert(rng.randrange(len(names)), "dropped")
    pieces = tuple((name, rng.randrange(2**31)) for name in names)
    loss = rng.choice([*LOSSES, "cross entropy", "hidden"])
    return Recipe(seed, rng.choice((16, 24)), rng.choice((67, 96, 130, 40, 64)), rng.random() < 0.5, pieces, (loss, 0))


def source(made: Recipe) -> str:
    """The module as text: forward(ids, labels) -> loss."""
    init = [f"self.table = nn.Embedding({made.vocabulary}, {made.hidden})"]
    body = ["x = self.table(ids)"]
    for index, (name, stream) in enumerate(made.pieces):
        d = Draw(stream, f"p{index}", made.hidden)
        result = ({**PIECES, **RARE})[name](d)
        lines = [*d.lines, f"x = x + 0.5 * torch.tanh({result})" if d.maybe(0.7) else f"x = {result}"]
        read = set(re.findall(r"self\.(\w+)", "\n".join(lines)))
        init += [line for line in d.made if re.split(r"['. ]+", line.removeprefix("self.register_buffer("))[1] in read]
        body += [f"# {name}", *lines]
    if made.loss[0] == "hidden":
        body.append("return x.square().mean()")
    else:
        head = "F.linear(x, self.table.weight)" if made.tied else "self.head(x)"
        init += [] if made.tied else [f"self.head = nn.Linear({made.hidden}, {made.vocabulary}, bias=False)"]
        body += [f"logits = {head}", f"return {LOSSES[made.loss[0]]}"]
    return "\n".join(
        [HEAD, *(f"        {line}" for line in init), "", "    def forward(self, ids, labels):", *_indented(body), ""]
    ).replace("super().__init__()\n\n", "super().__init__()\n")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"        {line}" for line in lines]
