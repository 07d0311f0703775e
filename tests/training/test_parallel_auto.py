"""``--parallel auto``: the plan that a search finds runs, in both training commands."""

import json
import re

import pytest
from transformers import LlamaConfig

from megatron_merak.arguments import build_parser, read
from megatron_merak.cli.pretrain import check_command
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import ConfigError
from megatron_merak.training.searched import PIN, check, stand_ins
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job

LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=60,
    use_cache=False,
)
SEARCHED = re.compile(r"--parallel (\S+) chose (\S+)\.")
LINE = [*SHAPE.split(), *RUN.replace("--micro-batch-size 2", "").split(), "--mock-data"]
LINE += ["--train-iters", "2"]


def losses(told: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", told)


@pytest.mark.parametrize("pins", ["", ",tp=2", ",pp=2,sharding=optim"])
def test_a_gpt_of_flags_runs_what_is_found(pins):
    alone = job_of(1, "--train-iters 2")
    told = job_of(2, f"--train-iters 2 --parallel auto{pins}")
    asked, chosen = SEARCHED.search(told).groups()
    assert asked == f"auto{pins}"
    for pin in pins.split(",")[1:]:
        assert pin in chosen.split(",") or pin.startswith("sharding")
    assert told.count("2 ranks = tp ") == 1
    assert len(losses(told)) == 2
    assert [float(loss) for loss in losses(told)] == pytest.approx(
        [float(loss) for loss in losses(alone)], abs=1e-5
    )


def test_room_for_rows_that_nothing_exchanges_is_said_to_have_no_effect():
    experts = "--num-experts 4 --moe-ffn-hidden-size 16 --swiglu --disable-bias-linear"
    room = f"{experts} --normalization RMSNorm --moe-expert-rank-capacity-factor 2 --train-iters 1"
    told = job_of(2, f"{room} --parallel auto,ep=1")
    assert "--moe-expert-rank-capacity-factor has no effect: no ranks divide experts." in told
    told = job_of(2, f"{room} --parallel auto,ep=2")
    assert "has no effect" not in told and "with room for 2 times as many" in told


@pytest.mark.long
def test_a_huggingface_model_runs_what_is_found(tmp_path):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    alone = job_of(1, f"--train-iters 2 --model {path}", HFConfig)
    told = job_of(2, f"--train-iters 2 --model {path} --parallel auto,tp=2", HFConfig)
    assert SEARCHED.search(told)[2].startswith("tp=2,pp=1,")
    assert [float(loss) for loss in losses(told)] == pytest.approx(
        [float(loss) for loss in losses(alone)], abs=1e-5
    )


def job_of(ranks: int, flags: str, kind=Config) -> str:
    """What the ranks of a job print."""
    return "".join(run_ranks(job, ranks, flags, kind, timeout=200))


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--parallel on", "it does not begin with auto"),
        ("--parallel auto,tp", "it is not NAME=VALUE"),
        ("--parallel auto --micro-batch-size 2", "or pin it: --parallel auto,mb=VALUE"),
        ("--parallel auto --sequence-parallel", "or pin it: --parallel auto,sp=VALUE"),
        ("--parallel auto --moe-expert-rank-capacity-factor 2", "and the model has none"),
        ("--parallel auto --schedule-file f", "--schedule-file f: no search tries it"),
        ("--parallel auto --data-parallel-strategy ps-sync", "no search tries it"),
    ],
)
def test_what_contradicts_a_search_is_refused_before_ranks_start(flags, words):
    with pytest.raises(ConfigError) as refused:
        check_command("pretrain", [*LINE, *flags.split()], 2)
    assert words in str(refused.value)


def test_a_batch_is_needed():
    at = LINE.index("--global-batch-size")
    line = [*LINE[:at], *LINE[at + 2 :], "--parallel", "auto"]
    config, _ = read(build_parser(), line, Config, stand_ins(line, PIN))
    with pytest.raises(ConfigError, match="--global-batch-size"):
        check(config)


def test_a_job_without_the_flag_is_as_it_was():
    check_command("pretrain", [*LINE, "--micro-batch-size", "2"], 2)
