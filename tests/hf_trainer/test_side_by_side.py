"""The same short scripts through transformers.Trainer and MerakTrainer, in every kind of
parallelism.
"""

import itertools
import os

import pytest

from megatron_merak.config.parallel import OVERLAPS, SCHEDULES
from tests.hf_trainer.cases import CASES
from tests.hf_trainer.runs import alike, merak_run, same_files, transformers_rank, transformers_run
from tests.ranks import run_ranks

# tensor, pipeline, data
LAYOUTS = {"one": (1, 1, 1), "pp2": (1, 2, 1), "tp2": (2, 1, 1), "dp2": (1, 1, 2)}
CHOSEN = {("causal", "pp2")}
LONG = {
    ("causal", "one"),
    ("causal", "tp2"),
    ("loss function", "tp2"),
    ("t5", "pp2"),
    ("mixtral", "tp2"),
    ("stream", "pp2"),
    *((name, "one") for name in ("tied", "packed", "frozen", "logged", "resumed")),
    ("label smoothing", "one"),
    ("hidden states", "pp2"),
    ("distilled", "pp2"),
}
# losses that are means of a micro-batch
MEANS = ("class weights", "hidden states", "two forwards", "distilled")
WAYS = [("pp2", {"pipeline_schedule": name}) for name in SCHEDULES] + [
    ("tp2", {"tp_comm_overlap": name}) for name in OVERLAPS
]
SHARED = ({"use_distributed_optimizer": True}, {"fsdp": "full_shard"})


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
    ranks = run_ranks(
        merak_run, tp * pp * LAYOUTS[layout][2], name, str(directory), tp, pp, changes, timeout=280
    )
    expected, saved = theirs(name, dp)
    for found in ranks:
        assert found["logs"] == ranks[0]["logs"]
        alike(found, expected)
    for place in ("last", expected["checkpoints"][-1]):
        same_files(name, directory / place, saved / place)


def mark(cell):
    return () if cell in CHOSEN else pytest.mark.long if cell in LONG else pytest.mark.slow


def product(cells, mark):
    def label(part):
        return part if isinstance(part, str) else "-".join(part.values())

    return [pytest.param(*cell, marks=mark(cell), id="-".join(map(label, cell))) for cell in cells]


CELLS = [
    cell
    for cell in itertools.product(CASES, LAYOUTS)
    if cell not in itertools.product(MEANS, ("dp2",))
]


@pytest.mark.parametrize(("name", "layout"), product(CELLS, mark))
def test_a_script_gives_what_it_gives_in_transformers(tmp_path, theirs, name, layout):
    compare(name, layout, theirs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MEANS, "loss function", "label smoothing"])
def test_own_losses_on_two_replicas_are_those_of_two_processes_in_transformers(tmp_path, name):
    """A loss that is a mean of its micro-batch is averaged over replicas: one process with more of
    them gives another.

    Only what training shows is compared: transformers fills up the last batch of an evaluation on
    several processes.
    """
    ours = run_ranks(merak_run, 2, name, str(tmp_path / "ours"), 1, 1, {}, timeout=280)
    theirs = run_ranks(transformers_rank, 2, name, str(tmp_path / "theirs"), timeout=280)
    for ours_here, theirs_here in zip(ours, theirs, strict=True):
        alike(trained(ours_here), trained(theirs_here))
    same_files(name, tmp_path / "ours" / "last", tmp_path / "theirs" / "last")


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        pytest.param(
            name,
            shared,
            marks=pytest.mark.long if name == "classes" and "fsdp" in shared else pytest.mark.slow,
        )
        for shared in SHARED
        for name in ("classes", "causal", "tied", "t5", "mixtral", "resumed")
    ],
)
def test_replicas_may_share_what_they_keep(tmp_path, theirs, name, shared):
    compare(name, "dp2", theirs, tmp_path, **shared)


def in_nodes_of_two(rank, world, *what):
    """As torchrun would say it."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return merak_run(rank, world, *what)


@pytest.mark.parametrize(
    ("name", "fsdp"),
    [
        pytest.param(
            name,
            fsdp,
            marks=pytest.mark.long
            if (name, fsdp) == ("classes", "hybrid_shard")
            else pytest.mark.slow,
        )
        for fsdp in ("hybrid_shard", "hybrid_shard_zero2")
        for name in ("classes", "tied", "t5", "mixtral", "resumed")
    ],
)
def test_replicas_may_share_inside_a_node(tmp_path, theirs, name, fsdp):
    """Four replicas, of which the last one has no batch of an evaluation."""
    changes = {"fsdp": fsdp, "gradient_accumulation_steps": 1}
    ranks = run_ranks(in_nodes_of_two, 4, name, str(tmp_path), 1, 1, changes, timeout=280)
    expected, saved = theirs(name, 2)  # half the replicas, with twice the micro-batches
    for found in ranks:
        assert found["logs"] == ranks[0]["logs"]
        alike(found, expected)
    for place in ("last", expected["checkpoints"][-1]):
        same_files(name, tmp_path / place, saved / place)


def trained(run):
    kept = [
        {key: entry[key] for key in ("loss", "grad_norm", "learning_rate")}
        for entry in run["logs"]
        if "loss" in entry
    ]
    assert len(kept) == 4
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "way"), product(WAYS, lambda cell: ()))
@pytest.mark.parametrize("name", ["causal", "classes"])
def test_so_does_every_schedule_and_overlap(tmp_path, theirs, name, layout, way):
    compare(name, layout, theirs, tmp_path, **way)
