"""``--parallel-verify``: plans are tried on the ranks of the job, and the fastest trains as if it had
been given.
"""

import contextlib
import io
import json
import random
import re
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_merak import arguments
from megatron_merak.cli.pretrain import check_command
from megatron_merak.cluster import Cluster, Device, Link
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel import emulated
from megatron_merak.parallel.clock import LogicalClock
from megatron_merak.parallel.launch import World
from megatron_merak.planner.search import Choice, pins_of
from megatron_merak.runtime.executor import Executor
from megatron_merak.training import session
from megatron_merak.training.job import Job
from megatron_merak.training.pretrain import pretrain
from megatron_merak.training.pretrain_hf import pretrain_hf
from megatron_merak.training.searched import PIN, applied, stand_ins
from megatron_merak.training.trainer import Trainer
from tests.ranks import run_ranks
from tests.training.test_parallel_auto import LINE, LLAMA

SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 60
    --hidden-dropout 0.1 --attention-dropout 0.1"""
RUN = """--seq-length 16 --global-batch-size 4 --lr 1e-2 --log-interval 1 --eval-iters 0 --mock-data
    --train-iters 2"""
TRIED = re.compile(r"^  (tp=\S+): (.+)$", re.MULTILINE)
CHOSEN = re.compile(r"--parallel \S+ chose (\S+)\.")


def settings(flags: str, kind=Config):
    argv = [*(SHAPE.split() if kind is Config else ()), *RUN.split(), *flags.split()]
    config, _ = arguments.read(
        arguments.build_parser(config=kind), argv, kind, stand_ins(argv, PIN)
    )
    return config


def draw() -> None:
    torch.rand(3)
    random.random()
    np.random.rand()  # noqa: NPY002


def random_state() -> list:
    return [torch.rand(3).tolist(), random.random(), np.random.rand()]  # noqa: NPY002


def trained(config, world: World) -> dict:
    """Train; return what was printed, and weights, optimizer state and random state at the end."""
    found = {}
    inner = Trainer.step

    def noted(self, batches):
        result = inner(self, batches)
        found.setdefault("losses", []).append(result.loss)
        found.setdefault("read", []).append([batch["tokens"].tolist() for batch in batches])
        self.model.gatherer.finish()
        found["weights"] = {
            shard.name: shard.tensor.clone() for shard in self.model.shards(self.model.buffer.data)
        }
        return result

    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    told = io.StringIO()
    models = []  # that were tried
    timed = Job.timed_steps

    def drawing(self, count):
        draw()
        models.append(weakref.ref(self.trainer.model))
        seconds = timed(self, count)
        found.clear()
        return seconds

    with (
        contextlib.redirect_stdout(told),
        mock.patch.object(Trainer, "step", noted),
        mock.patch.object(Job, "timed_steps", drawing),
    ):
        (pretrain if isinstance(config, Config) else pretrain_hf)(config, world)
    assert not any(model() for model in models), "they keep memory"
    return found | {"told": told.getvalue(), "random": random_state()}


def chosen(told: str) -> Choice:
    return Choice(**pins_of(CHOSEN.search(told)[1], "--fix"))


def verified_and_given(rank, world, flags, kind, patch):
    """What a run trains that has tried plans, and one that was given the plan that it chose."""
    config = settings(flags, kind)
    place = World(rank, world, torch.device("cpu"))
    with patch(rank) if patch else contextlib.nullcontext():
        tried = trained(config, place)
    told = [tried.pop("told")]
    dist.broadcast_object_list(told)  # the first rank's
    given = trained(applied(config, chosen(told[0])), place)
    given.pop("told")
    same = {name: equal(tried[name], given[name]) for name in given}
    assert set(same) == {"losses", "read", "weights", "random"} == set(tried)
    return same, told[0], len(tried["losses"])


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    return one == other


def checked(ranks: int, flags: str, kind=Config, patch=None) -> str:
    """Return what the first rank printed, after comparing all ranks."""
    found = run_ranks(verified_and_given, ranks, flags, kind, patch, timeout=500)
    assert all(all(same.values()) and steps == 2 for same, _, steps in found), [
        same for same, *_ in found
    ]
    return found[0][1]


def seconds(text: str) -> float:
    number, unit = re.match(r"([\d.]+) (s|ms|us) a step, predicted", text).groups()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]


def fastest(told: str) -> str:
    """The plan that was fastest, by the lines of those that were tried."""
    lines = {plan: seconds(text) for plan, text in TRIED.findall(told) if "passed" not in text}
    least = min(lines.values())
    assert CHOSEN.search(told)[1] in [plan for plan, each in lines.items() if each == least]
    return CHOSEN.search(told)[1]


@pytest.mark.parametrize("ranks, pins", [(2, ""), pytest.param(4, ",tp=2", marks=pytest.mark.long)])
def test_a_gpt_of_flags_trains_as_if_it_had_been_given_the_plan(ranks, pins):
    told = checked(ranks, f"--parallel auto{pins} --parallel-verify 3")
    assert len(TRIED.findall(told)) == 3 and "--parallel-verify 3: 3 plans run 5 steps" in told
    fastest(told)


@pytest.mark.long
def test_a_huggingface_model_trains_as_if_it_had_been_given_the_plan(tmp_path):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    told = checked(2, f"--model {path} --parallel auto --parallel-verify 2", HFConfig)
    assert len(TRIED.findall(told)) == 2
    fastest(told)


@contextlib.contextmanager
def failing_on_the_last(rank: int, ranks: int = 2):
    """The last rank fails in the middle of the first plan's third step, where others wait for it."""
    calls = []
    run = Executor.run

    def fails(self, *args, **kwargs):
        calls.append(0)
        if rank == ranks - 1 and len(calls) == 3:
            raise MemoryError("no memory is left")
        return run(self, *args, **kwargs)

    with mock.patch.object(Executor, "run", fails):
        yield


