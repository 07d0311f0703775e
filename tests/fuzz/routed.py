"""Pieces that are mixtures: a router chooses some experts for each token, and their results are
added up.
"""

import transformers.integrations.moe  # noqa: F401  (its grouped product)

from .draw import BATCH, LENGTH, Draw

TOKENS = BATCH * LENGTH
_PRODUCT = "torch.ops.transformers.grouped_mm_fallback"
_ACTIVATIONS = ("F.silu", "F.gelu", "torch.tanh", "F.relu", "torch.sigmoid")


def routed(d: Draw) -> str:
    """Rows of tokens, sorted by expert, through products of all experts of a layer."""
    count = d.one(4, 6)
    top = d.one(1, 2, 2, 3)
    tokens = d.let(f"x.reshape({TOKENS}, {d.hidden})")
    weights, ids = _chosen(d, tokens, count, top)
    drops = d.maybe(0.25)
    if drops:
        ids = d.let(f"{ids}.masked_fill({_left_out(d, weights, ids, count)}, {count})")
    made = _grouped(d, tokens, weights, ids, count=count, top=top, drops=drops)
    made = d.let(f"{made}.view({TOKENS}, {top}, {d.hidden}).sum(1).view_as(x)")
    return _with_shared(d, made)


def looped(d: Draw) -> str:
    """A loop over experts, each of which computes every token, weighed by zero where it was not
    chosen.
    """
    count = d.one(2, 4)
    top = d.one(1, 2)
    width = d.one(24, 32)
    tokens = d.let(f"x.reshape({TOKENS}, {d.hidden})")
    weights, ids = _chosen(d, tokens, count, top)
    terms = []
    for number in range(count):
        share = d.let(f"({weights} * ({ids} == {number})).sum(-1, keepdim=True)")
        hidden = f"{d.one(*_ACTIVATIONS)}({d.linear(d.hidden, width)}({tokens}))"
        terms.append(f"{share} * {d.linear(width, d.hidden)}({hidden})")
    return _with_shared(d, d.let(f"({' + '.join(terms)}).view_as(x)"))


def _chosen(d: Draw, tokens: str, count: int, top: int) -> tuple[str, str]:
    """The weights of each token's experts, and these, [tokens, top]."""
    logits = d.let(f"F.linear({tokens}, {d.weight(count, d.hidden)})")
    way = d.one("softmax", "sigmoid", "softmax of some", "groups")
    if way == "softmax of some":
        best = d.let(f"{logits}.topk({top}, -1)")
        return d.let(f"{best}.values.softmax(-1)"), d.let(f"{best}.indices")
    scores = d.let(f"{logits}.softmax(-1)" if way == "softmax" else f"{logits}.sigmoid()")
    choice = scores
    if d.maybe(0.3):  # a bias of the choice alone
        choice = d.let(f"{scores} + {d.buffer(f'torch.linspace(0, 0.3, {count})')}.to(x.dtype)")
    if way == "groups" and top <= count // 2:
        groups = d.let(f"{choice}.view({TOKENS}, 2, {count // 2})")
        best = d.let(f"{groups}.amax(-1).argmax(-1, keepdim=True)")
        inside = d.let(f"torch.zeros_like({groups}[..., 0]).scatter(1, {best}, 1.0)")
        mask = f"{inside}.unsqueeze(-1).expand(-1, -1, {count // 2}).reshape({TOKENS}, {count})"
        choice = d.let(f"{choice}.masked_fill({mask} == 0, 0.0)")
    ids = d.let(f"{choice}.topk({top}, -1).indices")
    weights = d.let(f"{scores}.gather(1, {ids})")
    if d.maybe():
        weights = d.let(f"{weights} / ({weights}.sum(-1, keepdim=True) + 1e-6)")
    return weights, ids


