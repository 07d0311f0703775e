"""Ranks with different datasets of one length are told at the start, in training and in
evaluation.
"""

import pytest
from torch.utils.data import Dataset

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.ranks import run_ranks


class Here(Dataset):
    """The same samples from files in a folder of each host."""

    def __init__(self, folder):
        self.rows, self.folder = samples(8), folder

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {**self.rows[place], "file": str(self.folder / "audio.wav")}


def _trainer(directory, dataset, **others):
    args = MerakArguments(
        str(directory), use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True
    )
    return EagerTrainer(
        tiny_llama(), args, lambda rows: collate([{**row} for row in rows]), dataset, **others
    )


def _other_end(rank):
    """Samples of which only the last ones differ between ranks, in no epoch's first batch."""
    return samples(30) + samples(2, seed=5 + rank)


def _refusals(rank, world_size, directory):
    told = []
    with pytest.raises(DataError) as error:
        _trainer(directory, _other_end(rank)).train()
    told.append(str(error.value))
    with pytest.raises(DataError) as error:
        _trainer(directory, samples(8)).evaluate(_other_end(rank))
    told.append(str(error.value))
    folder = directory / str(rank)
    folder.mkdir()
    (folder / "audio.wav").touch()
    trainer = _trainer(directory, Here(folder))
    trainer.data_collator = lambda rows: collate(
        [{k: row[k] for k in ("input_ids", "labels")} for row in rows]
    )
    trainer.train()
    return told


def test_other_data_of_the_same_length_is_refused_on_every_rank(tmp_path):
    first, second = run_ranks(_refusals, 2, tmp_path)
    assert first == second
    assert first[0].startswith("train_dataset, digest of samples ")
    assert (
        "rank 1 has it, and rank 0 has " in first[0]
        and "whole: ranks share its samples" in first[0]
    )
    assert first[1].startswith("the dataset to evaluate, digest of samples ")
