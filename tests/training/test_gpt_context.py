"""The GPT that flags describe, trained on ranks that divide its sequences: the losses, checkpoints and
plans of one process.
"""

import re

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config
from megatron_merak.errors import PlanError
from megatron_merak.stages.blueprint import blueprint_from_plan
from megatron_merak.stages.gpt_model import traced_gpt
from megatron_merak.training.hf_model import blueprint_of
from tests.choice import later
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job

LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights"""


def losses(told: str) -> list[float]:
    return [float(each) for each in re.findall(r"lm loss: (\S+)", told)]


def run(rank, world, flags):
    return job(rank, world, flags)


def runs(world, flags):
    """What the rank that reports printed."""
    return next(
        told for told in run_ranks(run, world, flags, timeout=60 + 30 * world) if "lm loss" in told
    )


@pytest.mark.parametrize(
    "shape",
    ["", later(f"{LLAMA} --cp-comm-type all_gather"), f"{LLAMA} --cp-comm-type p2p"],
    ids=["gpt2", "llama gathers", "llama in a ring"],
)
def test_ranks_that_divide_sequences_train_as_one_process(shape, tmp_path):
    flags = f"{shape} --train-iters 3 --calculate-per-token-loss"
    alone = losses(runs(1, f"{flags} --save {tmp_path / 'alone'}"))
    divided = losses(runs(2, f"{flags} --context-parallel-size 2 --save {tmp_path / 'divided'}"))
    assert len(alone) == 3
    torch.testing.assert_close(torch.tensor(divided), torch.tensor(alone), rtol=1e-6, atol=0)


LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(4, "", marks=pytest.mark.long),
        pytest.param(8, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(
            8, "--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "stages", "weights"],
)
def test_two_levels_of_ranks_train_as_one_process(ranks, more, tmp_path):
    flags = f"{LLAMA} --train-iters 3 --calculate-per-token-loss"
    alone = losses(runs(1, f"{flags} --save {tmp_path / 'alone'}"))
    divided = f"{flags} --context-parallel-size 4 {LEVELS} {more}"
    found = losses(runs(ranks, f"{divided} --save {tmp_path / 'divided'}"))
    assert len(alone) == 3
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-6, atol=0)


@pytest.mark.long
def test_a_run_goes_on_with_divided_sequences(tmp_path):
    whole = losses(runs(1, "--train-iters 4"))
    runs(1, f"--train-iters 4 --exit-interval 2 --save {tmp_path}")
    again = f"--train-iters 4 --load {tmp_path}"
    rest = losses(runs(1, f"{again} --exit-interval 3 --save {tmp_path}"))
    rest += losses(runs(2, f"{again} --context-parallel-size 2"))
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(whole[2:]), rtol=1e-6, atol=0)


def configuration(flags: str) -> Config:
    words = [*SHAPE.split(), *RUN.split(), "--mock-data", *flags.split()]
    return arguments.read(arguments.build_parser(config=Config), words, Config)[0]


def test_a_stored_plan_says_that_the_residual_stream_is_fp32():
    config = configuration("--context-parallel-size 2 --bf16 --fp32-residual-connection")
    traced = traced_gpt(config)
    plan = blueprint_of(traced, config, 2, CLUSTERS["cpu"]).plan
    assert plan.fp32_residual
    assert blueprint_from_plan(traced, plan).plan == plan
    other = traced_gpt(configuration("--context-parallel-size 2 --bf16"))
    with pytest.raises(PlanError, match="fp32_residual True.*Set it to False"):
        blueprint_from_plan(other, plan)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("", torch.float32), ("--fp32-residual-connection", torch.float32)]
)
def test_the_stream_between_units_is_as_wide_as_asked(dtype, expected):
    traced = traced_gpt(configuration(f"--context-parallel-size 2 --bf16 {dtype}"))
    adds = [
        node.meta["val"].dtype
        for node in traced.captured.module.graph.nodes
        if "add.Tensor" in str(node.target) and len(node.meta["val"].shape) == 3
    ]
    wide = expected if dtype else torch.bfloat16
    assert adds and set(adds[1:]) == {wide}
