"""Plans of schedules from files: what they take from the file, and which files do not go with a
job.
"""

from dataclasses import replace

import pytest

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError, MerakError, PlanError, ScheduleError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.schedule_files import read_schedule
from megatron_merak.plan import Plan, plan_table
from megatron_merak.planner import plan
from megatron_merak.planner.tables import difference
from tests.pipeline_parallel.written import drawn

V = drawn(3, (0, 1, 1, 0), 4, split=0.5)
R = drawn(3, (0, 1), 4, early=0.5)
PAIRS = drawn(3, (0, 1), 4, paired=1.0)
EIGHT = drawn(3, (0, 1) * 4, 4)
SHIFTED = build_schedule("shifted", 2, 4)
REFUSED = [
    (
        V,
        {"pipeline_schedule": "1f1b"},
        ConfigError,
        "--pipeline-schedule 1f1b: contradicts --schedule-file FILE",
    ),
    (
        V,
        {"num_virtual_stages_per_pipeline_rank": 2},
        ConfigError,
        "-per-pipeline-rank 2: contradicts --schedule-file",
    ),
    (
        V,
        {"microbatch_group_size_per_virtual_pipeline_stage": 2},
        ConfigError,
        "-stage 2: contradicts --schedule-file",
    ),
    (
        V,
        {"pipeline_model_parallel_size": 4},
        ConfigError,
        "FILE: it is a schedule of 2 ranks, and --pipeline-model-p",
    ),
    (
        drawn(1, (0, 1), 3),
        {},
        ConfigError,
        "FILE: it is a schedule of 3 micro-batches, and a step has 4 per replica",
    ),
    (
        EIGHT,
        {},
        PlanError,
        r"--schedule-file drawn: 8 stages .* need as many units, .* a chain of 6\. Write a sche",
    ),
    (R, {}, ConfigError, "FILE: its 0R0 would recompute nothing: --recompute-granularity is unset"),
    (
        V,
        {"tp_comm_overlap": "pair"},
        ConfigError,
        "--tp-comm-overlap pair: .*--schedule-file FILE holds none",
    ),
    (
        PAIRS,
        {"tp_comm_overlap": "sub-pipeline"},
        ConfigError,
        "--tp-comm-overlap sub-pipeline: halves .* pairs of mic",
    ),
    ("nowhere", {}, ScheduleError, "--schedule-file FILE: it cannot be read as text"),
    (
        str(V).replace("0F1", "0F0"),
        {},
        ScheduleError,
        "--schedule-file FILE: rank 0 runs 0F0 2 times",
    ),
    (
        "x stages=1 microbatches=4\nrank 0: 0F1 0F0 0B0 0B1 0F2 0B2 0F3 0B3",
        {},
        ScheduleError,
        "FILE: .* out of order",
    ),
]


@pytest.fixture
def planned(tmp_path):
    """The plan of a job of 4 units of 2 ranks (times tensor-parallel ones) with a schedule in a
    file.
    """

    def made(schedule, tp: int = 2, layers: int = 4, **parallel) -> Plan:
        path = tmp_path / "order.txt"
        if schedule != "nowhere":
            path.write_text(str(schedule))
        shape = {
            "num_layers": layers,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 32,
        }
        given = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": 2,
            "schedule_file": str(path),
        }
        given |= parallel
        config = Config(
            model=ModelConfig(vocab_size=500, **shape),
            parallel=ParallelConfig(**given),
            train=TrainConfig(micro_batch_size=2, global_batch_size=8),
        )
        return plan(config, tp * given["pipeline_model_parallel_size"])

    return made


@pytest.mark.parametrize("schedule", [V, PAIRS, drawn(5, (0, 1, 0), 4)])
@pytest.mark.parametrize("overlap", ["weight-gradient", "none", "auto"])
def test_a_plan_has_the_schedule_as_it_is_written(planned, schedule, overlap):
    made = planned(schedule, tp_comm_overlap=overlap)
    assert made.schedule == schedule and len(made.stages) == schedule.stages
    assert made.predicted_time > 0 and str(schedule).splitlines()[1] in plan_table(made)
    assert Plan.from_json(made.to_json()) == made


def test_pairs_that_are_written_stay(planned):
    assert planned(PAIRS, tp_comm_overlap="pair").schedule == PAIRS
    by_name = replace(pair(build_schedule("1f1b", 2, 4)), name="mine")
    assert planned(by_name, tp_comm_overlap="pair").overlap == "pair"
    assert planned(PAIRS, tp_comm_overlap="auto").overlap in ("weight-gradient", "none", "pair")
    # no collectives: the flag has no effect, and is told
    assert planned(V, tp=1, tp_comm_overlap="pair").schedule == V


def test_recomputation_follows_the_file(planned):
    made = planned(SHIFTED, recompute_granularity="full")
    by_name = planned(
        "nowhere", schedule_file=None, pipeline_schedule="shifted", recompute_granularity="full"
    )
    assert made == by_name
    assert planned(R, recompute_granularity="full").schedule == R


def test_two_files_of_one_name_are_different_plans(planned):
    one, other = planned(V), planned(drawn(4, (0, 1, 1, 0), 4, split=0.5))
    assert (
        "schedule: drawn of 4 micro-batches -> drawn of 4 micro-batches, in another order"
        in difference(one, other)
    )
    assert difference(one, one) == ""


@pytest.mark.parametrize(
    ("schedule", "flags", "kind", "told"), REFUSED, ids=[row[3][:40] for row in REFUSED]
)
def test_what_does_not_go_with_the_job_is_refused_by_name(
    planned, tmp_path, schedule, flags, kind, told
):
    with pytest.raises(
        MerakError, match=told.replace("FILE", str(tmp_path / "order.txt"))
    ) as caught:
        planned(schedule, **flags)
    assert type(caught.value) is kind and caught.value.remedy


def test_a_file_may_hold_what_simulate_prints(planned, tmp_path):
    """With its transfers, at the places that they are derived to have."""
    assert planned(add_communication(V)).schedule == V
    assert read_schedule(tmp_path / "order.txt").has_communication
