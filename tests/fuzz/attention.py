"""Pieces with attention: rotary positions, norms of heads, scores, shared key heads."""

from .draw import BATCH, LENGTH, Draw


def _rotary(d: Draw, h: str, size: int) -> str:
    """h [2, n, 6, size]."""
    angles = d.buffer(
        f"torch.outer(torch.arange({LENGTH}.0), torch.linspace(1, 0.1, {size // 2})).double()"
    )
    way = d.one("halves", "pairs", "complex")
    if way == "complex":
        z = d.let(f"torch.view_as_complex({h}.double().reshape(2, -1, {LENGTH}, {size // 2}, 2))")
        turned = f"{z} * torch.polar(torch.ones_like({angles}), {angles})"
        return d.let(f"torch.view_as_real({turned}).flatten(3).to({h}.dtype)")
    if way == "pairs":
        cos, sin = (
            f"{angles}.{f}().repeat_interleave(2, -1).to({h}.dtype)" for f in ("cos", "sin")
        )
        turned = f"torch.stack((-{h}[..., 1::2], {h}[..., ::2]), -1).flatten(-2)"
    else:
        cos, sin = (
            f"torch.cat(({angles}, {angles}), -1).{f}().to({h}.dtype)" for f in ("cos", "sin")
        )
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
        mask = d.one(
            "is_causal=True", "attn_mask=(ids != ids[:, :1]).unsqueeze(1).unsqueeze(1) | True", ""
        )
        return d.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{', ' + mask if mask else ''})")
    s = d.let(
        d.one(
            f"{q} @ {k}.transpose(-1, -2) / {size**0.5}",
            f"torch.einsum('bnqd,bnkd->bnqk', {q}, {k}) * 0.4",
        )
    )
    way = d.one("causal", "key", "none", "bias", "slopes", "talking", "across", "sink")
    if way == "causal":
        s = d.let(
            f"{s}.masked_fill(torch.ones({LENGTH}, {LENGTH}, dtype=torch.bool).triu(1), float('-inf'))"
        )
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
        parts = [
            d.let(f"{h}.view({shape}, 3, {heads}, {size}).permute(2, 0, 3, 1, 4)[{i}]")
            for i in range(3)
        ]
    elif way == "three inside":
        parts = [
            d.let(f"{h}.view({shape}, {heads}, 3, {size})[..., {i}, :].transpose(1, 2)")
            for i in range(3)
        ]
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
    q = d.let(
        f"{d.linear(d.hidden, heads * size)}(x).view({BATCH}, {LENGTH}, {heads}, {size}).transpose(1, 2)"
    )
    if d.maybe(0.4):
        both = d.let(f"{d.linear(d.hidden, 2 * groups * size)}(x)")
        kv = [f"{both}.chunk(2, -1)[{i}]" for i in range(2)]
    else:
        kv = [f"{d.linear(d.hidden, groups * size)}(x)" for _ in range(2)]
    k, v = (
        d.let(f"{text}.view({BATCH}, {LENGTH}, {groups}, {size}).transpose(1, 2)") for text in kv
    )
    if d.maybe(0.5):
        o = d.let(
            f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={d.maybe()}, enable_gqa=True)"
        )
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
