"""The rows of settings that plans are about, and plans, say the same."""

import dataclasses
from pathlib import Path

import pytest

from megatron_merak.config import (
    HFModelConfig,
    ModelConfig,
    ParallelConfig,
    flag_name,
    value_type,
)
from megatron_merak.config.table import DECIDES, MAKES, taken
from megatron_merak.hf_trainer.arguments import plan_arguments
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, Plan, StagePlan, Unit
from megatron_merak.planner import plan_chain
from tests.requests import request

ROOT = Path(__file__).resolve().parent.parent
UNITS = (Unit("layer", "layer", 8, 100, 0, 16),)
PLAN = Plan(Grid(), UNITS, (StagePlan(0, 1),), build_schedule("1f1b", 1, 2), 1, 0)
TAKEN = [
    row
    for row in dataclasses.fields(ParallelConfig)
    if getattr(row.metadata.get("plan"), "taken", False)
]


def test_no_setting_is_both_decided_by_a_plan_and_there_to_make_one():
    assert not DECIDES.keys() & set(MAKES)


def metadata_of(section):
    return {row.name: row.metadata for row in dataclasses.fields(section)}


def test_plans_say_the_same_of_a_setting_of_both_kinds_of_models():
    gpt = metadata_of(ModelConfig)
    hf = metadata_of(HFModelConfig)
    both = gpt.keys() & hf.keys()
    assert {"seq_length", "make_vocab_size_divisible_by"} <= both
    for key in ("plan", "makes_plan"):
        assert all(gpt[name].get(key) == hf[name].get(key) for name in both)


@pytest.mark.parametrize("name", DECIDES)
def test_a_plan_has_what_it_decides(name):
    DECIDES[name].read(PLAN)


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: row.name)
def test_what_a_plan_takes_over_has_the_default_and_the_type_of_the_setting(row):
    where = row.metadata["plan"]
    assert taken(ParallelConfig())[where.path] == getattr(PLAN, where.path)
    assert value_type(ParallelConfig, row.name) is value_type(Plan, where.path)
    assert where.read(PLAN) == row.default


# What settings need beside them.
MORE = {
    "compile_pointwise": {"graph_sharding": "cut"},
    "grad_reduce_in_bf16": {"dtype": "bfloat16"},
    "moe_expert_rank_capacity_factor": {"expert_model_parallel_size": 4},
    "num_distributed_optimizer_instances": {"use_distributed_optimizer": True},
}


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: row.name)
def test_a_plan_made_with_a_setting_decides_it_so(row):
    value = True if row.default is False else row.metadata.get("choices", (2,))[-1]
    more = MORE.get(row.name, {})
    made = plan_chain(UNITS, request(Grid(dp=4), microbatches=2, **{row.name: value}, **more))
    where = row.metadata["plan"]
    assert where.read(made) == value != row.default
    assert where.read(Plan.from_json(made.to_json())) == value


def test_the_page_on_plans_names_all_that_they_hold_and_the_flags_that_they_decide():
    page = (ROOT / "docs" / "plans.md").read_text()
    names = [row.name for row in dataclasses.fields(Plan)]
    names += [flag_name(name) for name in DECIDES]
    names += [name for name in plan_arguments.DECIDES if name not in DECIDES]
    assert [name for name in names if f"`{name}`" not in page] == []
