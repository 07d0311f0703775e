"""Flags that are proposed where a plan does not fit: the command with them makes a plan that does,
as large as told.
"""

import re

import pytest

TOOL = "plan"
MODEL = "show --device A100 --seq-length 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64".split()
SIZES = {
    "7B": "--bf16 --num-layers 32 --hidden-size 4096 --num-attention-heads 32",
    "66B": "--bf16 --num-layers 20 --hidden-size 16384 --num-attention-heads 64",
}
CASES = {
    "sharding suffices": ("7B", "--world-size 8"),
    "sharded optimizer and recomputation": ("7B", "--world-size 4"),
    "larger degrees": ("66B", "--world-size 16 --tensor-model-parallel-size 2"),
    "more ranks in little memory": (
        "66B",
        "--world-size 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --device-memory-gb 36",
    ),
    "instances of two": ("66B", "--world-size 64 --tensor-model-parallel-size 4 --pipeline-schedule zb-h1"
                         " --pipeline-model-parallel-size 2 --use-distributed-optimizer"
                         " --num-distributed-optimizer-instances 4"),
    "more ranks": ("66B", "--world-size 8 --tensor-model-parallel-size 2"),
    "less memory than the device has": ("7B", "--world-size 8 --device-memory-gb 30"),
    "activations in host memory": ("7B", "--world-size 8 --micro-batch-size 2 --use-distributed-optimizer"),
}  # fmt: skip
ADVICE = re.compile(
    r"  with (.*) the largest rank needs ([0-9.]+) GiB(?:, and a step takes ([0-9.]+ m?s))?: it (.*)"
)


def advice(run, flags: list[str]) -> list[tuple[str, ...]]:
    try:
        told = run(*flags)
        assert "does not fit into the" in told
    except SystemExit as error:
        told = str(error.code)
        assert "no cut into" in told
    return [match.groups() for match in map(ADVICE.fullmatch, told.splitlines()) if match]


def merged(flags: list[str], more: list[str]) -> list[str]:
    """The flags with others, which replace those of the same name."""
    kept = [*flags]
    for flag in more:
        if flag in kept and flag.startswith("--"):
            at = kept.index(flag)
            del kept[at : at + 2]
    if "--data-parallel-sharding-strategy" in more:
        kept = [flag for flag in kept if flag != "--use-distributed-optimizer"]
    return kept + more


@pytest.mark.parametrize("name", CASES)
def test_what_is_proposed_fits(run, name):
    size, layout = CASES[name]
    flags = [*MODEL, *SIZES[size].split(), *layout.split()]
    found = advice(run, flags)
    assert [fits for *_, fits in found].count("fits") >= 1
    if "host" in name:
        assert ("--cpu-offloading", "fits") in [(more, fits) for more, _, _, fits in found]
    for more, needs, takes, fits in found:
        try:
            told = run(*merged(flags, more.split()))
        except SystemExit as error:
            raise AssertionError(f"{more}: {error.code}") from None
        assert ("does not fit into the" not in told) == (fits == "fits"), more
        peaks = [float(peak) for peak in re.findall(r" ([0-9.]+) GiB$", told, re.MULTILINE)]
        assert max(peaks) == pytest.approx(float(needs), abs=0.11), more
        if takes:
            assert f"{takes} per step" in told


def test_a_plan_that_fits_is_told_nothing(run):
    flags = [*MODEL, *SIZES["7B"].split(), "--world-size", "8", "--use-distributed-optimizer"]
    assert "fit" not in run(*flags)


def test_where_nothing_helps_that_is_told(run):
    flags = [*MODEL, *SIZES["66B"].split(), "--world-size", "1", "--micro-batch-size", "16"]
    assert run(*flags).splitlines()[-1] == (
        "  up to 8 ranks with larger degrees do not suffice either: use a smaller micro-batch or model"
    )
