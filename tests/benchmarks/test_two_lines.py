"""The benchmark's script is HuggingFace's, and differs from ours in two lines."""

import difflib

import pytest

from benchmarks.trainers import two_lines


def test_two_lines_differ():
    plain = two_lines.SCRIPT.read_text(encoding="utf-8")
    changes = list(difflib.ndiff(plain.splitlines(), two_lines.changed(plain).splitlines()))
    assert (
        sum(line.startswith("- ") for line in changes)
        == sum(line.startswith("+ ") for line in changes)
        == 2
    )
    assert "megatron_merak" not in plain


@pytest.mark.long
def test_it_runs_both_and_its_table_goes_into_a_page(tmp_path, capsys):
    saved, page, plain = (tmp_path / name for name in ("result.json", "page.md", "plain.md"))
    assert (
        two_lines.main(["--quick", "--only", "fp32 one", "--steps", "3", "--json", str(saved)]) == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "| HF Trainer |" in line)
    assert line.startswith("| fp32, one process | HF Trainer |")

    before = f"Above.\n{two_lines.BEGIN}\nold\n{two_lines.END}\nBelow.\n"
    page.write_text(before, encoding="utf-8")
    for _ in range(2):
        assert two_lines.main(["--from", str(saved), "--into", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert (
        line in text
        and text.startswith("Above.\n")
        and text.endswith("\nBelow.\n")
        and "old" not in text
    )
    assert text.count(line) == 1 and "Median of 1 runs" in text

    plain.write_text("No marks.\n", encoding="utf-8")
    assert two_lines.main(["--from", str(saved), "--into", str(plain)]) == 2
    assert plain.read_text(encoding="utf-8") == "No marks.\n"


def test_other_losses_are_told():
    rows = [
        two_lines.Row("fp32", "one", name, [1.0], [[2.0, loss]])
        for name, loss in (("HF", 2.0), ("ours", 2.1))
    ]
    assert two_lines.disagreement(rows) == "fp32 one ours: loss 2.1 at step 1, 2.0 in another"
    assert not two_lines.disagreement(rows[:1])
    peer = two_lines.Row("fp32", "one", "other weights", [1.0], [[3.0, 3.0]], script=False)
    assert not two_lines.disagreement([rows[0], peer])
