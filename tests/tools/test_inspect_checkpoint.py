"""tools/inspect_checkpoint.py: what is in a checkpoint of each program, under any layout, and what
differs between two.
"""

import json
import math
import os

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint import difference, increments, store, unit, values
from megatron_merak.checkpoint.unit_directories import Units
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.checkpoint import step_runs
from tests.checkpoint.states import state
from tests.hf_trainer.test_resume import Stop, trainer
from tests.ranks import run_ranks
from tests.training.jobs import job

TOOL = "inspect_checkpoint"
PLACES = (
    "Give a --save directory, an output_dir of MerakTrainer, or a checkpoint in one of these "
    "(iter_N or checkpoint-N)."
)


def _table(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of a table whose first cells begin with ``heading``: by name, the other cells."""
    (block,) = (part for part in text.split("\n\n") if part.startswith(heading))
    return {line.split()[0]: line.split()[1:] for line in block.splitlines()[1:]}


def _save(root, iteration, tensors, meta=None):
    """Save tensors by kind and name."""
    shards = {
        kind: [store.Shard(name, tuple(t.shape), None, (), t) for name, t in named.items()]
        for kind, named in tensors.items()
    }
    return store.save(root, iteration, shards, meta or {}, None, "cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The --save directory of a job of 4 ranks, and that of one of 2 with other settings."""
    root = tmp_path_factory.mktemp("pretrained")
    layout = "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    run_ranks(job, 4, f"{layout} --train-iters 4 --save-interval 2 --save {root / 'a'}")
    sharded = "--bf16 --use-distributed-optimizer --lr-warmup-iters 1"
    run_ranks(job, 2, f"{sharded} --train-iters 4 --save-interval 2 --save {root / 'b'}")
    return root


def test_a_checkpoint_of_a_training_command(pretrained, run):
    directory = pretrained / "a"
    size = sum(path.stat().st_size for path in (directory / "iter_0000004").iterdir()) / 1024
    other = sum(path.stat().st_size for path in (directory / "iter_0000002").iterdir()) / 1024
    assert run(directory) == (
        f"""{directory}/iter_0000004
iteration         4
written by        merak-pretrain, GPT of 2 layers and hidden size 32
consumed samples  16
layout            4 ranks = tp 2 x cp 1 x dp 1 x pp 2, sharding no_shard
parameters        27,904
files             17, {size:.1f} KiB

kind        data type  tensors  elements       size
model        bfloat16       28    27,904   54.5 KiB
exp_avg       float32       28    27,904  109.0 KiB
exp_avg_sq    float32       28    27,904  109.0 KiB
master        float32       28    27,904  109.0 KiB

other checkpoints in {directory}
  iter_0000002  {other:.1f} KiB
"""
    )
    assert run(directory, "--ckpt-step", 2) == run(directory / "iter_0000002")
    assert "iteration         2" in run(directory, "--ckpt-step", 2)


def test_tensors_are_listed_and_picked_by_name(pretrained, run):
    listed = run(pretrained / "a", "--tensors", "model/*c_attn.weight").split("\n\n")[-1]
    assert listed == (
        """tensor                                      shape  data type  parts
model/transformer.h.0.attn.c_attn.weight  32 x 96   bfloat16      2
model/transformer.h.1.attn.c_attn.weight  32 x 96   bfloat16      2
"""
    )
    every = run(pretrained / "a", "--tensors").split("\n\n")[-1].splitlines()
    assert len(every) == 1 + 4 * 28
    facts = json.loads(run(pretrained / "a", "--tensors", "*.wte.*", "--json"))
    assert facts["tensors"][0] == {
        "kind": "model",
        "name": "transformer.wte.weight",
        "shape": [60, 32],
        "dtype": "bfloat16",
        "parts": 1,  # the other rank has padding only
    }
    assert facts["layout"] == {"tp": 2, "cp": 1, "pp": 2, "dp": 1, "sharding": "no_shard"}
    assert (facts["iteration"], facts["consumed_samples"], facts["files"]) == (4, 16, 17)
    assert [other["iteration"] for other in facts["others"]] == [2]
    assert facts["kinds"]["master"] == {
        "dtypes": ["float32"],
        "tensors": 28,
        "elements": 27904,
        "bytes": 4 * 27904,
    }


def test_two_layouts_of_a_run_are_compared(pretrained, run):
    a = pretrained / "a"
    b = pretrained / "b"
    text = run(a, "--diff", b, "--most", 2)
    head, settings, *kinds = text.split("\n\n")
    assert "2 ranks = tp 1 x cp 1 x dp 2 x pp 1, sharding optim" in head
    assert [line.split() for line in settings.splitlines()[:4]] == [
        ["setting", "A", "B"],
        ["--tensor-model-parallel-size", "2", "1"],
        ["--pipeline-model-parallel-size", "2", "1"],
        ["--use-distributed-optimizer", "false", "true"],
    ]
    assert ["--lr-warmup-iters", "0", "1"] in [line.split() for line in settings.splitlines()]
    assert kinds[0].startswith("model: 0 of 28 tensors equal bit for bit, relative change 0.")
    assert len(_table(text, "model tensors that changed most")) == 2
    same = run(a, "--ckpt-step", 4, "--diff", a / "iter_0000004")
    assert "The settings of the two runs are the same." in same
    assert "model: 28 of 28 tensors equal bit for bit, relative change 0\n" in same
    assert "changed most" not in same
    both = json.loads(run(a, "--ckpt-step", 2, "--diff", b, "--json"))
    assert (both["first"]["iteration"], both["second"]["iteration"]) == (2, 2)
    one = json.loads(run(a, "--ckpt-step", 2, "--diff", a / "iter_0000004", "--json"))
    assert (one["first"]["iteration"], one["second"]["iteration"]) == (2, 4)
    assert one["settings"] == [] and len(one["kinds"]["model"]["most_changed"]) == 10


def _save_parts(rank, world, root, salt, kinds):
    store.save(root, 1, state(rank, world, salt, kinds), {}, dist.group.WORLD, "cpu")


def test_parts_of_any_layout_are_joined(tmp_path, run):
    run_ranks(_save_parts, 4, tmp_path / "four", 0, ("model",))
    for name, salt in (("same", 0), ("other", 1)):
        store.save(tmp_path / name, 1, state(0, 1, salt, ("model",)), {}, None, "cpu")
    text = run(tmp_path / "four", "--diff", tmp_path / "same")
    assert "model: 5 of 5 tensors equal bit for bit, relative change 0\n" in text
    facts = json.loads(run(tmp_path / "four", "--diff", tmp_path / "other", "--json"))
    ours = {shard.name: shard.tensor for shard in state(0, 1, 0, ("model",))["model"]}
    theirs = {shard.name: shard.tensor for shard in state(0, 1, 1, ("model",))["model"]}
    found = facts["kinds"]["model"]
    assert found["equal"] == 0 and len(found["most_changed"]) == 5
    for each in found["most_changed"]:
        one = ours[each["name"]].double()
        apart = one - theirs[each["name"]].double()
        assert each["relative_change"] == pytest.approx(float(apart.norm() / one.norm()))
        assert each["largest_difference"] == float(apart.abs().max())
    changes = [each["relative_change"] for each in found["most_changed"]]
    assert changes == sorted(changes, reverse=True)


def test_what_cannot_be_compared_is_named(tmp_path, run):
    ones = torch.ones(2, 3)
    odd = torch.tensor([1.0, math.inf])
    one = {"model": {"a": ones, "b": ones, "c": ones, "odd": odd}, "exp_avg": {"a": ones}}
    other = {"model": {"a": ones.bfloat16(), "b": torch.ones(3, 2), "d": ones, "odd": odd * 2}}
    meta = {"config": {"optimizer": {"lr": 0.1}, "train": {"seed": 1}}}
    _save(tmp_path / "a", 1, one, meta)
    meta["config"] = {"optimizer": {"lr": 0.2}, "train": {}}
    other["master"] = {"a": ones}
    _save(tmp_path / "b", 1, other, meta)
    assert run(tmp_path / "a", "--diff", tmp_path / "b").split("\n\n", 1)[1] == (
        """setting  A    B
--lr     0.1  0.2

Only one of the two runs has settings of train.

model: 0 of 2 tensors equal bit for bit, relative change 0

model tensors only in A
  c

model tensors only in B
  d

model tensors of another shape  A      B
b                               2 x 3  3 x 2

model tensors of another data type  A        B
a                                   float32  bfloat16

model tensors that changed most  relative  largest difference
odd                                   nan                 nan
a                                       0                   0

exp_avg tensors only in A
  a

master tensors only in B
  a
"""
    )
    facts = json.loads(run(tmp_path / "a", "--diff", tmp_path / "b", "--json"))
    assert facts["kinds"]["model"]["most_changed"][0] == {
        "name": "odd",
        "relative_change": None,
        "largest_difference": None,
    }


def test_health_shows_what_is_not_finite_and_what_is_large(tmp_path, run):
    mask = torch.tensor([0.0, -math.inf, math.nan, -math.inf])
    model = {"small": torch.tensor([0.5, -0.5]), "large": torch.tensor([3.0, 4.0]), "mask": mask}
    _save(tmp_path, 1, {"model": model, "exp_avg": {"small": torch.zeros(2)}})
    assert run(tmp_path, "--health", "--most", 2).split("\n\n", 2)[2] == (
        """model  NaN  inf   min  max    rms
all      1    2  -0.5    4  2.258
mask     1    2     0    0      0
large    0    0     3    4  3.536

exp_avg  NaN  inf  min  max  rms
all        0    0    0    0    0
small      0    0    0    0    0
"""
    )
    facts = json.loads(run(tmp_path, "--health", "--tensors", "model/mask", "--json"))
    assert list(facts["health"]) == ["model"] and facts["health"]["model"]["nan"] == 1
    assert [each["name"] for each in facts["health"]["model"]["tensors"]] == ["mask"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_values_are_read_piece_by_piece(dtype, monkeypatch):
    monkeypatch.setattr(values, "_AT_ONCE", 7)
    tensor = (torch.arange(60).reshape(5, 12) - 30).to(dtype)
    found = values.values_of(tensor.t())
    exact = tensor.double()
    assert (found.least, found.most) == (exact.min().item(), exact.max().item())
    assert found.rms == pytest.approx(exact.square().mean().sqrt().item())
    assert values.values_of(tensor[:0]) == values.joined([])
    assert difference.change_of("x", tensor, tensor.clone()).equal
    other = tensor.clone()
    other[-1, -1] = 0
    change = difference.change_of("x", tensor, other)
    assert not change.equal and change.largest == exact[-1, -1]


def test_a_checkpoint_of_the_trainer(tmp_path, run, capsys):
    trainer(tmp_path, [Stop(4)], save_steps=2, kind=MerakTrainer).train()
    capsys.readouterr()
    text = run(tmp_path)
    files = sum(len(names) for _, _, names in os.walk(tmp_path / "checkpoint-4"))
    assert text.startswith(
        f"""{tmp_path}/checkpoint-4
iteration         4
written by        MerakTrainer, LlamaForCausalLM
consumed samples  24 of epoch 1
layout            1 rank = tp 1 x cp 1 x dp 1 x pp 1, sharding no_shard
parameters        6,480
files             {files}, """
    )
    assert f"other checkpoints in {tmp_path}\n  checkpoint-2  " in text
    assert run(tmp_path / "checkpoint-4") == text
    state = tmp_path / "checkpoint-4" / "training_state"
    assert "written by        MerakTrainer" in run(state)
    arguments = tmp_path / "checkpoint-4" / "training_args.json"
    assert json.loads(arguments.read_text())["learning_rate"] == 0.01
    facts = json.loads(run(tmp_path, "--diff", tmp_path / "checkpoint-2", "--json"))
    assert facts["settings"] == [] and facts["kinds"]["model"]["equal"] == 0

    trainer(tmp_path / "b", [Stop(2)], save_steps=2, kind=MerakTrainer, learning_rate=0.02).train()
    capsys.readouterr()
    facts = json.loads(run(tmp_path, "--ckpt-step", 2, "--diff", tmp_path / "b", "--json"))
    changes = {each["name"]: (each["first"], each["second"]) for each in facts["settings"]}
    assert changes["learning_rate"] == (0.01, 0.02) and set(changes) <= {
        "learning_rate",
        "output_dir",
        "logging_dir",
    }


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        ({"optimizer_steps": 1, "extra": {}}, "Engine"),
        ({"config": {"train": {}, "model": {}}}, "merak-convert"),
        ({"config": {"train": {"seed": 1}, "model": {"model": "m"}}}, "merak-pretrain-hf, m"),
        ({"config": 3, "plan": {"grid": {}}}, "merak-pretrain"),
        ({}, "a program that it does not name"),
        ({"extra": {"position": "x", "model": []}}, "MerakTrainer"),
    ],
)
def test_any_run_is_described_as_far_as_it_is_known(meta, told, tmp_path, run):
    _save(tmp_path, 1, {"model": {"x": torch.ones(1)}}, meta)
    lines = run(tmp_path).splitlines()
    assert lines[2].split(maxsplit=2)[2] == told
    assert not any(line.startswith("layout") for line in lines)


