"""Jobs whose batches grow: resumed with other lengths, on other layouts, and with a plan
of a file.
"""

import re

import pytest

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config
from megatron_merak.errors import ConfigError
from megatron_merak.training.plan_file import decided, plan_of
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job

# to the 4 of RUN: 10 steps of 2, then 7 of 4 in 48 samples
RAMP = "--train-samples 50 --rampup-batch-size 2 2 20"


def _jobs(rank: int, world: int, runs: list[str]) -> list[str]:
    told = []
    for flags in runs:
        try:
            told.append(job(rank, world, flags))
        except ConfigError as error:
            told.append(f"ConfigError: {error}")
    return told


def progress(told: str) -> list[tuple[int, int, int]]:
    """(iteration, of iterations, consumed samples) of each line."""
    found = re.findall(r"iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) ", told)
    return [tuple(map(int, each)) for each in found]


def test_a_run_that_resumes_with_another_length_says_how_far_it_goes(tmp_path):
    saved = f"--save {tmp_path} --log-interval 3"
    first, longer, other, over = run_ranks(
        _jobs,
        1,
        [
            f"{RAMP} {saved} --exit-interval 6",
            f"--train-samples 60 --rampup-batch-size 1 1 30 --micro-batch-size 1 --load {tmp_path} --log-interval 4",
            f"--train-iters 8 --load {tmp_path}",
            f"--train-samples 10 --rampup-batch-size 2 2 20 --load {tmp_path}",
        ],
    )[0]
    assert progress(first) == [(3, 17, 6), (6, 17, 12)]
    # From 12 samples on: 4 steps of 2 to 20, 4 of 3 to 32, 7 of 4 to 60. The last line is always
    # told.
    assert progress(longer) == [(8, 21, 16), (12, 21, 26), (16, 21, 40), (20, 21, 56), (21, 21, 60)]
    assert "           2      4              2" in longer and "15 steps in all" in longer
    assert progress(other) == [(7, 8, 16), (8, 8, 20)] and progress(over) == []


@pytest.mark.long
def test_after_the_ramp_more_replicas_than_its_first_batches_have_samples_for(tmp_path):
    (first,) = run_ranks(_jobs, 1, [f"{RAMP} --save {tmp_path} --exit-interval 11"])
    assert progress(first[0])[-1] == (11, 17, 24)
    resumed, decreased, anew, elsewhere = run_ranks(
        _jobs,
        2,
        [
            f"{RAMP} --load {tmp_path}",
            f"{RAMP} --load {tmp_path} --decrease-batch-size-if-needed",
            f"{RAMP} --load {tmp_path} --finetune",
            f"{RAMP} --load {tmp_path}/nowhere",
        ],
    )[1]
    assert progress(resumed)[-1] == progress(decreased)[-1] == (17, 17, 48)
    for told in (anew, elsewhere):
        assert (
            "--rampup-batch-size 2 2 20: has a batch size of 2, which is not a multiple of --micro-batch-size 2"
            in told
        )


@pytest.mark.parametrize(
    ("made", "asked", "told"),
    [
        ("--train-samples 50 --rampup-batch-size 4 4 24", "", None),
        (
            "--train-samples 50 --rampup-batch-size 3 2 24 --decrease-batch-size-if-needed --global-batch-size 9",
            "",
            None,
        ),
        ("--train-samples 50 --step-batch-size-schedule '0:8 0.3K:4'", "", None),
        (
            "--train-samples 50",
            "--step-batch-size-schedule '0:4 0.3K:16'",
            "--step-batch-size-schedule 16: the plan has 8. ",
        ),
    ],
)
def test_a_plan_of_a_file_runs_with_the_flags_that_made_it(tmp_path, capsys, made, asked, told):
    import shlex

    from tools import plan

    size = [] if "--global" in made or "--step" in made or asked else ["--global-batch-size", "8"]
    common = [
        "--mock-data",
        *SHAPE.split(),
        *RUN.replace("--global-batch-size 4", "").split(),
        *shlex.split(made),
    ]
    written = [
        "show",
        *common,
        *(size or ["--global-batch-size", "8"] * bool(asked)),
        "--world-size",
        "1",
    ]
    plan.main([*written, "--save", f"{tmp_path}/plan.json"])
    line = [*common, *size, *shlex.split(asked), "--plan", f"{tmp_path}/plan.json"]
    config, _ = read(build_parser(), line, Config, decided(Config, line))
    if told is None:
        assert (
            plan_of(config, 1, CLUSTERS["cpu"]).global_batch_size
            == 8
            == config.global_batch_size(1)
        )
        return
    with pytest.raises(ConfigError) as error:
        plan_of(config, 1, CLUSTERS["cpu"])
    assert str(error.value).startswith(told)
