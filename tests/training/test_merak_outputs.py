"""What evaluation and prediction hand out, beside ``transformers.Trainer`` in one process."""

import numpy as np
import pytest
from transformers import Trainer, TrainingArguments

from megatron_merak.training.merak_arguments import MerakArguments
from megatron_merak.training.merak_trainer import MerakTrainer
from tests.ranks import run_ranks
from tests.training.merak_reference import untimed
from tests.training.merak_stand_in import collate, samples, tiny_llama

RUN = {"use_cpu": True, "per_device_eval_batch_size": 2, "disable_tqdm": True, "report_to": "none"}


def predicted(kind, arguments, model, collator, rows):
    """Evaluation's metrics, and predictions, labels and metrics of the same rows."""
    trainer = kind(model, arguments, collator, None, rows)
    found = trainer.predict(rows)
    return untimed(trainer.evaluate()), found.predictions, found.label_ids, untimed(found.metrics)


def with_placement(rank, world_size, directory, schedule):
    degrees = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule}
    args = MerakArguments(directory, **RUN, **degrees)
    return predicted(MerakTrainer, args, tiny_llama(), collate, samples(7))


def test_outputs_come_from_the_rank_that_has_the_last_stage(tmp_path):
    ranks = run_ranks(with_placement, 2, str(tmp_path), "zb-v")  # the first one
    args = TrainingArguments(str(tmp_path), **RUN)
    metrics, predictions, labels, told = predicted(Trainer, args, tiny_llama(), collate, samples(7))
    for ours in ranks:
        assert ours[0].keys() == metrics.keys() and ours[0]["eval_loss"] == pytest.approx(metrics["eval_loss"], 1e-5)
        assert ours[3]["test_loss"] == pytest.approx(told["test_loss"], 1e-5)
        np.testing.assert_allclose(ours[1], predictions, rtol=1e-4, atol=1e-5)
        assert np.array_equal(ours[2], labels)
