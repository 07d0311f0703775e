"""Random modules as source text: pieces drawn from a seed, each [2, 6, hidden] -> [2, 6, hidden],
between an embedding and a loss. A piece draws from a stream of its own, so that a module shrinks by
leaving pieces out."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from .attention import attention, grouped_query, heads_alone
from .draw import BATCH, HEAD, LENGTH, WIDTHS, Draw, Recipe, features
from .routed import looped, routed


# ---- pieces --------------------------------------------------------------------------------------
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
    terms = [
        f"{gate}[..., {i}:{i + 1}] * (F.relu(x @ {up}[{i}]) @ {down}[{i}])" for i in range(count)
    ]
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
        [
            f"{h}_new = torch.zeros_like({h})",
            f"{h}_new[:, 2:] = {h}[:, :-2]",
            f"{h} = {h} + {h}_new",
        ],
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
    d.lines += [
        f"{one[5:]}_h = {one}(x)",
        "if int(ids[0, 0]) > 15:",
        f"    {one[5:]}_h = {one[5:]}_h.tanh()",
    ]
    return f"{other}({one[5:]}_h)"


def dropped(d: Draw) -> str:
    width = d.one(32, 67)
    h = d.let(f"F.dropout({d.linear(d.hidden, width)}(x), 0.3)")
    return f"F.dropout({d.linear(width, d.hidden)}({h}), 0.2)"


PIECES: dict[str, Callable[[Draw], str]] = {
    piece.__name__: piece
    for piece in (
        mlp,
        low_rank,
        attention,
        grouped_query,
        heads_alone,
        wide_norm,
        experts,
        positions,
        tied,
        function_of_weight,
        convolution,
        pieces_of_features,
        written,
        whole,
    )
}


RARE = {"branch": branch, "dropped": dropped, "routed": routed, "looped": looped}


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
    return Recipe(
        seed,
        rng.choice((16, 24)),
        rng.choice((67, 96, 130, 40, 64)),
        rng.random() < 0.5,
        pieces,
        (loss, 0),
    )


def mixture(seed: int) -> Recipe:
    """The module of a seed with routed experts, or a loop over experts."""
    plain = recipe(seed)
    rng = random.Random(f"mixture {seed}")
    pieces = [*plain.pieces[:1]] if rng.random() < 0.6 else []
    for _ in range(rng.choice((1, 1, 2))):
        kind = "looped" if rng.random() < 0.1 else "routed"
        pieces.insert(rng.randint(0, len(pieces)), (kind, rng.randrange(2**31)))
    return replace(plain, pieces=tuple(pieces))


def source(made: Recipe) -> str:
    """The module as text: forward(ids, labels) -> loss."""
    init = [f"self.table = nn.Embedding({made.vocabulary}, {made.hidden})"]
    body = ["x = self.table(ids)"]
    for index, (name, stream) in enumerate(made.pieces):
        d = Draw(stream, f"p{index}", made.hidden)
        result = ({**PIECES, **RARE})[name](d)
        lines = [
            *d.lines,
            f"x = x + 0.5 * torch.tanh({result})" if d.maybe(0.7) else f"x = {result}",
        ]
        read = set(re.findall(r"self\.(\w+)", "\n".join(lines)))
        init += [
            line
            for line in d.made
            if re.split(r"['. ]+", line.removeprefix("self.register_buffer("))[1] in read
        ]
        body += [f"# {name}", *lines]
    if made.loss[0] == "hidden":
        body.append("return x.square().mean()")
    else:
        head = "F.linear(x, self.table.weight)" if made.tied else "self.head(x)"
        init += (
            []
            if made.tied
            else [f"self.head = nn.Linear({made.hidden}, {made.vocabulary}, bias=False)"]
        )
        body += [f"logits = {head}", f"return {LOSSES[made.loss[0]]}"]
    return "\n".join(
        [
            HEAD,
            *(f"        {line}" for line in init),
            "",
            "    def forward(self, ids, labels):",
            *_indented(body),
            "",
        ]
    ).replace("super().__init__()\n\n", "super().__init__()\n")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"        {line}" for line in lines]