def slow_until_replayed(rank: int):
    """Steps that replay nothing seem to take an hour: none of them may count."""
    timed = Job.timed_steps

    def seconds(self, count):
        recordings = self.trainer.model.executor(self.plan.schedule.microbatches).recordings
        counts = [recordings.replayed]
        step = Job._timed_step

        def noted(job, batches):
            result, _ = step(job, batches)
            counts.append(recordings.replayed)
            return result, 0.0

        with mock.patch.object(Job, "_timed_step", noted):
            timed(self, count)
        return [
            1.0 if after > before else 3600.0
            for before, after in zip(counts, counts[1:], strict=False)
        ]

    return mock.patch.object(Job, "timed_steps", seconds)


@pytest.mark.long
def test_with_graphs_replayed_steps_are_timed():
    flags = "--parallel auto,pp=2 --parallel-verify 2 --hidden-dropout 0 --attention-dropout 0"
    told = checked(2, f"{flags} --cuda-graph-impl local", patch=slow_until_replayed)
    assert "2 plans run 7 steps each, of which 3 are timed" in told
    assert [seconds(text) for _, text in TRIED.findall(told)] == [1.0, 1.0]


def failing_of_four(rank: int):
    return failing_on_the_last(rank, 4)


@contextlib.contextmanager
def building_fails_on_the_last(rank: int):
    """The last rank has no memory for the state of the first plan's optimizer."""
    calls = []
    build = AdamW.__init__

    def fails(self, *args, **kwargs):
        calls.append(0)
        if rank == 1 and len(calls) == 1:
            raise MemoryError("no memory is left")
        build(self, *args, **kwargs)

    with mock.patch.object(AdamW, "__init__", fails):
        yield


@pytest.mark.long
def test_a_plan_whose_state_has_no_room_is_named_and_passed_over():
    flags = "--parallel auto,pp=2 --parallel-verify 2"
    told = checked(2, flags, patch=building_fails_on_the_last)
    (first, failure), (second, _) = TRIED.findall(told)
    assert failure.startswith("passed over: MemoryError no memory is left: on rank 1, this failure")
    assert fastest(told) == second != first


