"""One number for one plan: plan.py, simulate.py, the banner of an emulated run, and the steps that
it takes.
"""

import json
import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from megatron_merak.cluster import Cluster, Device, Link, NodeGroup
from megatron_merak.plan import Plan, prediction
from megatron_merak.planner.predict import ending, stage_costs
from tests.scripts import run_script

COMMON = """--seq-length 64 --micro-batch-size 2 --global-batch-size 8 --vocab-size 300 --lr 1e-3 --mock-data
    --train-iters 2 --eval-iters 0 --log-interval 1""".split()
GPT = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --attention-dropout 0.1 --hidden-dropout 0".split()
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=300, use_cache=False,
)  # fmt: skip
FREE = Link("free", 0.0, 1e14)
# Names that no table has. Their memory is fast: what element-wise work moves is estimated otherwise
# by the planner.
CARD = Device("Card 1", 2e9, 1e9, 1e14, 0, 0.5)
LINKED = Cluster(replace(CARD, float32_flops=1e14), 1, FREE, Link("slow", 1e-4, 1e6), "linked")
BOTH = Cluster(CARD, 2, Link("in", 1e-5, 2e7), Link("out", 1e-4, 1e7), "both")
NODE = replace(BOTH, ranks_per_node=4, name="node")
# the second node computes at half the rate
UNEVEN = replace(BOTH, nodes=(NodeGroup(1, CARD), NodeGroup(1, CARD, 0.5)), name="uneven")
APART = replace(UNEVEN, ranks_per_node=1)
ZERO = ["--use-distributed-optimizer"]
GRADS, FULL = (
    ["--data-parallel-sharding-strategy", f"optim_grads{rest}"] for rest in ("", "_params")
)
HYBRID, TWO = "--num-distributed-optimizer-instances 2".split(), "--global-batch-size 16".split()
TP2, PP2 = "--tensor-model-parallel-size 2".split(), "--pipeline-model-parallel-size 2".split()


ON_HOST = "--offload-model-states --global-batch-size 2".split()


def _with_host(bandwidth: float) -> Cluster:
    return replace(BOTH, device=replace(CARD, host_bandwidth=bandwidth))


