"""Steps of emulated ranks that divide sequences, or experts, take what their plan says, where links
and compute weigh alike.
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_merak import arguments
from megatron_merak.cluster import Cluster, Device, Link
from megatron_merak.config import Config
from megatron_merak.graph import measure
from megatron_merak.parallel import emulated
from megatron_merak.parallel.clock import LogicalClock
from megatron_merak.parallel.launch import World
from megatron_merak.runtime import engine
from megatron_merak.stages import blueprint
from megatron_merak.stages.gpt_model import traced_gpt
from megatron_merak.training.hf_model import blueprint_of
from megatron_merak.training.pretrain import pretrain
from tests.ranks import run_ranks

# Its memory is fast: what element-wise work moves is estimated otherwise by the planner.
CARD = Device("Card 1", 2e9, 1e9, 1e14, 0, 0.5)
BOTH = Cluster(CARD, 2, Link("in", 1e-5, 2e7), Link("out", 1e-4, 1e7), "both")
SLOW = replace(BOTH, inside=Link("in", 1e-5, 2e6), name="slow")
SHAPE = """--num-layers 3 --hidden-size 64 --num-attention-heads 4 --hidden-dropout 0 --vocab-size 300
    --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --mock-data --train-iters 2
    --eval-iters 0 --log-interval 1"""
NO_DROPOUT = "--attention-dropout 0"


def run(rank, world_size, flags, cluster, directory, hides=True):
    """Return the modelled seconds of steps, and those that the plan says. hides: whether a shared expert
    is computed while rows are exchanged.
    """
    with ExitStack() as stack:
        for module in () if hides else (blueprint, measure):
            nothing = mock.patch.object(module, "put_behind_exchanges", lambda rewritten: None)
            stack.enter_context(nothing)
        return _run(rank, world_size, flags, cluster, directory)


def _run(rank, world_size, flags, cluster, directory):
    clock = LogicalClock(cluster.by_figures)
    emulated.register(clock)
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("emu", store=store, rank=rank, world_size=world_size)
    argv = [*SHAPE.split(), *flags.split(), "--distributed-backend", "emu"]
    argv += ["--emulate", f"{directory}/cluster.json", "--metrics", f"{directory}/metrics.jsonl"]
    config, _ = arguments.read(arguments.build_parser(config=Config), argv, Config)
    cpu = torch.device("cpu")
    world = World(rank, world_size, cpu, cluster=cluster.by_figures, clock=clock)
    got = []
    exchange = engine.exchange_rows

    def noted(rows, counts, group):
        got.append(sum(counts.got))
        return exchange(rows, counts, group)

    with mock.patch.object(engine, "exchange_rows", noted):
        pretrain(config, world)
    plan = blueprint_of(traced_gpt(config), config, world_size, cluster).plan
    return plan.predicted_time, got


def steps(tmp_path, flags, cluster, ranks=2, hides=True):
    """(modelled, predicted) seconds of the last step, and how many rows each rank got in each
    exchange of all steps.
    """
    cluster.to_json(tmp_path / "cluster.json")
    found = run_ranks(run, ranks, flags, cluster, str(tmp_path), hides, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    modelled = [row["modelled_seconds"] for row in rows if row["kind"] == "train"]
    return modelled[-1], found[0][0], [got for _, got in found]


CP = "--context-parallel-size 2"
GATHERS = f"{CP} --cp-comm-type all_gather"
CASES = {
    "a2a": (CP, BOTH),
    "a2a, slow links": (CP, SLOW),
    "gathered": (f"{GATHERS} {NO_DROPOUT}", BOTH),
    "gathered, slow links": (f"{GATHERS} {NO_DROPOUT}", SLOW),
    "gathered, dropout": (GATHERS, BOTH),  # whose attention is a segment of its own
    "gathered, recomputed": (f"{GATHERS} {NO_DROPOUT} --recompute-granularity full", BOTH),
}


LEVELS = f"""--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2
    {NO_DROPOUT}"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [BOTH, SLOW], ids=lambda cluster: cluster.name)
def test_neighbours_in_a_node_exchange_and_nodes_pass_on(tmp_path, cluster):
    modelled, predicted, _ = steps(tmp_path, LEVELS, cluster, ranks=4)
    assert modelled == pytest.approx(predicted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_divide_sequences(tmp_path, case):
    modelled, predicted, _ = steps(tmp_path, *CASES[case])
    assert modelled == pytest.approx(predicted, rel=1e-4)


MIXTURE = f"""--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope {NO_DROPOUT} --expert-model-parallel-size 2"""


# Its products take longer than an exchange where links are fast, and are shorter where they are slow.
SHARED = f"{MIXTURE} --moe-shared-expert-intermediate-size 64"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [MIXTURE, SHARED], ids=["routed", "shared"])
@pytest.mark.parametrize("cluster", [BOTH, SLOW], ids=lambda cluster: cluster.name)
def test_ranks_that_divide_experts_wait_for_the_one_that_has_most_rows(tmp_path, cluster, flags):
    """A plan gives all ranks as many. What one has more than that makes a step longer."""
    modelled, predicted, got = steps(tmp_path, flags, cluster)
    last = (rows[len(rows) // 2 :] for rows in got)
    # Of forwards and of backwards, where rows go to their experts; on the way back all get theirs.
    more = sum(max(rows) - sum(rows) / 2 for rows in zip(*last, strict=True))
    # forward and backward of three products
    row = CARD.compute_time(3 * 2 * 3 * 64 * 64, 0, "float32")
    assert more > 0 and modelled == pytest.approx(predicted + more / 2 * row, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [BOTH, SLOW], ids=lambda cluster: cluster.name)
def test_a_shared_expert_computes_while_rows_are_exchanged(tmp_path, cluster):
    """A step takes less by what it hides, as its plan says."""
    found = []
    for name, hides in (("behind", True), ("before", False)):
        directory = tmp_path / name
        directory.mkdir()
        found.append(steps(directory, SHARED, cluster, hides=hides)[:2])
    hidden = [late - early for early, late in zip(*found, strict=True)]
    assert hidden[0] > 0.02 * found[0][0]
    assert hidden[0] == pytest.approx(hidden[1], rel=0.05)
