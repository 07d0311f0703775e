"""docs/cluster.md: its tables are what the tool writes, its plans what tools/plan.py prints, its
sentences are true.
"""

import re

import pytest

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import CLUSTERS, Cluster, find_cluster
from megatron_merak.config import Config
from megatron_merak.planner import plan
from megatron_merak.planner.memory import overflowing_ranks
from tools import cluster_page
from tools import plan as plan_tool

PAGE = cluster_page.DOCUMENT.read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ python tools/plan\.py ((?:.*\\\n)*.*)\n([^`]*)```", PAGE, re.MULTILINE)
COMMANDS = [command.replace("\\\n", " ").split() for command, _ in SHOWN]


def test_the_tables_are_what_the_tool_writes():
    assert cluster_page.document() == PAGE, "run tools/cluster_page.py --write"
    assert PAGE.count("<!-- end -->") == len(cluster_page.BLOCKS)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=["bloom", "opt"])
def test_the_plans_are_what_the_tool_prints(capsys, command, shown):
    plan_tool.main(command.replace("\\\n", " ").split())
    printed = iter(capsys.readouterr().out.splitlines())
    lines = [line for line in shown.splitlines() if line not in ("", "...")]
    assert len(lines) > 5 and all(line in printed for line in lines), "in this order"
    assert "does not fit" not in shown


def _step(arguments: list[str], **changes: str) -> tuple[float, bool]:
    """Seconds of a step of a command, with other flags, and whether it fits."""
    flags = dict(re.findall(r"--(\S+)(?: ([^-]\S*))?", " ".join(arguments)))
    flags |= {name.replace("_", "-"): value for name, value in changes.items()}
    ranks, cluster = int(flags.pop("world-size")), find_cluster(flags.pop("device"))
    line = [
        token
        for name, value in flags.items()
        for token in (f"--{name}", *([value] if value else []))
    ]
    made = plan(read(build_parser(), line, Config)[0], ranks, cluster)
    return made.predicted_time, not overflowing_ranks(made, cluster.device.usable)


def test_the_sentences_about_them_are_true():
    bloom, opt = COMMANDS
    base, fits = _step(bloom)
    assert fits and round(base) == 79
    assert round(_step(bloom, device="examples/clusters/bloom.json")[0]) == 86
    kept = _step(bloom, recompute_granularity="selective")
    assert kept[1] and round(kept[0]) == 61
    assert base / _step(bloom, rank_order="tp-pp-dp")[0] == pytest.approx(1.001, abs=5e-4)
    assert (
        _step(opt)[1]
        and round(_step(opt, micro_batch_size="2", recompute_granularity="selective")[0]) == 37
    )
    # Megatron-LM's count of a step's FLOPs with recomputation (arXiv:2104.04473): at 150 TFLOP/s
    # per GPU.
    samples = 2048
    tokens = 2048
    layers = 70
    hidden = 14336
    words = 250880
    flops = 96 * samples * tokens * layers * hidden**2
    flops *= 1 + tokens / (6 * hidden) + words / (16 * layers * hidden)
    assert round(flops / (384 * 150e12)) == 105


def test_the_cluster_of_the_page_is_one(monkeypatch):
    own = Cluster.from_json("examples/clusters/bloom.json")
    assert own.link([0, 8]).bandwidth == 5.5e9 and own.device is CLUSTERS["dgx-a100"].device