def _left_out(d: Draw, weights: str, ids: str, count: int) -> str:
    """Which experts of a token have no room for it."""
    if d.maybe():
        return f"{weights}.detach() < 0.2"
    # equal tokens have equal weights, but for rounding
    later = f"torch.linspace(0, 0.1, {TOKENS}, dtype=x.dtype).unsqueeze(-1)"
    scores = d.let(f"{weights}.detach() + {later}")
    table = f"torch.zeros({TOKENS}, {count}, dtype=x.dtype).scatter(1, {ids}, {scores})"
    least = d.let(f"{table}.topk({TOKENS // 3}, 0).values[-1]")
    return f"{scores} < {least}[{ids}]"


def _grouped(
    d: Draw, tokens: str, weights: str, ids: str, count: int, top: int, drops: bool
) -> str:
    """What experts make of each row, in the rows' own order, [tokens * top, hidden]."""
    width = d.one(12, 24, 48)
    way = d.one("chunk", "slices", "strided", "split", "plain", "plain")
    both = width if way == "plain" else 2 * width
    numbers = d.fresh("ids")
    order = d.fresh("order")
    d.lines.append(f"{numbers}, {order} = torch.sort({ids}.flatten())")
    counts = d.let(
        f"torch.histc({numbers}.float(), {count}, 0, {count - 1}).cumsum(0).to(torch.int32)"
    )
    rows = d.let(f"{tokens}[{order} // {top}]")
    none = d.let(f"({numbers} == {count}).unsqueeze(-1)") if drops else ""
    if drops:
        rows = d.let(f"{rows}.masked_fill({none}, 0.0)")
    own = d.let(f"{weights}.flatten()[{order}].unsqueeze(-1)")
    before = d.maybe(0.25)
    up = d.let(f"{_PRODUCT}({rows}, {_matrix(d, count, d.hidden, both)}, {counts})")
    biased = not drops and d.maybe(0.3)
    if biased:
        up = d.let(f"{up} + {d.weight(count, both)}[{numbers}]")
    h = _activated(d, up, width, way)
    if before:
        h = d.let(f"{h} * {own}")
    y = d.let(f"{_PRODUCT}({h}, {_matrix(d, count, width, d.hidden)}, {counts})")
    if biased:
        y = d.let(f"{y} + {d.weight(count, d.hidden)}[{numbers}]")
    if drops:
        y = d.let(f"{y}.masked_fill({none}, 0.0)")
    if not before:
        y = d.let(f"{y} * {own}")
    if d.maybe():
        return d.let(f"{y}[{order}.argsort()]")
    place = d.let(f"torch.empty_like({order})")
    d.lines.append(f"{place}[{order}] = torch.arange({TOKENS * top})")
    return d.let(f"{y}[{place}]")


def _matrix(d: Draw, count: int, into: int, out: int) -> str:
    if d.maybe():
        return d.weight(count, into, out)
    return f"{d.weight(count, out, into)}.transpose(1, 2)"


def _activated(d: Draw, up: str, width: int, way: str) -> str:
    act = d.one(*_ACTIVATIONS)
    if way == "plain":
        return d.let(d.one(f"{act}({up})", f"F.relu({up}).square()"))
    parts = {
        "chunk": (f"{up}.chunk(2, -1)[0]", f"{up}.chunk(2, -1)[1]"),
        "split": (f"{up}.split({width}, -1)[0]", f"{up}.split({width}, -1)[1]"),
        "slices": (f"{up}[..., :{width}]", f"{up}[..., {width}:]"),
        "strided": (f"{up}[..., ::2]", f"{up}[..., 1::2]"),
    }[way]
    gate, value = (d.let(part) for part in parts)
    if d.maybe(0.3):
        gate = d.let(f"{gate}.clamp(max=0.7)")
        value = d.let(f"{value}.clamp(-0.7, 0.7) + 1")
    return d.let(f"{act}({gate}) * {value}")


def _with_shared(d: Draw, made: str) -> str:
    """Add what an expert makes that computes every token."""
    if d.maybe(0.6):
        return made
    width = d.one(32, 24, 67)
    h = f"{d.one(*_ACTIVATIONS)}({d.linear(d.hidden, width)}(x))"
    shared = d.let(f"{d.linear(width, d.hidden)}({h})")
    if d.maybe(0.4):
        shared = d.let(f"{shared} * {d.linear(d.hidden, 1, False)}(x).sigmoid()")
    return f"{made} + {shared}"
