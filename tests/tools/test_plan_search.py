"""merak-plan search as its users run it: the plan, its flags, questions beside it, mistakes."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import find_cluster
from megatron_merak.config import Config, HFConfig
from megatron_merak.plan import Plan, time_text
from megatron_merak.planner import plan
from megatron_merak.training.plan_file import decided

TOOL = "plan"
JOB = "search --cluster dgx-a100 --gpus 8 --global-batch-size 32 --seq-length 512 --bf16".split()
SHAPE = "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --vocab-size 8000".split()
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=128,
    max_position_embeddings=512,
    use_cache=False,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "llama.json"
    path.write_text(json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    return path


def command(printed: str) -> list[str]:
    """The command line that a search prints."""
    (line,) = [part for part in printed.split("\n\n") if part.startswith("pretrain_")]
    return shlex.split(line.replace("\\\n", ""))


def test_searching_for_the_gpt_of_flags_imports_no_torch_and_no_numpy(imported):
    assert imported(*JOB, *SHAPE) == "[]"


def test_the_flags_that_are_printed_make_the_plan_that_is_stored(run, tmp_path):
    path = tmp_path / "plan.json"
    printed = run(*JOB, *SHAPE, "--tokens", "1B", "-o", path)
    script, *words = command(printed)
    assert script == "pretrain_gpt.py"
    config, _ = read(build_parser(), words)
    config.validate(8, training=False)
    stored = Plan.from_json(path.read_text())
    assert plan(config, 8, find_cluster("dgx-a100")) == stored
    assert f": {time_text(stored.predicted_time)} per step, " in printed
    assert "1,000,000,000 tokens: " in printed and " GPU hours\n" in printed
    # and a job runs it
    more = ["--plan", str(path), *SHAPE]
    followed, _ = read(build_parser(), more, Config, decided(Config, more))
    followed.validate(8, training=False)


def test_nodes_that_differ_are_in_the_answer_and_in_the_plan(run, tmp_path):
    path = tmp_path / "plan.json"
    nodes = [{"count": 1}, {"count": 1, "device": "A100 40GB", "speed": 0.5}]
    links = {"inside": "nvlink3", "between": "infiniband-hdr"}
    content = {"device": "A100", "ranks_per_node": 4, **links, "nodes": nodes}
    (tmp_path / "own.json").write_text(json.dumps(content))
    own = ["--cluster", tmp_path / "own.json", "--fix", "tp=2,pp=2,mb=4,sp=on,schedule=1f1b"]
    printed = run(*JOB, *SHAPE, *own, "--what-if", "gpus=4", "-o", path)
    stored = Plan.from_json(path.read_text())
    assert [str(group) for group in stored.cluster.nodes] == [
        "1 of A100",
        "1 of A100 40GB at 0.5",
    ]
    assert len(stored.stages[0].units) > len(stored.stages[1].units)
    assert f": {time_text(stored.predicted_time)} per step, " in printed
    assert "node 0: A100, node 1: A100 40GB at 0.5\nstage  pp rank  units" in printed
    assert "with gpus=4 on 1 node of A100: tp=2,pp=2,mb=4,sp=on," in printed
    # flags alone would say nothing of nodes
    script, *words = command(printed)
    assert (script, words[:2]) == ("pretrain_gpt.py", ["--plan", str(path)])
    config, _ = read(build_parser(), words, Config, decided(Config, words))
    config.validate(8, training=False)
    more = run(*JOB, *SHAPE, *own, "--what-if", "gpus=16")
    assert "with gpus=16: ranks 16: the cluster own has 2 nodes of 4. Use at most 8" in more
    with pytest.raises(SystemExit, match="ranks 12: the cluster own has 2 nodes of 4"):
        run(*JOB, *SHAPE, *own, "--gpus", "12")


def test_a_huggingface_model_is_searched(run, llama, tmp_path):
    path = tmp_path / "plan.json"
    printed = run(*JOB, "--model", llama, "--fix", "tp=2,pp=2,mb=4", "-o", path)
    stored = Plan.from_json(path.read_text())
    script, *words = command(printed)
    assert script == "pretrain_hf.py"
    config, _ = read(build_parser(config=HFConfig), words, HFConfig)
    config.validate(8, training=False)
    assert (stored.grid.tp, stored.grid.pp, stored.micro_batch_size) == (2, 2, 4)
    # units of four samples follow from those of one and of two
    assert f": {time_text(stored.predicted_time)} per step, " in printed


def test_what_is_asked_beside_the_plan_is_answered(run):
    printed = run(*JOB, *SHAPE, "--why", "tp=4,pp=2", "--what-if", "gpus=4,memory=40")
    assert "best with tp=4,pp=2: tp=4,pp=2," in printed
    costs = printed.partition("best with")[2].splitlines()
    (total,) = [line.split() for line in costs[2:] if line.startswith("a step ")]
    assert total[-1].startswith("+") and total[-1].endswith("%")
    assert "\nwith gpus=4,memory=40: tp=" in printed


@pytest.mark.long
def test_divided_sequences_are_priced_from_the_graph(run, tmp_path):
    """The formulas know whole sequences only; what is pinned, or asked beside, is captured."""
    path = tmp_path / "plan.json"
    pins = "cp=2,tp=2,pp=1,mb=2,sp=off,schedule=1f1b,overlap=pair,sharding=no_shard,recompute=none"
    run(*JOB, *SHAPE, "--fix", pins, "-o", path)
    stored = Plan.from_json(path.read_text())
    assert (stored.grid.cp, stored.graph_sharding) == (2, "layers")
    asked = run(*JOB, *SHAPE, "--why", pins).splitlines()[-2].split()
    assert asked[:2] == ["a", "step"]
    assert asked[4:6] == time_text(stored.predicted_time).split()


@pytest.mark.long
def test_where_nothing_fits_it_says_what_would(run):
    large = [*SHAPE[:2], "--hidden-size", "16384", *SHAPE[4:]]
    with pytest.raises(SystemExit) as end:
        run(*JOB, *large, "--gpus", "1", "--device-memory-gb", "8")
    told = str(end.value)
    assert "fits into the memory of A100" in told
    assert " ranks suffice: tp=" in told and "GiB of memory per rank suffice: tp=" in told


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--micro-batch-size 2", "--micro-batch-size (given): it is decided by the search."),
        ("--use-distributed-optimizer", "or pin it: --fix sharding=VALUE"),
        ("--fix tp=3", "--tensor-model-parallel-size 3: does not divide"),
        ("--fix dp=2", "it is not a setting that is searched"),
        ("--what-if net=1", "Use gpus, memory (GiB of a rank) or cluster"),
        ("--tokens many", "it is not a number of tokens"),
        ("--gpus 0", "--gpus 0: it is not a number of ranks"),
        ("--parallel auto", "this command searches"),
        ("--data-parallel-strategy ps-sync", "no search tries it"),
    ],
)
def test_mistakes_are_told(run, flags, words):
    with pytest.raises(SystemExit) as end:
        run(*JOB, *SHAPE, *flags.split())
    assert words in str(end.value)


def test_the_batch_and_the_cluster_must_be_given(run):
    for flag in ("--global-batch-size", "--cluster", "--gpus"):
        at = JOB.index(flag)
        with pytest.raises(SystemExit) as end:
            run(*JOB[:at], *JOB[at + 2 :], *SHAPE)
        assert f"{flag} (missing)" in str(end.value)
