"""Schedules from files, in our text and as torch.distributed.pipelining writes them, equal one
process to the bit.
"""

from dataclasses import replace

import pytest

from tests.pipeline_parallel.written import drawn, dump

from .cases import Case
from .compare import differing, tensor_distances
from .rig import run_all

ONE = Case("llama", steps=2, clip=0.0, hidden_dropout=0.1, attention_dropout=0.1)
BF16 = replace(ONE, dtype="bf16")
TIED = Case("gpt2", pp=2, dp=2, steps=2, bucket=1000)
# The last stage's weight gradients come after all of the first stage, which shares a tensor with
# it.
THREE = """mine stages=4 microbatches=3 placement=0,1,1,0
rank 0: 0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2 3W2
rank 1: 1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2
"""
DRAWN = {
    "v": ((0, 1, 1, 0), {"split": 0.6}),
    "crossed": ((1, 0, 0, 1), {"split": 0.5}),
    "uneven": ((0, 1, 0), {}),
    "early": ((0, 1), {"early": 0.5}),
    "paired": ((0, 1, 0, 1), {"split": 0.2, "paired": 0.8}),
}
TORCH = {
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zb-v": ("ScheduleZBVZeroBubble", 2),
    "dual": ("ScheduleDualPipeV", 2),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """For 6 micro-batches on 2 ranks, and for 3."""
    directory = tmp_path_factory.mktemp("schedules")
    found = {}
    for seed, (name, (placement, shares)) in enumerate(DRAWN.items()):
        found[name] = str(directory / f"{name}.txt")
        (directory / f"{name}.txt").write_text(str(drawn(seed, placement, 6, **shares)))
    found["tied"] = str(directory / "tied.txt")
    (directory / "tied.txt").write_text(THREE)
    for name, (kind, chunks) in TORCH.items():
        found[name] = str(dump(directory / f"{name}.csv", kind, 2, 6, chunks))
    return found


def case_of(name: str, files: dict[str, str]) -> Case:
    case = replace(BF16 if name in ("v", "zb-v") else ONE, pp=2, schedule=files[name])
    return replace(case, recompute="full") if name == "early" else case


@pytest.fixture(scope="module")
def runs(files):
    chosen = [case_of(name, files) for name in (*DRAWN, *TORCH)]
    paired = [
        Case("llama", tp=2, pp=2, overlap=way, schedule=files["paired"], steps=1)
        for way in ("pair", "none")
    ]
    tied = [replace(TIED, schedule=name) for name in ("zb-v", files["tied"])]
    return run_all(
        [ONE, BF16, *chosen, *paired, replace(paired[0], schedule="1f1b", overlap="none"), *tied]
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", (*DRAWN, *TORCH))
def test_a_schedule_from_a_file_equals_one_process(name, files, runs):
    case = case_of(name, files)
    ours, alone = runs[case], runs[BF16 if case.dtype == "bf16" else ONE]
    assert (ours.evaluated, ours.first_loss, ours.curve) == (
        alone.evaluated,
        alone.first_loss,
        alone.curve,
    )
    assert (
        differing(ours.gradients, alone.gradients) == [] == differing(ours.weights, alone.weights)
    )


def test_pairs_that_are_written_run_with_tensor_parallelism(files, runs):
    one = Case("llama", tp=2, pp=2, overlap="none", steps=1)
    for way in ("pair", "none"):
        found = runs[replace(one, overlap=way, schedule=files["paired"])]
        assert (
            found.curve == runs[one].curve and differing(found.gradients, runs[one].gradients) == []
        )


def test_a_tensor_that_two_stages_of_a_rank_share_is_reduced_when_both_are_through(files, runs):
    """Its two uses add up in the order of the schedule."""
    named, written = (
        runs[replace(TIED, schedule="zb-v")],
        runs[replace(TIED, schedule=files["tied"])],
    )
    assert written.first_loss == named.first_loss
    assert differing(written.gradients, named.gradients) == ["transformer.wte.weight"]
    assert max(tensor_distances(written.gradients, named.gradients).values()) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_order_that_can_run_equals_one_process(tmp_path, runs):
    cases = []
    for seed in range(40):
        placement = [
            (0, 1, 1, 0),
            (1, 0, 0, 1, 1),
            (0, 1, 2),
            (2, 0, 1, 0),
            (3, 1, 2, 0),
            (1, 1, 0, 0),
        ][seed % 6]
        shares = {"split": seed % 3 / 3, "early": 0.4 * (seed % 2), "paired": seed % 4 / 3}
        (tmp_path / f"{seed}").write_text(str(drawn(seed, placement, 6, **shares)))
        recompute = "full" if seed % 2 else "none"
        pp = max(placement) + 1
        cases.append(
            replace(ONE, pp=pp, schedule=str(tmp_path / f"{seed}"), recompute=recompute, steps=1)
        )
    for case, found in run_all(cases).items():
        assert found.first_loss == runs[ONE].first_loss, case
        assert differing(found.gradients, runs[ONE].gradients) == [], case
