"""tools/verify.py on both kinds of checkpoints."""

import pytest
import torch

from megatron_merak.checkpoint import store, unit
from megatron_merak.checkpoint.increments import Increments
from megatron_merak.checkpoint.unit_directories import Units
from megatron_merak.cli import verify
from tests.checkpoint import step_runs

TOOL = "verify"


def _save(root) -> None:
    """Both kinds in one directory."""
    root.mkdir(exist_ok=True)
    for step in (5, 10):
        tensors = [store.Shard("w", (3, 4), None, (), torch.full((3, 4), 1.0))]
        store.save(root, step, {"model": tensors}, {}, None, "cpu")
        fresh = Units(root).names(step).fresh
        fresh.mkdir()
        (fresh / "config.json").write_text("{}")
        unit.complete(fresh, step, {})
        Units(root).publish(step)


def test_whole_ones_are_listed_newest_first(tmp_path, tool, capsys):
    _save(tmp_path)
    assert tool.main([str(tmp_path)]) == 0
    names = [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        f"{n}: undamaged" for n in ("checkpoint-10", "checkpoint-5", "iter_0000010", "iter_0000005")
    ]
    assert tool.main([str(tmp_path / "checkpoint-5"), str(tmp_path / "iter_0000005")]) == 0
    assert capsys.readouterr().out.count(": undamaged") == 2


def test_damage_is_named_and_fails(tmp_path, tool, capsys):
    _save(tmp_path)
    (tmp_path / "checkpoint-5" / "config.json").write_text("[]")
    (tmp_path / "iter_0000010" / "manifest.json").write_text("x")
    (tmp_path / "checkpoint-10" / "config.json").unlink()
    assert tool.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert told.count(": undamaged") == 1 and told.count("damaged: ") == 3
    for name in (
        "checkpoint-5/config.json",
        "iter_0000010/manifest.json",
        "checkpoint-10/config.json",
    ):
        assert name in told


def test_what_a_run_removes_meanwhile_is_no_damage(tmp_path, tool, capsys, monkeypatch):
    _save(tmp_path)
    really = verify.verify

    def removed_by_then(path):
        if path.name == "iter_0000005":
            store.Iterations(tmp_path).remove(5)
        really(path)

    monkeypatch.setattr(verify, "verify", removed_by_then)
    assert tool.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1].endswith("iter_0000005: not verified: a run has removed it meanwhile")
    assert sum(line.endswith(": undamaged") for line in told) == 3


def test_what_a_run_completes_meanwhile_is_verified_under_its_name(
    tmp_path, tool, capsys, monkeypatch
):
    steps = step_runs.writer(tmp_path, step_runs.checkpoint(tmp_path, 10))
    with monkeypatch.context() as patched:
        patched.setattr(Increments, "publish", lambda self, number: None)
        step_runs.write_steps(steps, [11, 12])
    [run] = tmp_path.glob("increments_*")
    really = verify.verify

    def completed_by_then(path):
        if path.name == "steps_0000011.new":
            Increments(run).publish(11)
        really(path)

    monkeypatch.setattr(verify, "verify", completed_by_then)
    assert tool.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'steps_0000011'}: undamaged\n"


def test_nothing_verified_is_no_success(tmp_path, tool, monkeypatch):
    step_runs.checkpoint(tmp_path, 10)
    really = verify.verify

    def removed_by_then(path):
        store.Iterations(tmp_path).remove(10)
        really(path)

    monkeypatch.setattr(verify, "verify", removed_by_then)
    assert tool.main([str(tmp_path)]) == 1


def test_increments_are_verified_too(tmp_path, tool, capsys):
    steps = step_runs.writer(tmp_path, step_runs.checkpoint(tmp_path, 10))
    for group in ([11, 12], [13], [14, 15]):
        step_runs.write_steps(steps, group)
    assert tool.main([str(tmp_path)]) == 0
    names = [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        f"{n}: undamaged"
        for n in ("iter_0000010", "steps_0000014", "steps_0000013", "steps_0000011")
    ]
    [run] = tmp_path.glob("increments_*")
    file = run / "steps_0000014" / "step_0000015-rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    (run / "steps_0000013" / "manifest.json").unlink()
    for place, undamaged, damaged in ((tmp_path, 2, 2), (run, 1, 2), (run / "steps_0000011", 1, 0)):
        assert tool.main([str(place)]) == int(damaged > 0)
        told = capsys.readouterr().out
        assert told.count(": undamaged") == undamaged and told.count("damaged: ") == damaged
        assert ("step_0000015-rank-00000" in told) == (damaged > 0)


def test_what_has_no_checkpoint_is_told(tmp_path, tool, capsys):
    _save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert tool.main([str(tmp_path / "empty")]) == 1
    empty = f"DIRECTORY {tmp_path / 'empty'}: there is no checkpoint in it. "
    assert capsys.readouterr().out.startswith(empty)
    remedy = (
        "Give a --save directory, an output_dir of MerakTrainer, or a checkpoint in one of these "
        "(iter_N or checkpoint-N)."
    )
    absent = f"DIRECTORY {tmp_path / 'nothing'}: there is no such directory. {remedy}\n"
    assert tool.main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().out == absent
    assert tool.main([str(tmp_path / "file")]) == 1
    assert capsys.readouterr().out == (
        f"DIRECTORY {tmp_path / 'file'}: it is not a directory. {remedy}\n"
    )
    assert tool.main([str(tmp_path / "nothing"), str(tmp_path / "run")]) == 1
    told = capsys.readouterr().out
    assert told.count(": undamaged") == 4 and told.endswith(absent)
    assert tool.main([str(tmp_path / "run" / "checkpoint-7")]) == 1
    assert "checkpoint-7: there is no such directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            "release/metadata.json",
            "it has checkpoints of Megatron-LM. Convert them with merak-convert",
        ),
        ("iter_0000002/mp_rank_00/model_optim_rng.pt", "it has checkpoints of Megatron-LM"),
        (".metadata", "it has checkpoints of torch.distributed.checkpoint"),
        ("config.json", "there is no checkpoint in it"),
    ],
)
def test_checkpoints_of_other_programs_are_told(file, told, tmp_path, tool, capsys):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    assert tool.main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert told in output and output.count("\n") == 1
