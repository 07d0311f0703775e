"""Fusion of rotary embeddings and attention: what is found in which spelling, and what is left
alone.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.graph.fused import ATTENTION, CAUSAL, aten, mean, pieces


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def angles(width, repeat=True):
    angle = torch.outer(torch.arange(4.0), 0.3 ** torch.arange(width // 2 if repeat else width))
    angle = torch.cat((angle, angle), -1) if repeat else angle
    return angle.cos()[None], angle.sin()[None]


def test_rotary_needs_tables_that_repeat():
    assert pieces(lambda m, x, y: mean(m, rotate(x, *angles(8)), y)) == {"rotary": 1}
    assert pieces(lambda m, x, y: mean(m, rotate(x, *angles(8, repeat=False)), y)) == {}

    def partial(m, x, y):
        return mean(m, torch.cat((rotate(x[..., :4], *angles(4)), x[..., 4:]), -1), y)

    assert pieces(partial) == {"partial rotary": 1}

    def by_halves(m, x, y):
        (a, b), (cos, sin) = x.chunk(2, -1), (t[..., :4] for t in angles(8))
        return mean(m, torch.cat((a * cos - b * sin, b * cos + a * sin), -1), y)

    assert pieces(by_halves) == {"rotary": 1}

    def swapped(m, x, y):
        return mean(m, torch.cat((x[..., 4:], rotate(x[..., :4], *angles(4))), -1), y)

    assert pieces(swapped) == {"rotary": 1}


def rotate_pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def angles_of_pairs(width, repeat=lambda table: table.repeat_interleave(2, 2)):
    angle = torch.outer(torch.arange(4.0), 0.3 ** torch.arange(width // 2))[None]
    return repeat(angle.cos()), repeat(angle.sin())


def test_interleaved_rotary_needs_tables_that_repeat_pair_by_pair():
    assert pieces(lambda m, x, y: mean(m, rotate_pairs(x, *angles_of_pairs(8)), y)) == {"rotary": 1}

    def partial(m, x, y):
        return mean(
            m, torch.cat((rotate_pairs(x[..., :4], *angles_of_pairs(4)), x[..., 4:]), -1), y
        )

    assert pieces(partial) == {"partial rotary": 1}

    def halves(table):
        return torch.cat((table, table), -1)

    def by_position(table):
        return table.repeat_interleave(2, 1)[:, :4].repeat(1, 1, 2)

    for repeat in (halves, by_position):
        assert (
            pieces(lambda m, x, y, r=repeat: mean(m, rotate_pairs(x, *angles_of_pairs(8, r)), y))
            == {}
        )

    def unsigned(m, x, y):
        cos, sin = angles_of_pairs(8)
        return mean(m, x * cos + torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin, y)

    assert pieces(unsigned) == {}


def heads(x, count=2):
    return x.view(2, 4, count, -1).transpose(1, 2)


TRIANGLE = torch.ones(4, 4).tril().bool()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"is_causal": True}, CAUSAL),
        ({"is_causal": True, "scale": 0.7}, CAUSAL),
        ({"scale": 0.7}, ATTENTION),
        ({"attn_mask": TRIANGLE[None, None]}, ATTENTION),
        ({"attn_mask": torch.randn(2, 1, 4, 4)}, ATTENTION),
        ({"attn_mask": TRIANGLE}, None),
    ],
)
def test_attention(options, kind):
    def body(m, x, y):
        out = F.scaled_dot_product_attention(
            heads(x), heads(x * m.weight), heads(x.tanh()), **options
        )
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == ({kind: 1} if kind else {})


def test_attention_with_a_learned_bias_is_left_alone():
    def body(m, x, y):
        bias = (x @ x.mT)[:, None]
        out = F.scaled_dot_product_attention(
            heads(x), heads(x * m.weight), heads(x.tanh()), attn_mask=bias
        )
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == {}


def test_attention_that_is_read_head_by_head():
    def body(m, x, y):
        out = F.scaled_dot_product_attention(
            heads(x), heads(x * m.weight), heads(x.tanh()), is_causal=True
        )
        return mean(m, out.flip(1).transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == {CAUSAL: 1}


def shared(x):
    """One key head [2, 1, 4, 4] for two query heads."""
    return heads(x, 1)[:, :, None].expand(2, 1, 2, 4, 4).reshape(2, 2, 4, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_key_heads_of_a_group_are_not_repeated(causal):
    seen = []

    def body(m, x, y):
        out = F.scaled_dot_product_attention(
            heads(x), shared(x[..., :4]), shared(x[..., 4:]), is_causal=causal
        )
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body, seen=seen) == {CAUSAL if causal else ATTENTION: 1}
    assert not any(node.target is aten.expand.default for node in seen[0].nodes)


def written_out(m, x, mask=None, scale=lambda scores: scores * 0.5, softmax=torch.softmax):
    scores = scale(heads(x) @ shared(x[..., :4]).transpose(2, 3))
    part = softmax(scores if mask is None else scores + mask, -1)
    return (part @ shared(x[..., 4:])).transpose(1, 2).reshape(2, 4, 8)


BIAS = torch.zeros(1, 1, 4, 4).masked_fill(~TRIANGLE, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"mask": BIAS}, 1),
        ({"mask": BIAS, "scale": lambda scores: scores / 3.0}, 1),
        ({"mask": BIAS, "scale": lambda scores: scores}, 1),
        ({"softmax": lambda scores, dim: torch.softmax(scores, dim, dtype=torch.float32)}, 1),
        ({"scale": lambda scores: scores.tanh() * 2}, 0),
        ({"scale": lambda scores: scores * scores.detach().amax()}, 0),
        ({"softmax": lambda scores, dim: torch.softmax(scores, 1)}, 0),
        ({"softmax": lambda scores, dim: torch.sigmoid(scores)}, 0),
    ],
)
def test_attention_written_out(options, count):
    assert pieces(lambda m, x, y: mean(m, written_out(m, x, **options), y)) == (
        {ATTENTION: 1} if count else {}
    )
