"""--schedule-file through every door: what is computed is what one process computes, and wrong
files end the job.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from megatron_merak.config import HFConfig, ParallelConfig
from megatron_merak.errors import MerakError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of
from tests.graph.tiny import randomise, tiny
from tests.hf_trainer.reference import untimed
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.pipeline_parallel.written import drawn, dump
from tests.ranks import run_ranks
from tests.stages.test_captured import micro_batches, trainer_of
from tests.training.jobs import job

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=130,
    tie_word_embeddings=False,
)  # fmt: skip
# Written by hand: the first rank runs ahead and does its weight gradients late.
ONE_F_ONE_B = """mine stages=2 microbatches=4
rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0W0 0B2 0W1 0B3 0W2 0W3
rank 1: 1F0 1F1 1B0 1F2 1B1 1B2 1F3 1B3
"""
RUN = {
    **{
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    **{
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
    },
    **{"eval_strategy": "epoch", "per_device_eval_batch_size": 2},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Schedules of 4 micro-batches on 2 ranks, and a shape for pretrain_hf.py."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "mine.txt").write_text(ONE_F_ONE_B)
    (directory / "v.txt").write_text(str(drawn(2, (0, 1, 1, 0), 4, split=0.6)))
    dump(directory / "zbv.csv", "ScheduleZBVZeroBubble", 2, 4, 2)
    dump(directory / "interleaved.csv", "ScheduleInterleaved1F1B", 2, 4, 2)
    dump(directory / "split.csv", "ScheduleInterleavedZeroBubble", 2, 4, 2)
    dump(directory / "dual.csv", "ScheduleDualPipeV", 2, 4, 2)
    (directory / "llama.json").write_text(
        json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    return {path.stem: str(path) for path in directory.iterdir()}


def merak(rank, world, directory, schedule):
    """Epochs of 7 micro-batches: a step of 4, and one of the 3 that are left."""
    changes = {"pipeline_model_parallel_size": world, "schedule_file": schedule}
    args = MerakArguments(f"{directory}/merak{world}", **RUN, **changes)
    trainer = MerakTrainer(tiny_llama(), args, collate, samples(14), samples(5, seed=5))
    trainer.train()
    model = trainer.gather_model()
    return [
        untimed(entry) for entry in trainer.state.log_history
    ], model.state_dict() if rank == 0 else None


def script(rank, world, directory, files, door, name):
    """The losses of a job of pretrain_gpt.py ("gpt") or pretrain_hf.py."""
    metrics = Path(directory) / f"{door}-{name}.jsonl"
    flags = f"--train-iters 2 --global-batch-size 8 --pipeline-model-parallel-size {world} --clip-grad 0 "
    flags += f"--metrics {metrics} " + (f"--schedule-file {files[name]} " if name else "")
    own = () if door == "gpt" else (HFConfig,)
    told = job(rank, world, flags + ("" if door == "gpt" else f"--model {files['llama']}"), *own)
    assert not (rank == 0 and name) or "\nrank 1: 1F0 " in told
    if world > 1:
        torch.distributed.barrier()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def doors(rank, world, directory, files, chosen):
    """Of each door and schedule: the losses of a script, or MerakTrainer's logs and weights."""
    torch.set_num_threads(1)
    found = {}
    for door, name in chosen:
        if door == "merak":
            found[door, name] = merak(rank, world, directory, files[name] if name else None)
        else:
            found[door, name] = script(rank, world, directory, files, door, name)
    return found


