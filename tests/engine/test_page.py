"""docs/engine.md: its code runs, one block after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


@pytest.mark.timeout(120)
def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "page.py"
    # a file, since functions of a script have source code
    path.write_text("\n".join(blocks), encoding="utf-8")
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert (
        "torch.Size([3, 9])" in printed
        and "('model.embed_tokens.weight', torch.bfloat16, (96, 32))" in printed
    )
    assert (tmp_path / "runs/engine/model/model.safetensors").exists()
