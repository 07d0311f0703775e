"""The same short scripts through transformers.Trainer and MerakTrainer, in every kind of parallelism."""

import itertools

import pytest

from megatron_merak.config.sections import OVERLAPS, SCHEDULES
from tests.hf_trainer.cases import CASES
from tests.hf_trainer.runs import alike, merak_run, same_files, transformers_run
from tests.ranks import run_ranks

LAYOUTS = {"one": (1, 1, 1), "pp2": (1, 2, 1), "tp2": (2, 1, 1), "dp2": (1, 1, 2)}  # tensor, pipeline, data
CHOSEN = {
    *(("causal", layout) for layout in ("one", "pp2", "tp2")),
    *(("classes", "dp2"), ("t5", "pp2"), ("mixtral", "tp2"), ("stream", "pp2")),
    *((name, "one") for name in ("tied", "packed", "frozen", "resumed", "logged")),
    *(("loss function", "tp2"), ("label smoothing", "one"), ("hidden states", "pp2"), ("distilled", "pp2")),
}
WAYS = [("pp2", {"pipeline_schedule": name}) for name in SCHEDULES] + [
    ("tp2", {"tp_comm_overlap": name}) for name in OVERLAPS
]


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """(case, replicas) -> what transformers does, and where it saved it; each runs once."""
    found = {}

    def run(name, replicas):
        if (name, replicas) not in found:
            directory = tmp_path_factory.mktemp(f"{name}{replicas}")
            found[name, replicas] = transformers_run(name, replicas, str(directory)), directory
        return found[name, replicas]

    return run


def compare(name, layout, theirs, directory, **changes):
    tp, pp, dp = LAYOUTS[layout]
    if changes.get("pipeline_schedule") == "shifted":  # needs four micro-batches
        changes, dp = {**changes, "gradient_accumulation_steps": 4}, 2
    ranks = run_ranks(merak_run, tp * pp * LAYOUTS[layout][2], name, str(directory), tp, pp, changes, timeout=280)
    expected, saved = theirs(name, dp)
    for found in ranks:
        assert found["logs"] == ranks[0]["logs"]
        alike(found, expected)
    for place in ("last", expected["checkpoints"][-1]):
        same_files(name, directory / place, saved / place)


def product(cells, chosen):
    def label(part):
        return part if isinstance(part, str) else "-".join(part.values())

    return [
        pytest.param(*cell, marks=() if chosen(cell) else pytest.mark.slow, id="-".join(map(label, cell)))
        for cell in cells
    ]


@pytest.mark.parametrize(("name", "layout"), product(itertools.product(CASES, LAYOUTS), CHOSEN.__contains__))
def test_a_script_gives_what_it_gives_in_transformers(tmp_path, theirs, name, layout):
    compare(name, layout, theirs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), product(WAYS, lambda cell: True))
@pytest.mark.parametrize("name", ["causal", "classes"])
def test_so_does_every_schedule_and_overlap(tmp_path, theirs, name, layout, way):
    compare(name, layout, theirs, tmp_path, **way)