SOME = [("gpt", "mine"), ("hf", "zbv"), ("merak", "v")]
ALL = [
    (door, name)
    for door in ("gpt", "hf", "merak")
    for name in ("mine", "v", "zbv", "interleaved", "split", "dual")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.long
def test_every_door_runs_it_and_equals_one_process(tmp_path, files, chosen):
    one = [(door, None) for door in ("gpt", "hf", "merak")]
    (alone,) = run_ranks(doors, 1, str(tmp_path), files, one, timeout=120)
    first, second = run_ranks(doors, 2, str(tmp_path), files, chosen, timeout=500)
    for (door, name), found in first.items():
        if door != "merak":
            assert found == second[door, name] == alone[door, None], (door, name)
            continue
        (logs, weights), (expected, wanted) = found, alone[door, None]
        assert logs == second[door, name][0] and len(logs) == len(expected) > 4
        for ours, theirs in zip(logs, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        assert all(torch.equal(weights[key], value) for key, value in wanted.items())


def _lengths(rank, world, path, counts):
    """Gradients and evaluated losses of steps of other lengths than the schedule has, on one
    trainer.
    """
    torch.set_num_threads(1)
    real, _, batch = tiny("llama")
    batches = micro_batches("llama", max(counts))
    ways = {"schedule_file": path} if world > 1 else {}
    trainer = trainer_of(randomise(real()), batch, Grid(pp=world), rank, 4, ways)
    found = []
    for count in counts:
        loss = trainer.gradients(batches[:count])
        grads = {
            s.name: s.tensor.detach().clone() for s in trainer.shards(trainer.buffer.main_grad)
        }
        evaluated = trainer.evaluate(batches[:count])
        found.append(
            (loss, grads, None if evaluated is None else [float(one["loss"]) for one in evaluated])
        )
    return found


@pytest.mark.long
def test_steps_of_other_lengths_are_exact(files):
    counts = (4, 1, 3, 6, 9)
    (alone,) = run_ranks(_lengths, 1, None, counts)
    ranks = run_ranks(_lengths, 2, files["v"], counts)
    for step, (loss, grads, evaluated) in enumerate(alone):
        mine = [rank[step] for rank in ranks]
        assert [one[0] for one in mine] == [loss, loss]
        assert mine[0][1].keys() | mine[1][1].keys() == grads.keys()
        assert all(
            torch.equal(tensor, grads[key]) for one in mine for key, tensor in one[1].items()
        )
        assert [one[2] for one in mine if one[2] is not None] == [evaluated]


def _attempts(rank, world, directory, files):
    """What each door says on this rank, whose working directory is its own host's."""
    os.chdir(f"{directory}/{rank}")
    told = []
    for name in ("missing.txt", "other.txt", "long.txt", "four.txt"):
        flags = f"--train-iters 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --schedule-file {name} "
        for door in (
            lambda flags=flags: job(rank, world, flags),
            lambda flags=flags: job(rank, world, f"{flags} --model {files['llama']}", HFConfig),
            lambda name=name: merak(rank, world, directory, name),
        ):
            with pytest.raises(MerakError) as caught:
                door()
            told.append(f"{type(caught.value).__name__}: {caught.value}")
    return told


@pytest.mark.timeout(200)
def test_a_file_that_cannot_be_run_ends_every_rank_with_the_same_error(tmp_path, files):
    """Also where only one host has it, or another one."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "other.txt").write_text(str(drawn(rank, (0, 1), 4)))
        (tmp_path / str(rank) / "long.txt").write_text(str(drawn(0, (0, 1), 5)))
        (tmp_path / str(rank) / "four.txt").write_text(str(drawn(0, (0, 1, 2, 3), 4)))
    (tmp_path / "0" / "missing.txt").write_text(ONE_F_ONE_B)
    ranks = run_ranks(_attempts, 2, str(tmp_path), files, timeout=120)
    expected = [
        "ConfigError: {flag} missing.txt: rank 1 finds no such file. Provide the same file on all hosts",
        "ConfigError: {flag} other.txt: rank 1 finds another than rank 0. Provide the same file on all hosts",
        "ConfigError: --schedule-file long.txt: on ranks 0, 1, it is a schedule of 5 micro-batches, and a step has 4",
        "ConfigError: --schedule-file four.txt: on ranks 0, 1, it is a schedule of 4 ranks, and --pipeline-model-para",
    ]
    for told in ranks:
        for place, text in enumerate(told):
            flag = "schedule_file" if place % 3 == 2 else "--schedule-file"
            assert text.startswith(expected[place // 3].format(flag=flag)), text


def _unlike(rank, world, files):
    """Only one rank was told of a file."""
    _, _, batch = tiny("llama")
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, schedule_file=files["mine"] if rank else None
    )
    model, mesh = randomise(tiny("llama")[0]()), build_mesh(Grid(pp=2), rank, torch.device("cpu"))
    with pytest.raises(PlanError, match="rank 1 has a different one than rank 0: schedule"):
        engine_of(model, batch, mesh, parallel=parallel, microbatches=4)
    return True


def test_a_file_that_only_one_rank_was_told_of_is_an_error(files):
    assert run_ranks(_unlike, 2, files) == [True, True]


def test_a_file_beside_a_schedule_by_name_is_refused(files):
    real, _, batch = tiny("llama")
    with pytest.raises(MerakError, match="--pipeline-schedule 1f1b: contradicts --schedule-file"):
        trainer_of(
            real(),
            batch,
            Grid(),
            0,
            4,
            {"schedule_file": files["mine"], "pipeline_schedule": "1f1b"},
        )
