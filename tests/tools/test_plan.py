"""tools/plan.py as its users run it: the GPT of flags and HuggingFace models, stored plans, differences,
mistakes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from megatron_merak.plan import Plan, plan_table

TOOL = "plan"
ROOT = Path(__file__).parents[2]
FLAGS = """show --world-size 8 --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2""".split()
CAPTURED = "show --world-size 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8".split()
TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
V = """0F0,0F1,0F2,0F3,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,,,0B0,0B1,0B2,0B3
,1F0,2F0,1F1,2F1,1F2,2F2,1F3,2F3,2I0,1B0,2W0,2B1,1B1,2B2,1B2,2B3,1B3
"""
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=128,
    use_cache=False,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "llama.json"
    path.write_text(json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    return path


def test_planning_the_gpt_of_flags_imports_no_torch_and_no_numpy(imported, tmp_path):
    plan = tmp_path / "plan.json"
    for arguments in ([*FLAGS, "--save", plan], ["show", plan], ["diff", plan, plan]):
        assert imported(*arguments) == "[]"


def test_a_plan_is_printed_stored_and_shown_again(run, tmp_path):
    path = tmp_path / "plan.json"
    printed = run(*FLAGS, "--save", path)
    again = Plan.from_json(path.read_text())
    assert printed.startswith(f"{plan_table(again)}\n") and again.grid.size == 8
    assert "stage    weights  gradients  optimizer  activations" in printed
    assert run("show", path) == printed
    assert run(*FLAGS, "--json", tmp_path / "same.json") == printed
    assert (tmp_path / "same.json").read_text() == path.read_text()


def test_what_a_whole_run_takes_is_printed_beside_the_interval_of_a_step(run):
    flags = [*FLAGS, "--device", "H100", "--memory-reserve-gb", "30"]
    printed = run(*flags, "--tokens", "1B", "--price-per-gpu-hour", "2")
    assert "1B tokens: 1,953,125 steps, " in printed and " at 2 an hour\n" in printed
    assert printed.count(" (p10 to p90: ") == 2
    assert "of the 50.0 GiB of H100 that plans use, 50.0 GiB left (30.0 GiB are kept" in printed
    assert "tokens:" not in run(*flags)
    with pytest.raises(SystemExit, match="--price-per-gpu-hour 2: it has no effect without"):
        run(*flags, "--price-per-gpu-hour", "2")


@pytest.mark.parametrize("model", [[], ["--model", "LLAMA"]])
def test_a_device_of_ones_own_is_planned_for(run, llama, tmp_path, model):
    """Neither the device nor the cluster has a name of the tables."""
    device = {"name": "Card 1", "memory": 2**34, "matmul_efficiency": 0.5, "memory_bandwidth": 1e11}
    device |= {"bfloat16_flops": 2e12, "float32_flops": 1e12}
    slow, fast = ({"name": "own", "latency": 1e-5, "bandwidth": speed} for speed in (1e8, 1e12))
    plans = []
    for name, link in (("slow", slow), ("fast", fast)):
        own = {"device": device, "ranks_per_node": 2, "inside": fast, "between": link}
        (tmp_path / f"{name}.json").write_text(json.dumps(own))
        flags = [
            str(llama) if flag == "LLAMA" else flag
            for flag in (CAPTURED if model else FLAGS) + model
        ]
        more = [
            *TP2_PP2,
            "--device",
            tmp_path / f"{name}.json",
            "--save",
            tmp_path / f"{name}.plan.json",
        ]
        assert f"predicted on Card 1 ({name})" in run(*flags, *more)
        plans.append(Plan.from_json((tmp_path / f"{name}.plan.json").read_text()))
    assert plans[0].predicted_time > plans[1].predicted_time
    assert [plan.cluster.between.bandwidth for plan in plans] == [1e8, 1e12]
    told = run("diff", tmp_path / "slow.plan.json", tmp_path / "fast.plan.json")
    assert "cluster: between.bandwidth 100000000.0 -> 1000000000000.0\n" in told


def test_a_copied_command_line_may_name_its_checkpoints(run, tmp_path):
    run(*FLAGS, "--save", tmp_path / "checkpoints", "--lr", "1e-3", "--mock-data")
    assert list(tmp_path.iterdir()) == []


def test_what_differs_between_two_plans(run, tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    run(*FLAGS, "--save", one)
    run(*FLAGS[:-1], "4", "--recompute-granularity", "full", "--save", other)
    told = run("diff", one, other).splitlines()
    before, after = (
        f"Grid(tp=2, cp=1, {rest}, order='tp-cp-dp-pp')" for rest in ("dp=2, pp=2", "dp=1, pp=4")
    )
    assert told[0] == f"grid: {before} -> {after}"
    assert "stage 2: none -> layer.3 .. layer.4 (2), 2 recomputed" in told
    assert "schedule: 1f1b of 4 micro-batches -> 1f1b of 8 micro-batches" in told
    assert any(line.startswith("largest peak of a rank: ") for line in told)
    assert run("diff", one, one) == "the plans are equal\n"


def test_a_peak_is_of_all_stages_of_a_rank(run, tmp_path):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    flags = [*FLAGS, "--device", "H100"]
    run(*flags, "--save", one)
    shown = run(*flags, "--pipeline-schedule", "interleaved", "--save", other)
    (peak,) = re.findall(r"^largest rank (\S+ \S+) of ", shown, re.MULTILINE)
    assert f" -> {peak}\n" in run("diff", one, other).partition("largest peak of a rank: ")[2]


@pytest.mark.parametrize("model", [[], ["--model", "LLAMA"]])
def test_a_schedule_written_by_hand_is_planned(run, llama, tmp_path, model):
    flags = [
        str(llama) if flag == "LLAMA" else flag for flag in (CAPTURED if model else FLAGS) + model
    ] + TP2_PP2
    (tmp_path / "v.csv").write_text(V)
    printed = run(*flags, "--schedule-file", tmp_path / "v.csv", "--save", tmp_path / "plan.json")
    assert (
        "\nschedule v, predicted on cpu" in printed and "\nrank 1: 1F0 2F0 1F1 2F1 1F2" in printed
    )
    assert Plan.from_json((tmp_path / "plan.json").read_text()).schedule.placement == (0, 1, 1, 0)
    (tmp_path / "v.csv").write_text(V.replace(",1F1", ""))
    with pytest.raises(
        SystemExit,
        match=r"plan.py: --schedule-file .*v.csv: rank 1 never runs 1F1\. .*every stage\.$",
    ):
        run(*flags, "--schedule-file", tmp_path / "v.csv")


def test_a_huggingface_model_is_planned_and_every_weight_is_explained(run, tmp_path, llama):
    path = tmp_path / "plan.json"
    printed = run(*CAPTURED, *TP2_PP2, "--model", llama, "--save", path)
    plan = Plan.from_json(path.read_text())
    assert plan.grid.size == 4 and len(plan.stages) == 2 and plan.micro_batch_size == 2
    held = sum(plan.stage_parameters(stage) for stage in range(2))
    total = 2 * 128 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 64)
    assert held == total // 2 + 7 * 32
    rows = {
        line.split()[0]: " ".join(line.split())
        for line in printed.splitlines()
        if line.startswith("model.")
    }
    row = "model.layers.*.mlp.up_proj.weight 3 64 x 32 32 x 32 column parallel: its output features are sharded"
    assert rows["model.layers.*.mlp.up_proj.weight"] == row
    assert "row parallel" in rows["model.layers.*.mlp.down_proj.weight"]
    assert "replicated" in rows["model.layers.*.input_layernorm.weight"]
    # What capturing brought to light is not part of the plan.
    assert run("show", path).splitlines()[-12:] == printed.splitlines()[-12:]


def test_rules_of_the_user_show_in_the_difference(run, tmp_path, llama):
    one = tmp_path / "one.json"
    other = tmp_path / "other.json"
    rules = tmp_path / "rules.txt"
    rules.write_text(
        "# attention stays whole\nlm_head.weight=replicate  # and the head\n*.q_proj.weight=replicate\n"
    )
    run(*CAPTURED, *TP2_PP2, "--model", llama, "--save", one)
    printed = run(
        *CAPTURED, *TP2_PP2, "--model", llama, "--save", other, "--tensor-parallel-rules", rules
    )
    assert "the rule lm_head.weight=replicate asks for it" in printed
    told = run("diff", one, other)
    assert "tensor lm_head.weight (1): 128 x 32 sharded along 0 -> 128 x 32 replicated" in told
    assert (
        "tensor model.layers.*.self_attn.q_proj.weight (3): 32 x 32 sharded along 0 -> 32 x 32 replicated"
        in told
    )


def test_a_tied_weight_is_held_where_it_is_used(run, tmp_path):
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=16)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}))
    run(
        *CAPTURED,
        "--model",
        tmp_path,
        "--pipeline-model-parallel-size",
        "2",
        "--save",
        tmp_path / "plan.json",
    )
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.units[0].tied == plan.units[-1].tied == (("transformer.wte.weight", 3200),)
    once = 3200 + 16 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert sum(plan.stage_parameters(stage) for stage in range(2)) == once + 3200


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*FLAGS[:1], *FLAGS[3:]], "--world-size (missing)"),
        (["show", "nowhere.json"], "plan nowhere.json: it cannot be read"),
        (["diff", "nowhere.json"], "diff nowhere.json: it compares two stored plans"),
        (["show", __file__], f"plan {__file__}: it does not parse as JSON"),
        ([*FLAGS, "--json", f"{__file__}/plan.json"], f"--json {__file__}/plan.json: it cannot be written"),
        ([*FLAGS, "--save", f"{__file__}/plan.json"], f"--save {__file__}/plan.json: it cannot be written"),
        ([*FLAGS, "--timeline", str(ROOT)], f"--timeline {ROOT}: it is a directory"),
        ([*CAPTURED, "--model", "nowhere"], "nowhere"),
        ([*CAPTURED, "--model", "LLAMA", "--num-layers", "3"], "flag --num-layers: is a flag of pretrain_gpt.py only"),
        ([*CAPTURED, "--model", "LLAMA", "--tensor-model-parallel-size", "3"], "the number of ranks 4"),
        ([*CAPTURED, "--model", "LLAMA", "--pipeline-model-parallel-size", "2", "--device-memory-gb", "1e-5"],
         "--device-memory-gb 1e-05: no cut into 2 stages fits"),
        ([*CAPTURED, "--model", "LLAMA", "--init-weights", "directory"], "--init-weights directory: "),
        ([*CAPTURED, "--model", "LLAMA", "--tensor-parallel-rules", "none"], "--tensor-parallel-rules none: "),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(run, llama, arguments, told):
    with pytest.raises(SystemExit) as caught:
        run(*(llama if argument == "LLAMA" else argument for argument in arguments))
    text = str(caught.value.code)
    assert text.startswith("plan.py: ") and told in text and "\n" not in text


def test_more_positions_than_a_model_has_are_refused_if_it_learned_them(run, llama, tmp_path):
    """And said where it computes them."""
    long = [*CAPTURED, "--seq-length", "4096"]
    assert "is above the model's max_position_embeddings" in run(*long, "--model", llama)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2Config().to_dict() | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(SystemExit, match="--seq-length 4096: exceeds the model's"):
        run(*long, "--model", path)


def test_a_mistake_ends_the_tool_with_status_1():
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), "show", "nowhere.json"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (
        done.returncode == 1
        and done.stdout == ""
        and done.stderr.startswith("plan.py: plan nowhere.json: ")
    )


def test_a_model_that_is_no_causal_language_model_is_refused(run, tmp_path):
    for kind, name in (("t5", "T5ForConditionalGeneration"), ("bert", "BertForMaskedLM")):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": kind, "architectures": [name]})
        )
        with pytest.raises(SystemExit, match=f"it is a {name}, and GPT data trains causal"):
            run(*CAPTURED, "--model", tmp_path)