def run(script: str, flags: list, ranks: int = 1) -> str:
    done = run_script(script, [*map(str, flags)], ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("model", "cluster", "ranks", "layout"),
    [
        ("gpt", BOTH, 2, TP2),
        pytest.param("llama", BOTH, 2, PP2, marks=pytest.mark.slow),
        pytest.param("gpt", BOTH, 1, [], marks=pytest.mark.slow),
        pytest.param("gpt", BOTH, 4, [*TP2, *PP2], marks=pytest.mark.slow),
        pytest.param("gpt", BOTH, 4, PP2, marks=pytest.mark.slow),  # two replicas
        pytest.param("gpt", APART, 2, PP2, marks=pytest.mark.slow),
        pytest.param("llama", APART, 2, PP2, marks=pytest.mark.slow),
        pytest.param("gpt", UNEVEN, 4, [*TP2, *PP2], marks=pytest.mark.slow),
        pytest.param("gpt", UNEVEN, 4, [*PP2, "--rank-order", "tp-pp-dp"], marks=pytest.mark.slow),
        pytest.param("gpt", replace(BOTH, nics=1), 4, [], marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            replace(BOTH, nics=3),
            4,
            [*PP2, "--rank-order", "tp-pp-dp"],
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt", LINKED, 2, TP2, marks=pytest.mark.slow),
        pytest.param("gpt", LINKED, 2, PP2, marks=pytest.mark.slow),
        pytest.param("gpt", LINKED, 2, [], marks=pytest.mark.slow),
        pytest.param("gpt", LINKED, 2, ZERO, marks=pytest.mark.slow),
        pytest.param("gpt", BOTH, 4, [*TP2, *ZERO], marks=pytest.mark.slow),
        pytest.param("gpt", LINKED, 2, ["--bf16", "--grad-reduce-in-bf16"], marks=pytest.mark.slow),
        pytest.param(
            "llama", LINKED, 2, ["--bf16", "--grad-reduce-in-bf16", *ZERO], marks=pytest.mark.slow
        ),
        pytest.param(
            "gpt",
            BOTH,
            2,
            [*PP2, "--bf16", "--fp32-residual-connection"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", BOTH, 2, [*ZERO, "--no-overlap-param-gather"], marks=pytest.mark.slow
        ),
        pytest.param(
            "llama", BOTH, 2, [*FULL, "--recompute-granularity", "full"], marks=pytest.mark.slow
        ),
        pytest.param("gpt", BOTH, 2, GRADS, marks=pytest.mark.slow),
        pytest.param("gpt", _with_host(1e7), 1, ON_HOST, marks=pytest.mark.slow),
        pytest.param("gpt", BOTH, 4, [*ZERO, *HYBRID], marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            BOTH,
            4,
            [*ZERO, *HYBRID, "--ddp-bucket-size", "30000"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt", BOTH, 4, [*ZERO, *HYBRID, "--no-overlap-grad-reduce"], marks=pytest.mark.slow
        ),
        pytest.param(
            "gpt",
            NODE,
            4,
            [*ZERO, *HYBRID, "--ddp-bucket-size", "30000"],
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt", BOTH, 4, [*GRADS, *HYBRID, *TWO], marks=pytest.mark.slow),
        pytest.param(
            "llama",
            BOTH,
            4,
            [*FULL, *HYBRID, "--recompute-granularity", "full"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt", BOTH, 2, [*PP2, "--pipeline-schedule", "zb-h1"], marks=pytest.mark.slow
        ),
        pytest.param(
            "gpt", BOTH, 2, [*TP2, "--recompute-granularity", "full"], marks=pytest.mark.slow
        ),
        pytest.param("gpt", BOTH, 1, ["--cross-entropy-chunk-size", "32"], marks=pytest.mark.slow),
        pytest.param("llama", BOTH, 2, TP2, marks=pytest.mark.slow),
        pytest.param(
            "llama", BOTH, 1, ["--cross-entropy-chunk-size", "32"], marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.long
def test_the_steps_of_an_emulated_run_take_what_its_plan_says(
    tmp_path, model, cluster, ranks, layout
):
    """Where arithmetic or links dominate."""
    own, saved, metrics = tmp_path / "own.json", tmp_path / "plan.json", tmp_path / "metrics.jsonl"
    cluster.to_json(own)
    flags, script = [*COMMON, *layout], "pretrain_gpt.py"
    if model == "llama":
        (tmp_path / "llama.json").write_text(
            json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]})
        )
        flags, script = [*flags, "--model", tmp_path / "llama.json"], "pretrain_hf.py"
    else:
        flags += GPT
    shown = run(
        "tools/plan.py", ["show", *flags, "--world-size", ranks, "--device", own, "--save", saved]
    )
    plan = Plan.from_json(saved.read_text())
    text = prediction(plan)
    assert plan.cluster == cluster and text.startswith(f"predicted on {cluster}: ")
    emulated = ["--distributed-backend", "emu", "--emulate", own, "--metrics", metrics]
    banner = run(script, [*flags, *emulated], ranks)
    for told in (shown, banner, run("tools/simulate.py", ["--plan", saved])):
        assert re.findall(r"predicted on .* per step, bubble [0-9.]+%", told) == [text]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["modelled_seconds"] for row in rows if row["kind"] == "train"]
    # The first step waits for no parameters that an earlier one has updated.
    like_others = steps[1:] if plan.optimizer_shards > 1 and plan.overlap_param_gather else steps
    assert len(steps) == 2 and like_others == pytest.approx(
        [plan.predicted_time] * len(like_others), rel=0.01
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("bandwidth", [2e7, 1.5e6])
def test_copies_of_model_states_go_on_behind_computing(tmp_path, bandwidth):
    """A step takes at most 5 % more than computing or copying, whichever takes longer in the forward
    and in the backward; and what its ends take: the first weights, the last gradients, the optimizer.
    """
    own, saved, metrics = tmp_path / "own.json", tmp_path / "plan.json", tmp_path / "metrics.jsonl"
    _with_host(bandwidth).to_json(own)
    flags = [*COMMON, *GPT, *ON_HOST, "--num-layers", "12"]
    run("tools/plan.py", ["show", *flags, "--world-size", 1, "--device", own, "--save", saved])
    plan = Plan.from_json(saved.read_text())
    emulated = ["--distributed-backend", "emu", "--emulate", own, "--metrics", metrics]
    run("pretrain_gpt.py", [*flags, *emulated])
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["modelled_seconds"] for row in rows if row["kind"] == "train"]
    assert steps == pytest.approx([plan.predicted_time] * 2, rel=0.01)
    times = stage_costs(replace(plan, offload_model_states=False))
    copied = 4 * plan.stage_parameters(0) / bandwidth  # weights, or gradients
    behind = sum(max(seconds[0], copied) for seconds in (times.forward, times.backward))
    for seconds in steps:
        inside = seconds - ending(plan).total
        assert inside <= 1.05 * behind
        assert inside >= 0.95 * (times.forward[0] + times.backward[0])
