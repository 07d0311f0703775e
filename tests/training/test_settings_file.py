"""--save stores the settings of a run, which --config reads back; files that differ between ranks
are refused.
"""

from pathlib import Path

import pytest

from megatron_merak.arguments import build_parser, read
from megatron_merak.config import Config
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.training.settings_file import store_settings
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job


def settings(flags: str) -> Config:
    return read(build_parser(), flags.split())[0]


def test_a_run_stores_the_settings_as_they_were_given(tmp_path):
    """NullTokenizer adds a token to the vocabulary; the file has the one that was asked for."""
    flags = f"--save {tmp_path} --train-iters 1 --tokenizer-type NullTokenizer --adam-eps 1e-5 --split 8,1,1"
    run_ranks(job, 2, f"{flags} --pipeline-model-parallel-size 2")
    given = settings(f"{SHAPE} {RUN} --mock-data {flags} --pipeline-model-parallel-size 2")
    assert settings(f"--config {tmp_path}/config.yaml") == given and given.model.vocab_size == 60
    assert not (tmp_path / "config.yaml.tmp").exists()


def resumed(rank: int, world: int, directory: str) -> str:
    return job(rank, world, f"--config {directory}/config.yaml --load {directory} --train-iters 3")


def test_a_run_goes_on_from_its_stored_settings(tmp_path):
    run_ranks(job, 1, f"--save {tmp_path} --train-iters 2 --weight-decay 0.3")
    told = run_ranks(resumed, 1, str(tmp_path))[0]
    assert "loaded the checkpoint of iteration 2" in told and "iteration        3/       3" in told
    stored = settings(f"--config {tmp_path}/config.yaml")
    assert (stored.train.train_iters, stored.optimizer.weight_decay) == (3, 0.3)


def differing(rank: int, world: int, directory: str) -> str:
    try:
        job(rank, world, f"--train-iters 1 --config {directory}/{rank}.yaml")
    except ConfigError as error:
        return str(error)
    return ""


def test_files_that_differ_between_ranks_are_refused(tmp_path):
    for rank, value in enumerate(("0.1", "0.2")):
        (tmp_path / f"{rank}.yaml").write_text(f"weight-decay: {value}\n")
    told = (
        "rank 1 has it, rank 0 has 0.1. Start all ranks with the same arguments and --config file."
    )
    assert run_ranks(differing, 2, str(tmp_path)) == [f"--weight-decay 0.2: {told}"] * 2


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    config = settings(f"{SHAPE} {RUN}")
    with pytest.raises(CheckpointError, match="none/config.yaml"):
        store_settings(config, str(tmp_path / "none"))
    store_settings(config, str(tmp_path))
    first = Path(tmp_path / "config.yaml").read_text()
    assert first.startswith(
        "# The settings of a run; --config reads this file.\nmodel:\n  num_layers: 2\n"
    )
