"""Ranks that would compute other numbers are told apart at the start: libraries, settings, compiled
parts.
"""

import sys
import warnings

import pytest
import torch

from megatron_merak.errors import LaunchError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.job import ranks_of
from megatron_merak.parallel.mesh import control_group
from megatron_merak.parallel.same_software import check_same_software
from tests.ranks import run_ranks


def _other_version(directory) -> None:
    """Install another release of numpy's metadata before the real one."""
    metadata = directory / "numpy-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.8.7\n")
    sys.path.insert(0, str(directory))


CHANGES = {
    "numpy": lambda monkeypatch, directory: _other_version(directory),
    "compiled part _C": lambda monkeypatch, directory: monkeypatch.setenv("MERAK_EXT", "0"),
    "torch.are_deterministic_algorithms_enabled()": lambda *_: torch.use_deterministic_algorithms(
        True
    ),
    "environment variable NVIDIA_TF32_OVERRIDE": lambda monkeypatch, _: monkeypatch.setenv(
        "NVIDIA_TF32_OVERRIDE", "1"
    ),
}


def _each_change(rank, world_size, directory):
    group, told = control_group(world_size, None), []
    for name, change in CHANGES.items():
        place = directory / name.replace(" ", "-")
        place.mkdir(exist_ok=True)
        path, deterministic = [*sys.path], torch.are_deterministic_algorithms_enabled()
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1:
                change(monkeypatch, place)
            with pytest.raises(LaunchError) as error:
                check_same_software(group, torch.device("cpu"))
            told.append((error.value.what, str(error.value)))
        sys.path[:] = path
        torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(1 + rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_same_software(group, torch.device("cpu"))
    return told, [str(each.message) for each in said]


def test_other_software_is_refused_on_every_rank_and_other_threads_are_told(tmp_path):
    (first, said), (second, nothing) = run_ranks(_each_change, 2, tmp_path)
    assert first == second and [name for name, _ in first] == [*CHANGES]
    assert "numpy 9.8.7: rank 1 has it, and rank 0 has " in first[0][1]
    assert "rank 1 has it" in first[1][1] and "(disabled)" in first[1][1]
    assert (
        any("threads of a rank: 1 on rank 0, 2 on rank 1" in text for text in said)
        and nothing == []
    )


def _arguments(rank, world_size, directory):
    if rank == 1:
        torch.use_deterministic_algorithms(True)
    with pytest.raises(
        LaunchError, match="torch.are_deterministic_algorithms_enabled.*True: rank 1 has it"
    ):
        ranks_of(MerakArguments(directory, use_cpu=True, ddp_backend="gloo", report_to="none"))


def test_a_trainer_and_an_engine_refuse_it_too(tmp_path):
    run_ranks(_arguments, 2, str(tmp_path))
