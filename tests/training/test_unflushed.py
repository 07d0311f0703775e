"""PipeDream and PipeDream-2BW: losses and weights equal, to the bit, those of one process that
computes micro-batch after micro-batch, each stage with the weights that the papers say.
"""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import ConfigError, PlanError, ScheduleError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, Plan
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.planner.memory import stage_memory
from megatron_merak.planner.predict import ending
from megatron_merak.stages.blueprint import blueprint_from_plan
from megatron_merak.stages.optimizer_state import optimizer_of_run
from megatron_merak.stages.traced import Traced
from tests.engines import blueprint_of, gpt_trainer
from tests.graph.tiny import tiny
from tests.ranks import RankFailure, run_ranks
from tests.training.jobs import RUN, SHAPE, job

CPU = torch.device("cpu")
STEPS = 3
FLAGS = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --vocab-size 60 --hidden-dropout 0
    --attention-dropout 0 --seq-length 16 --micro-batch-size 2 --lr 1e-2 --train-iters 3 --clip-grad 0
    --untie-embeddings-and-output-weights --weight-decay 0.1 --mock-data"""


ASYNCHRONOUS = """--pipeline-model-parallel-size 2 --pipeline-schedule pipedream-2bw --clip-grad 0
    --untie-embeddings-and-output-weights"""


@dataclass(frozen=True)
class Case:
    """A schedule, its sizes, and further flags."""

    schedule: str
    stages: int
    every: int
    updates: int
    flags: str = ""

    def __str__(self) -> str:
        return f"{self.schedule} {self.stages} {self.flags}".strip()

    @property
    def microbatches(self) -> int:
        return self.every * self.updates

    def config(self) -> Config:
        layout = f"--pipeline-model-parallel-size {self.stages} --pipeline-schedule {self.schedule}"
        if self.schedule == "pipedream-2bw":
            layout += f" --pipeline-update-interval {self.every}"
        return read(f"{layout} --global-batch-size {2 * self.microbatches} {self.flags}")

    def serial(self) -> Config:
        """One process, with as many micro-batches per step as an update has."""
        return read(f"--pipeline-schedule naive --global-batch-size {2 * self.every} {self.flags}")

    def version(self, stage: int, microbatch: int) -> int:
        """How many updates of this step the weights have seen that a micro-batch computes with."""
        if self.schedule == "pipedream":
            # those at its forward, which is S - 1 - stage backwards behind the forwards
            return max(0, microbatch - (self.stages - 1 - stage))
        return max(0, microbatch // self.every - 1)  # those before the last update

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(60, (self.microbatches, 2, 17), generator=drawn)
        return [
            {
                "tokens": rows[:, :-1],
                "labels": rows[:, 1:],
                "loss_mask": torch.ones(2, 16),
                "position_ids": torch.arange(16).expand(2, 16),
            }
            for rows in tokens
        ]


def read(flags: str) -> Config:
    argv = [*FLAGS.split(), *flags.split()]
    config, _ = arguments.read(arguments.build_parser(config=Config), argv, Config)
    config.validate(config.parallel.ranks_of_replica)
    return config


def read_of_job(flags: str) -> Config:
    """The settings that `job` runs, without a check."""
    argv = [*SHAPE.split(), *RUN.split(), *ASYNCHRONOUS.split(), *flags.split(), "--mock-data"]
    argv += ["--train-iters", "1"]
    return arguments.read(arguments.build_parser(config=Config), argv, Config)[0]


CASES = [
    Case("pipedream", 2, 1, 6),
    Case("pipedream-2bw", 4, 4, 3),
]
LONG = [
    Case("pipedream", 4, 1, 8, "--optimizer sgd --sgd-momentum 0.9"),
    Case("pipedream", 4, 1, 8, "--bf16"),
    Case("pipedream-2bw", 2, 2, 4, "--bf16"),
    Case("pipedream-2bw", 2, 4, 2, "--recompute-granularity full"),
]
CASES += [pytest.param(case, marks=pytest.mark.long) for case in LONG]


def pipeline(rank, world_size, case):
    """Losses of the micro-batches of all steps, the weights of this rank, and versions held."""
    config = case.config()
    mesh = build_mesh(Grid(pp=case.stages), rank, CPU)
    trainer = gpt_trainer(
        config, make_plan(config, case.stages), mesh, optimizer_of_run(config.optimizer)
    )
    model = trainer.model
    losses = []
    held = 0
    advance = model.versions.after

    def after(op):
        nonlocal held
        advance(op)
        held = max(held, model.versions.held)

    model.versions.after = after
    for step in range(STEPS):
        trainer.step(case.batches(step))
        losses += [mean for _, _, mean in model.executor(case.microbatches).last.losses]
    weights = {name: model.buffer.parameter(name).clone() for name in model.buffer.slots}
    return losses, weights, held, model.optimizer.steps


class Rewritten:
    """Writes the weights of each micro-batch into the buffer before its forward."""

    def __init__(self, buffer, values):
        self.buffer = buffer
        self.values = values

    def before(self, op):
        if op.kind == "F":
            for name, value in self.values(op.microbatch).items():
                self.buffer.parameter(name).copy_(value)

    def after(self, op):
        pass


def serial(rank, world_size, case, owner):
    """The same on one process. owner: parameter -> its stage."""
    config = case.serial()
    mesh = build_mesh(Grid(), rank, CPU)
    trainer = gpt_trainer(config, make_plan(config, 1), mesh, optimizer_of_run(config.optimizer))
    model = trainer.model
    buffer = model.buffer
    losses = []

    def weights():
        return {name: buffer.parameter(name).clone() for name in buffer.slots}

    for step in range(STEPS):
        batches = case.batches(step)
        rates = trainer.rates()
        history = [weights()]
        for update in range(case.updates):
            first = update * case.every

            def values(microbatch, first=first, history=history):
                return {
                    name: history[case.version(owner[name], first + microbatch)][name]
                    for name in buffer.slots
                }

            model.parameters.start_step()
            executor = model.executor(case.every)
            part = model.from_samples(batches[first : first + case.every])
            executor.run(part, step, between=Rewritten(buffer, values))
            losses += [mean for _, _, mean in executor.last.losses]
            model.parameters.finish_step()
            for name, value in history[-1].items():
                buffer.parameter(name).copy_(value)
            model.optimizer.step(rates)
            history.append(weights())
        model.iteration += 1
    return losses, history[-1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipeline_is_the_serial_simulation_of_it(case):
    ranks = run_ranks(pipeline, case.stages, case)
    owner = {name: stage for stage, (_, own, *_) in enumerate(ranks) for name in own}
    losses, weights = run_ranks(serial, 1, case, owner)[0]
    assert len(losses) == STEPS * case.microbatches
    assert torch.equal(torch.stack(ranks[-1][0]), torch.stack(losses))
    assert weights.keys() == owner.keys()
    for name, stage in owner.items():
        assert torch.equal(ranks[stage][1][name], weights[name]), name
    held = [versions for _, _, versions, _ in ranks]
    expected = [2] * case.stages
    if case.schedule == "pipedream":
        expected = [case.stages - stage for stage in range(case.stages)]
    assert held == expected
    assert {steps for *_, steps in ranks} == {STEPS * case.updates}


def _jobs(rank, world, runs):
    told = []
    for flags in runs:
        try:
            told.append(job(rank, world, f"{ASYNCHRONOUS} {flags}"))
        except (ConfigError, ScheduleError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def _losses(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.long
def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    """A step ends with a drained pipeline, so that a checkpoint holds all there is."""
    base = f"--global-batch-size 16 --train-iters 4 --metrics {tmp_path}"
    save = f"--save {tmp_path}/c --save-interval 2"
    again = f"--load {tmp_path}/c --ckpt-step 2"
    run_ranks(_jobs, 2, [f"{base}/all {save} --eval-iters 1", f"{base}/rest {again}"])
    whole = _losses(tmp_path / "all")
    assert len(whole) == 4 and _losses(tmp_path / "rest") == whole[2:]


REFUSED = {
    "--clip-grad 1": "--clip-grad 1.0: with --pipeline-schedule pipedream-2bw each stage updates",
    "--fp16": "--fp16 True: with",
    "--calculate-per-token-loss": "--calculate-per-token-loss True: with",
    "--rerun-mode validate_results": "--rerun-mode validate_results: with",
    "--global-batch-size 12": "--pipeline-update-interval 4: a step has 6 micro-batches",
    "--pipeline-update-interval 1": "--pipeline-update-interval 1: with two versions",
    "--num-virtual-stages-per-pipeline-rank 2": "the schedule pipedream-2bw has 1 on every rank",
    "--pipeline-schedule pipedream --pipeline-update-interval 4": "--pipeline-update-interval 4",
    "--pipeline-schedule 1f1b": "--pipeline-update-interval 4",
}


def test_what_it_is_not_combined_with_is_refused_by_name():
    for flags, expected in REFUSED.items():
        with pytest.raises((ConfigError, ScheduleError)) as refused:
            config = read_of_job(f"--global-batch-size 16 --pipeline-update-interval 4 {flags}")
            config.validate(2)
            make_plan(config, 2)
        assert expected in str(refused.value), flags
    config = read_of_job("--global-batch-size 16")
    for ranks, expected in ((4, "data-parallel size 2: with"), (2, "")):
        tied = replace(config.model, untie_embeddings_and_output_weights=False)
        with pytest.raises(ConfigError) as refused:
            (config if expected else replace(config, model=tied)).validate(ranks)
        assert (expected or "--untie-embeddings-and-output-weights (missing)") in str(refused.value)
    for flag in ("--tensor-model-parallel-size", "--context-parallel-size"):
        divided = read_of_job(f"--global-batch-size 16 {flag} 2")
        with pytest.raises(ConfigError, match=f"{flag} 2: with"):
            divided.validate(4)


def test_a_stored_plan_does_not_bring_it_past_the_checks():
    """The flags of the run say nothing of its schedule."""
    plan = make_plan(read_of_job("--global-batch-size 16"), 2)
    config = read_of_job("--global-batch-size 16 --pipeline-schedule 1f1b --clip-grad 1")

    with pytest.raises(RankFailure, match=r"--clip-grad 1\.0: on ranks 0, 1, with"):
        run_ranks(_built, 2, config, plan)


def _built(rank, world_size, config, plan):
    gpt_trainer(config, plan, build_mesh(Grid(pp=2), rank, CPU))


def test_huggingface_models_refuse_it():
    parser = arguments.build_parser(config=HFConfig)
    flags = "--model m --pipeline-model-parallel-size 2 --pipeline-schedule pipedream"
    argv = [*flags.split(), *"--seq-length 8 --micro-batch-size 1 --mock-data --lr 1".split()]
    config, _ = arguments.read(parser, argv, HFConfig)
    with pytest.raises(ConfigError, match="the GPT of merak-pretrain alone"):
        config.validate(2)


@pytest.mark.long
def test_a_huggingface_model_is_planned_without_it():
    _, model, batch = tiny("gpt2")
    traced = Traced(model(), batch, "float32")
    with pytest.raises(ConfigError, match="the GPT of merak-pretrain alone"):
        blueprint_of(traced, Grid(pp=2), pipeline_schedule="pipedream", microbatches=4)
    plan = blueprint_of(traced, Grid(pp=2), microbatches=4).plan
    edited = replace(plan, schedule=build_schedule("pipedream", 2, 4))
    with pytest.raises(PlanError, match="only the GPT of merak-pretrain updates weights while"):
        blueprint_from_plan(traced, edited)


def test_the_planner_counts_versions_and_updates():
    config = read_of_job("--global-batch-size 16")
    synchronous = read_of_job("--global-batch-size 16 --pipeline-schedule 1f1b")
    ours, theirs = make_plan(config, 2), make_plan(synchronous, 2)
    for own, other in zip(stage_memory(ours), stage_memory(theirs), strict=True):
        assert own.weights == 2 * other.weights
        assert own.total - own.weights == other.total - other.weights
    assert ending(ours).optimizer == pytest.approx(4 * ending(theirs).optimizer)
    assert Plan.from_json(ours.to_json()) == ours


@pytest.mark.long
def test_a_gradient_that_is_not_finite_ends_the_run():
    """Stages update without each other, so that none can skip a step alone."""
    flags = f"{ASYNCHRONOUS} --train-iters 3 --lr 1e38 --lr-decay-style constant"
    flags += " --micro-batch-size 1 --global-batch-size 8 --pipeline-update-interval 2"
    with pytest.raises(RankFailure, match="of an update within a step: it is not finite"):
        run_ranks(job, 2, flags)