@pytest.mark.parametrize(
    "ranks, pins, patch",
    [
        pytest.param(2, ",tp=2", failing_on_the_last, marks=pytest.mark.long),
        (2, ",pp=2", failing_on_the_last),
        pytest.param(4, ",tp=2,pp=2", failing_of_four, marks=pytest.mark.long),
    ],
)
def test_a_plan_that_fails_on_one_rank_is_named_and_passed_over(ranks, pins, patch):
    told = checked(ranks, f"--parallel auto{pins} --parallel-verify 2", patch=patch)
    (first, failure), (second, _) = TRIED.findall(told)
    last = ranks - 1
    assert failure == f"passed over: on rank {last}, MemoryError: no memory is left"
    assert fastest(told) == second != first


def none_runs(rank, world):
    with mock.patch.object(Job, "timed_steps", side_effect=MemoryError("none")):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                pretrain(
                    settings("--parallel auto --parallel-verify 2"),
                    World(rank, world, torch.device("cpu")),
                )
        except PlanError as error:
            return str(error), error.__notes__
    return None


def test_where_no_plan_runs_each_is_named():
    first, second = run_ranks(none_runs, 2, timeout=200)
    assert first == second
    text, notes = first
    assert "--parallel-verify 2: none of 2 plans ran to its end" in text
    assert len(notes) == 2 and all(note.endswith(": MemoryError: none") for note in notes)


CARD = Device("Card 1", 2e9, 1e9, 1e14, 0, 0.5)
PLANNED = Cluster(CARD, 2, Link("in", 1e-6, 1e10), Link("out", 1e-4, 1e7), "planned")


def on_slow_links(rank, world, bandwidth, directory):
    """What a job prints that is planned for one cluster, and runs on another with slower links."""
    real = replace(PLANNED, inside=Link("in", 1e-6, bandwidth), name="real")
    clock = LogicalClock(real.by_figures)
    emulated.register(clock)
    dist.destroy_process_group()
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("emu", store=store, rank=rank, world_size=world)
    PLANNED.to_json(f"{directory}/cluster{rank}.json")
    config = settings(
        "--parallel auto,mb=4,sharding=no_shard,overlap=weight-gradient,sp=off,recompute=none "
        "--parallel-verify 2 --distributed-backend emu "
        f"--emulate {directory}/cluster0.json"
    )
    cpu = torch.device("cpu")
    place = World(rank, world, cpu, cluster=PLANNED.by_figures, clock=clock)
    tried = trained(config, place)
    return tried["told"], clock.now()


@pytest.mark.parametrize("bandwidth", [1e10, pytest.param(1e5, marks=pytest.mark.long)])
def test_the_choice_is_made_by_what_was_measured(tmp_path, bandwidth):
    """The links are as planned, or slower: then another plan is chosen."""
    (told, _), _ = run_ranks(on_slow_links, 2, bandwidth, str(tmp_path), timeout=300)
    order = [plan for plan, _ in TRIED.findall(told)]
    assert [plan[:9] for plan in order] == ["tp=2,pp=1", "tp=1,pp=2"]
    assert fastest(told) == order[bandwidth != 1e10]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--parallel-verify 2 --micro-batch-size 2", "no effect without --parallel"),
        (
            "--parallel auto --parallel-verify 1",
            "--parallel-verify 1: is out of range. Use a value at least 2",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_ranks_start(flags, words):
    with pytest.raises(ConfigError) as refused:
        check_command("pretrain", [*LINE, *flags.split()], 2)
    assert words in str(refused.value)


def test_what_is_tried_writes_and_resumes_nothing(tmp_path):
    config = settings(f"--parallel auto --save {tmp_path} --load {tmp_path} --metrics m.jsonl")
    tried = session._unreported(config)
    assert tried.checkpoint.save is tried.checkpoint.load is tried.logging.metrics is None
    assert tried.train == config.train
