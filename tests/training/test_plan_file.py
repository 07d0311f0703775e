"""A plan that tools/plan.py wrote and a hand edited rules: pretrain_gpt.py, pretrain_hf.py and
MerakTrainer.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import CLUSTERS, DEVICES
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import ConfigError, MerakError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, Plan
from megatron_merak.stages.blueprint import blueprint_from_plan
from megatron_merak.stages.traced import Traced
from megatron_merak.training.plan_file import decided, plan_of, stored
from tests.engines import blueprint_of
from tests.graph.tiny import randomise, tiny
from tests.ranks import run_ranks
from tests.training.test_pretrain_hf import GPT, ROOT, losses, pretrain, shape  # noqa: F401
from tools import plan as tool

pytestmark = pytest.mark.long

BATCHES = "--seq-length 16 --micro-batch-size 2 --global-batch-size 8"


def planned(path: Path, ranks: int, flags: str) -> Plan:
    tool.main(f"show --world-size {ranks} {BATCHES} {flags} --json {path}".split())
    return stored(str(path))


def edit(path: Path, **changes) -> Plan:
    """As a hand does it: some values of the file."""
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))
    return stored(str(path))


def test_the_gpt_of_flags_runs_an_edited_plan(tmp_path, capsys):
    path, alone, edited = (tmp_path / name for name in ("plan.json", "alone.jsonl", "edited.jsonl"))
    made = planned(path, 2, f"{GPT} --pipeline-model-parallel-size 2")
    assert [len(stage.units) for stage in made.stages] == [2, 2]
    stages = [{"first": 0, "last": 1}, {"first": 1, "last": 4, "recompute": [1, 2], "span": 2}]
    moved = edit(path, stages=stages, schedule=build_schedule("zb-h1", 2, 4).to_dict())
    assert moved.predicted_time > made.predicted_time and capsys.readouterr().out
    pretrain("pretrain_gpt.py", f"{GPT} --metrics {alone}")
    told = pretrain("pretrain_gpt.py", f"{GPT} --plan {path} --metrics {edited}", ranks=2).stdout
    assert "layer.0 .. head" in told and "schedule zb-h1" in told and "2 of 3" in told
    assert losses(edited) == pytest.approx(losses(alone), abs=2e-6)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--micro-batch-size 4", "--micro-batch-size 4: the plan has 2"),
        ("--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 1: the plan has 2"),
        ("--bf16", "--bf16 True: the plan has False"),
        ("--pipeline-schedule 1f1b", "--pipeline-schedule .*: it is decided by the plan"),
        ("--recompute-granularity=full", "--recompute-granularity .*: it is decided by the plan"),
    ],
)
def test_flags_that_contradict_a_plan_are_named(tmp_path, capsys, flags, told):
    path = tmp_path / "plan.json"
    planned(path, 2, f"{GPT} --pipeline-model-parallel-size 2")
    line = f"{GPT} --plan {path} ".split()
    plain, _ = read(build_parser(), line, Config, decided(Config, line))
    assert (
        plan_of(plain, 2, CLUSTERS["cpu"]).grid == Grid(pp=2) and plain.train.global_batch_size == 8
    )
    with pytest.raises(MerakError, match=told):
        line += flags.split()
        plan_of(read(build_parser(), line, Config, decided(Config, line))[0], 2, CLUSTERS["cpu"])


def test_a_plan_and_either_flag_of_sharding_must_agree(tmp_path, capsys):
    path, zero, strategy = (
        tmp_path / "plan.json",
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy",
    )
    planned(path, 2, f"{GPT} {zero}")

    def sharding(flags: str) -> str:
        line = f"{GPT} --plan {path} {flags}".split()
        config, _ = read(build_parser(), line, Config, decided(Config, line))
        config.validate(2, training=False)
        return plan_of(config, 2, CLUSTERS["cpu"]).sharding

    assert {
        sharding(flags) for flags in ("", zero, f"{strategy} optim", f"{strategy}=optim {zero}")
    } == {"optim"}
    with pytest.raises(MerakError, match=f"{strategy} no_shard: the plan has optim"):
        sharding(f"{strategy} no_shard")
    edit(path, sharding="optim_grads")
    assert {
        sharding(flags)
        for flags in ("", f"{strategy} optim_grads", f"{strategy} optim_grads {zero}")
    } == {"optim_grads"}
    with pytest.raises(MerakError, match=f"^{zero} optim: the plan has optim_grads"):
        sharding(zero)


def test_a_plan_decides_the_instances_and_a_flag_must_agree(tmp_path, capsys):
    path, count = tmp_path / "plan.json", "--num-distributed-optimizer-instances"
    assert planned(path, 4, f"{GPT} --use-distributed-optimizer {count} 2").sharding_instances == 2
    text = path.read_text()

    def instances(flags: str) -> int:
        line = f"{GPT} --plan {path} {flags}".split()
        config, _ = read(build_parser(), line, Config, decided(Config, line))
        config.validate(4, training=False)
        assert config.parallel.num_distributed_optimizer_instances == 2
        return plan_of(config, 4, CLUSTERS["cpu"]).sharding_instances

    assert instances("") == instances(f"{count} 2") == 2
    with pytest.raises(MerakError, match=f"{count} 1: the plan has 2"):
        line = f"{GPT} --plan {path} {count} 1".split()
        plan_of(read(build_parser(), line, Config, decided(Config, line))[0], 4, CLUSTERS["cpu"])
    for found, told in (
        (3, "sharding_instances 3: does not divide the 4"),
        (4, "sharding_instances 4: an instance"),
    ):
        path.write_text(text.replace('"sharding_instances": 2', f'"sharding_instances": {found}'))
        with pytest.raises(PlanError, match=f"plan .*: {told}"):
            instances("")
    path.write_text(
        "\n".join(line for line in text.splitlines() if "sharding_instances" not in line)
    )
    assert stored(str(path)).sharding_instances == 1, (
        "plans were stored before there were instances"
    )


def test_a_plan_and_either_flag_of_the_rank_order_must_agree(tmp_path, capsys):
    path, mapping = tmp_path / "plan.json", "--use-tp-pp-dp-mapping"
    layout = f"{GPT} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    made = planned(path, 8, f"{layout} {mapping}")
    assert made.grid.groups("pp")[0] == [0, 2] and made.grid.groups("dp")[0] == [0, 4]
    assert planned(path, 8, f"{layout} --rank-order tp-cp-ep-pp-dp") == made

    def order(flags: str) -> str:
        line = f"{GPT} --plan {path} {flags}".split()
        config, _ = read(build_parser(), line, Config, decided(Config, line))
        config.validate(8, training=False)
        return plan_of(config, 8, CLUSTERS["cpu"]).grid.order

    agreeing = ("", mapping, "--rank-order tp-pp-dp", f"--rank-order=tp-cp-pp-dp {mapping}")
    assert {order(flags) for flags in agreeing} == {"tp-cp-pp-dp"}
    with pytest.raises(ConfigError, match="^--rank-order tp-cp-dp-pp: the plan has tp-cp-pp-dp"):
        order("--rank-order tp-dp-pp")
    edit(path, grid=vars(made.grid) | {"order": "dp-tp-pp"})
    with pytest.raises(ConfigError, match=f"^{mapping} tp-cp-pp-dp: the plan has dp-tp-cp-pp"):
        order(mapping)
    planned(path, 1, f"{GPT} --rank-order dp-tp-pp")
    with pytest.raises(
        ConfigError,
        match="plan .*: it is a plan of the GPT of merak-pretrain. Make it with tools/plan.py",
    ):
        MerakArguments("unused", use_cpu=True, plan=str(path))
    with pytest.raises(PlanError, match="^--plan .*: it is a plan of the GPT of merak-pretrain. "):
        decided(HFConfig, ["--plan", str(path)])
    edit(path, graph_sharding="cut")
    for given in (None, "dp-tp-cp-pp", "dp-tp-pp"):
        assert (
            MerakArguments("unused", use_cpu=True, plan=str(path), rank_order=given).rank_order
            == "dp-tp-cp-pp"
        )
    with pytest.raises(ConfigError, match="rank_order tp-cp-pp-dp: the plan .* has dp-tp-cp-pp"):
        MerakArguments("unused", use_cpu=True, plan=str(path), rank_order="tp-pp-dp")


def test_hybrid_sharding_beside_a_plan_of_one_instance_is_refused(tmp_path, capsys):
    path = tmp_path / "plan.json"
    planned(path, 4, f"{GPT} --data-parallel-sharding-strategy optim_grads_params")
    edit(path, graph_sharding="cut")
    with pytest.raises(
        ConfigError,
        match="fsdp: hybrid_shard .*: the plan .* has one instance. Leave it out, or make",
    ):
        MerakArguments("unused", use_cpu=True, plan=str(path), fsdp="hybrid_shard")


def test_a_plan_that_cannot_run_here_is_refused(tmp_path, capsys):
    path = tmp_path / "plan.json"
    planned(path, 2, f"{GPT} --pipeline-model-parallel-size 2")
    stored_values = json.loads(path.read_text())
    line = f"{GPT} --plan {path}".split()
    config, _ = read(build_parser(), line, Config, decided(Config, line))
    with pytest.raises(PlanError, match="micro_batch_size of 2 or more"):
        edit(path, overlap="sub-pipeline", micro_batch_size=1)
    with pytest.raises(PlanError, match="a step has no micro-batch"):
        edit(path, schedule={"name": "none", "stages": 2, "microbatches": 0, "ranks": [[], []]})
    edit(path, **stored_values | {"dtype": "float16"})
    assert decided(Config, line)["fp16"] and not decided(Config, line)["bf16"]
    with pytest.raises(ConfigError, match="--fp16 False: the plan has True"):
        plan_of(config, 2, CLUSTERS["cpu"])
    edit(path, **stored_values)
    with pytest.raises(PlanError, match="are 2 ranks, and the job has 4"):
        plan_of(config, 4, CLUSTERS["cpu"])
    small = replace(
        CLUSTERS["dgx-h100"], device=replace(DEVICES["H100"], memory=1000, name="small")
    )
    with pytest.raises(PlanError, match="pipeline rank 0 does not fit into the 0 GiB of small"):
        plan_of(config, 2, small)


@pytest.mark.long
def test_a_huggingface_model_runs_the_edited_plan_through_both_doors(tmp_path, shape, capsys):  # noqa: F811
    path, alone, edited = (tmp_path / name for name in ("plan.json", "alone.jsonl", "edited.jsonl"))
    made = planned(path, 2, f"--model {shape} --tensor-model-parallel-size 2")
    capsys.readouterr()
    pinned = {  # column to row, and replicated
        "model.layers.0.self_attn.o_proj.weight": None,
        "model.embed_tokens.weight": None,
    }
    rows = [replace(row, dim=pinned.get(row.name, row.dim)) for row in made.shardings]
    assert rows != list(made.shardings)
    edit(path, shardings=[vars(row) for row in rows])
    pretrain("pretrain_hf.py", f"--model {shape} --metrics {alone}")
    told = pretrain(
        "pretrain_hf.py", f"--model {shape} --plan {path} --metrics {edited}", ranks=2
    ).stdout
    assert losses(edited) == pytest.approx(losses(alone), abs=2e-6)
    assert "model.embed_tokens.weight is replicated" in told


def _trained(rank, world_size, plan, directory):
    from megatron_merak import MerakArguments, MerakTrainer

    model, data = llama_and_tokens()
    args = MerakArguments(
        directory, plan=plan, max_steps=2, learning_rate=1e-2, report_to="none", save_strategy="no", use_cpu=True,
        logging_steps=1, disable_tqdm=True, per_device_train_batch_size=2, lr_scheduler_type="constant",
        gradient_accumulation_steps=1 if plan else 4,
    )  # fmt: skip
    trainer = MerakTrainer(model, args, train_dataset=data)
    trainer.train()
    made = trainer.engine.plan
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return (
        told,
        [(row.name, row.dim) for row in made.shardings],
        made.grid.tp,
        args.gradient_accumulation_steps,
    )


def llama_and_tokens():
    real, _, _ = tiny("llama")
    torch.manual_seed(3)
    model = randomise(real())
    tokens = torch.randint(0, model.config.vocab_size, (16, 16))
    return model, [{"input_ids": row, "labels": row} for row in tokens]


def test_a_trainer_runs_the_edited_plan(tmp_path, capsys):
    path, config = tmp_path / "plan.json", tmp_path / "config.json"
    config.write_text(
        json.dumps(llama_and_tokens()[0].config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    made = planned(path, 2, f"--model {config} --tensor-model-parallel-size 2")
    name = "model.layers.1.mlp.down_proj.weight"
    edit(
        path,
        shardings=[
            vars(replace(row, dim=None) if row.name == name else row) for row in made.shardings
        ],
    )
    capsys.readouterr()
    alone, *_ = _trained(0, 1, None, str(tmp_path))
    for told, rows, tp, micro_batches in run_ranks(_trained, 2, str(path), str(tmp_path)):
        assert told == pytest.approx(alone, abs=1e-5) and len(told) == 2
        assert (tp, micro_batches, dict(rows)[name]) == (2, 4, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"per_device_train_batch_size": 4}, r"per_device_train_batch_size 4: the plan .* has 2"),
        ({"pipeline_model_parallel_size": 2}, r"pipeline_model_parallel_size 2: the plan .* has 1"),
        ({"pipeline_schedule": "gpipe"}, r"pipeline_schedule gpipe: it is decided by the plan"),
        (
            {"fsdp": "full_shard"},
            r"data_parallel_sharding_strategy optim_grads_params: the plan .* has no_shard",
        ),
        (
            {"fsdp": "no_shard", "fsdp_config": {"activation_checkpointing": True}},
            r"fsdp_config: activation_checkpointing True: it is decided by the plan",
        ),
        ({"plan": "nowhere.json"}, r"plan nowhere.json: it cannot be read"),
    ],
)
def test_arguments_that_contradict_a_plan_are_named(tmp_path, changes, told):
    from megatron_merak import MerakArguments

    traced = Traced(*llama_traced())
    path = tmp_path / "plan.json"
    path.write_text(blueprint_of(traced, Grid(), microbatches=4).plan.to_json())
    with pytest.raises(MerakError, match=told):
        MerakArguments(
            str(tmp_path), **{"plan": str(path), "use_cpu": True, "report_to": "none"} | changes
        )


def llama_traced():
    real, _, batch = tiny("llama")
    return randomise(real()), batch


def test_an_untouched_plan_is_followed_to_the_last_number():
    for name in ("llama", "gpt2", "t5"):
        real, _, batch = tiny(name)
        traced = Traced(real(), batch)
        for grid, parts in ((Grid(), False), (Grid(tp=2, pp=2), False), (Grid(tp=2, pp=2), True)):
            made = blueprint_of(traced, grid, microbatches=4, sequence_parallel=parts).plan
            assert made.sequence_parallel == parts
            again = Plan.from_json(made.to_json())
            assert again == made
            assert replace(blueprint_from_plan(traced, again).plan, reasons=made.reasons) == made


def _refused(plan, told):
    with pytest.raises(PlanError, match=told):
        blueprint_from_plan(Traced(*llama_traced()), plan)


def test_a_plan_that_does_not_fit_the_model_is_told_apart_by_its_first_difference():
    traced = Traced(*llama_traced())
    made = blueprint_of(traced, Grid(tp=2, pp=2), microbatches=4).plan
    real, _, batch = tiny("gpt2")
    _refused(
        blueprint_of(Traced(real(), batch), Grid(tp=2, pp=2), microbatches=4).plan,
        "unit 0 .*the model's is",
    )
    units = (*made.units[:-1], replace(made.units[-1], name="head"))
    _refused(replace(made, units=units), r"unit \d+ head: the model's is ")
    with pytest.raises(PlanError, match="stages .*must cover the"):
        plain = made.to_dict()
        plain["stages"][-1]["last"] += 1  # a cut beyond the chain
        Plan.from_dict(plain)
    weight = next(row for row in made.shardings if row.dim is not None and row.shape[0] % 2 == 0)
    for changed in (
        replace(weight, blocks=(weight.shape[weight.dim] - 1, 1)),  # does not divide
        replace(weight, shape=(weight.shape[0] + 2, *weight.shape[1:])),
        replace(weight, name="model.nothing.weight"),
    ):
        rows = tuple(changed if row == weight else row for row in made.shardings)
        _refused(
            replace(made, shardings=rows),
            weight.name if changed.name == weight.name else "model.nothing.weight",
        )
