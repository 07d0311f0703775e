"""tools/verify.py on both kinds of checkpoints."""

import torch

from megatron_merak.checkpoint import store, unit
from megatron_merak.checkpoint.unit_directories import Units

TOOL = "verify"


def _save(root) -> None:
    """Both kinds in one directory."""
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
    assert tool.main([str(tmp_path / "nothing")]) == 1
    assert "no checkpoint" in capsys.readouterr().out
