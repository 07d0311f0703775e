"""Layers launch what the page on GPUs says, and hardly more than one written by hand."""

import pytest

from .launches import NAMES, PAGE, row

QUICK = ("llama",)
# Where every norm, sum and product has a fused operation: what a hand-written layer launches, and no more.
DENSE = ("llama", "qwen2", "mistral", "the GPT of flags")
MOST = (12, 26)


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in QUICK),
    ],
)
def test_a_layer_launches_what_the_page_says(name):
    found = row(name)
    assert found in PAGE.read_text(encoding="utf-8")
    forward, backward = map(int, found.split("|")[2:4])
    if name in DENSE:
        assert forward <= MOST[0] and backward <= MOST[1]