def _make(root):
    """A directory of every kind that is no checkpoint, and one with a checkpoint."""
    (root / "empty").mkdir()
    (root / "file").touch()
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    (root / "megatron" / "iter_0000003").mkdir(parents=True)
    (root / "megatron" / "iter_0000003" / "metadata.json").write_text("{}")
    path = _save(root / "run", 4, {"model": {"x": torch.ones(1)}})
    (root / "run" / "iter_0000009").mkdir()
    torn = _save(root / "torn", 4, {"model": {"x": torch.ones(1)}})
    (torn / "manifest.json").write_text("x")
    cut = _save(root / "cut", 4, {"model": {"x": torch.ones(1)}}) / "model-rank-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    fresh = Units(root).names(5).fresh
    fresh.mkdir()
    (fresh / "config.json").write_text("{}")
    unit.complete(fresh, 5, {})
    Units(root).publish(5)
    return path


REFUSED = {
    "absent": (["gone"], f"DIRECTORY gone: there is no such directory. {PLACES}"),
    "a file": (["file"], f"DIRECTORY file: it is not a directory. {PLACES}"),
    "nothing": (["empty"], f"DIRECTORY empty: it has no complete checkpoint. {PLACES}"),
    "transformers": (
        ["hf"],
        "DIRECTORY hf: it is a HuggingFace directory, and has no checkpoint of megatron_merak. "
        "Open it with from_pretrained(), or convert it with merak-convert first.",
    ),
    "Megatron-LM": (
        ["megatron"],
        "DIRECTORY megatron: it has checkpoints of Megatron-LM. Convert them with merak-convert first.",
    ),
    "weights alone": (
        ["checkpoint-5"],
        "checkpoint checkpoint-5: it has the weights of a model, and no training state. "
        "Open it with from_pretrained(), or give a checkpoint with training state.",
    ),
    "incomplete": (
        ["run/iter_0000009"],
        "checkpoint run/iter_0000009: it has no manifest.json, so it is not complete. "
        "Load another iteration with --ckpt-step.",
    ),
    "damaged": (
        ["torn"],
        "manifest torn/iter_0000004/manifest.json: Expecting value: line 1 column 1 (char 0). "
        "Load another iteration with --ckpt-step, or restore this one from a copy.",
    ),
    "cut off": (
        ["cut", "--health"],
        "checkpoint file cut/iter_0000004/model-rank-00000.safetensors: it has 179 bytes where "
        "180 were written. "
        "Load another iteration with --ckpt-step, or restore this one from a copy.",
    ),
    "another step": (
        ["run", "--ckpt-step", "5"],
        "--ckpt-step 5: run has 4. Give one of these, or leave it out.",
    ),
    "a step of one": (
        ["run/iter_0000004", "--ckpt-step", "5"],
        "--ckpt-step 5: run/iter_0000004 is a single checkpoint. Leave it out.",
    ),
    "no tensor": (
        ["run", "--tensors", "y*"],
        "--tensors y*: no tensor of run/iter_0000004 matches. "
        "Give another pattern; --tensors alone lists all names.",
    ),
    "nothing to compare with": (
        ["run", "--diff", "gone"],
        f"--diff gone: there is no such directory. {PLACES}",
    ),
    "fewer than none": (["run", "--most", "-1"], "--most -1: it is negative. Give 0 or more."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_checkpoint_is_one_line(case, tmp_path, tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["merak-inspect"])
    _make(tmp_path)
    arguments, told = REFUSED[case]
    with pytest.raises(SystemExit) as ended:
        tool.main(arguments)
    assert ended.value.code == f"merak-inspect: {told}"


def test_an_incomplete_one_beside_it_is_told_and_nothing_changes(tmp_path, run):
    path = _make(tmp_path)
    before = {each: each.lstat().st_mtime_ns for each in tmp_path.rglob("*")}
    text = run(tmp_path / "run", "--health", "--tensors")
    run(tmp_path / "run", "--diff", path)
    assert f"passed over: checkpoint {tmp_path}/run/iter_0000009: it has no manifest" in text
    assert {each: each.lstat().st_mtime_ns for each in tmp_path.rglob("*")} == before


def test_increments_that_a_job_removes_meanwhile_are_left_out(tmp_path, run, monkeypatch):
    steps = step_runs.writer(tmp_path, step_runs.checkpoint(tmp_path, 10))
    for group in ([11, 12], [13]):
        step_runs.write_steps(steps, group)
    really = increments.Increments.newest_first

    def removed_by_then(self, faults=None):
        found = [*really(self, faults)]
        self.remove(11)
        return iter(found)

    monkeypatch.setattr(increments.Increments, "newest_first", removed_by_then)
    text = run(tmp_path)
    assert "steps 13 to 13" in text and "steps 11" not in text and "passed over" not in text


def test_increments_are_listed(tmp_path, run):
    steps = step_runs.writer(tmp_path, step_runs.checkpoint(tmp_path, 10))
    for group in ([11, 12], [13], [15, 16]):
        step_runs.write_steps(steps, group)
    name = "increments_0123456789abcdef"
    sizes = {}
    for file in tmp_path.glob(f"{name}/*/*.safetensors"):
        part = "last" if "_0000015" in file.parent.name else "first"
        sizes[part] = sizes.get(part, 0) + file.stat().st_size
    assert f"""increments in {tmp_path}
  steps 15 to 16  {name}  {sizes["last"]} B
  steps 11 to 13  {name}  {sizes["first"]} B
""" in run(tmp_path)
    found = json.loads(run(tmp_path, "--json"))["increments"]
    assert [(each["first"], each["last"]) for each in found] == [(15, 16), (11, 13)]
    [directory] = tmp_path.glob(f"{name}/steps_0000013")
    (directory / "manifest.json").write_text("x")
    text = run(tmp_path)
    assert "steps 11 to 12" in text and f"passed over: manifest {directory}/manifest.json" in text
