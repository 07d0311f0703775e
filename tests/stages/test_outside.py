"""Numbers of a batch that have no row in the model's tables: refused by name on every rank, sharded
tables or not.
"""

import pytest
import torch
import transformers as hf

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of
from tests.ranks import run_ranks

GPT2 = {
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 64,
    "vocab_size": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROWS = 16


def gpt2():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))


def batch(length=12, **changed):
    """changed: (sample, position, number) by entry."""
    ids = torch.randint(1, 128, (3, length), generator=torch.Generator().manual_seed(length))
    made = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(length).repeat(3, 1),
    }
    for name, (sample, position, number) in changed.items():
        made[name][sample, position] = number
    return made


def unplaced(length):
    return {name: entry for name, entry in batch(length).items() if name != "position_ids"}


def test_what_has_no_row_is_told_for_every_length():
    """20 and 28 are captured, 41 is made from these two."""
    engine = engine_of(gpt2(), batch(20), build_mesh(Grid(1, 1, 1), 0, torch.device("cpu")))
    rows, classes = (
        "transformer.wte.weight has 128 rows, 0 to 127",
        "the loss has 128 classes, 0 to 127",
    )
    places = "transformer.wpe.weight has 64 rows, 0 to 63"
    for length in (20, 28, 41):
        engine.refuse_outside([batch(length), batch(length, labels=(1, 3, -100))], True)
        for name, number, has in (
            ("input_ids", 128, rows), ("input_ids", -1, rows), ("labels", 128, classes), ("position_ids", 64, places)
        ):  # fmt: skip
            with pytest.raises(DataError) as error:
                engine.refuse_outside(
                    [batch(length), batch(length, **{name: (2, 5, number)})], True
                )
            told = f"batch entry {name} {number}: in sample 2 at position 5 of micro-batch 1, and {has}. "
            assert str(error.value).startswith(told)
    assert engine.captures == (2, 1)


def test_rows_that_are_longer_than_the_table_of_positions_are_refused():
    engine = engine_of(gpt2(), unplaced(64), build_mesh(Grid(1, 1, 1), 0, torch.device("cpu")))
    engine.refuse_outside([unplaced(64)], True)
    for training in (True, False):
        with pytest.raises(
            DataError,
            match=r"index 64: computed from the length of its rows .*wpe.weight has 64 rows",
        ):
            engine.refuse_outside([unplaced(65)], training)


class Samples(torch.utils.data.Dataset):
    def __init__(self, **changed):
        self.changed = changed

    def __len__(self):
        return ROWS

    def __getitem__(self, place):
        drawn = torch.randint(1, 128, (12,), generator=torch.Generator().manual_seed(place))
        sample = {"input_ids": drawn, "labels": drawn.clone()}
        if place == ROWS - 1:
            for name, number in self.changed.items():
                sample[name][5] = number
        return sample


def _refusals(rank, world, directory, degrees):
    told = []
    for changed in ({"input_ids": 128}, {"labels": -5}):
        args = MerakArguments(
            str(directory), use_cpu=True, max_steps=8, report_to="none", disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, train_sampling_strategy="sequential", **degrees,
        )  # fmt: skip
        trainer = MerakTrainer(
            gpt2(), args, hf.default_data_collator, Samples(**changed), Samples(**changed)
        )
        for door in (trainer.train, trainer.evaluate):
            with pytest.raises(DataError) as error:
                door()
            told.append(str(error.value))
    return told


@pytest.mark.long
@pytest.mark.parametrize(
    "degrees",
    [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}],
    ids=["tp", "pp", "dp"],
)
def test_every_rank_refuses_them_in_training_and_evaluation(tmp_path, degrees):
    """A rank with a shard of the vocabulary took them for rows of the other rank."""
    first, second = run_ranks(_refusals, 2, tmp_path, degrees, timeout=120)
    assert first == second
    where = "on ranks 0, 1" if degrees else "on rank 1"
    assert [text.partition(", in sample")[0] for text in first] == [
        f"batch entry {name}: {where}"
        for name in ("input_ids 128", "input_ids 128", "labels -5", "labels -5")
    ]
