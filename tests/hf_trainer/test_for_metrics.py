"""``include_for_metrics``: what ``compute_metrics`` gets beside predictions and labels is what
transformers gives.
"""

import numpy as np
import pytest
from transformers import EvalPrediction, Trainer, TrainingArguments

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    **{"use_cpu": True, "per_device_eval_batch_size": 3, "disable_tqdm": True, "report_to": "none"},
    "include_for_metrics": ["inputs", "loss"],
}


def shown(kind: type, arguments: type, directory: str) -> tuple[list, list, list]:
    """The inputs, the losses and the labels that the metric gets; seven samples, in batches of
    three.
    """
    seen: list[EvalPrediction] = []

    def metric(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"inputs": float(prediction.inputs.sum()), "losses": float(prediction.losses.mean())}

    model, data = tiny_llama(), samples(7, seed=5)
    trainer = kind(
        model, arguments(directory, **RUN), collate, eval_dataset=data, compute_metrics=metric
    )
    metrics = trainer.evaluate()
    found = [[each.inputs.tolist(), each.losses.tolist(), each.label_ids.tolist()] for each in seen]
    return found, [metrics[name] for name in ("eval_inputs", "eval_losses", "eval_loss")]


def on_ranks(rank, world_size, directory):
    return shown(MerakTrainer, MerakArguments, directory)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_inputs_and_losses_are_those_of_one_process_in_transformers(tmp_path, replicas):
    ((wanted,), numbers) = shown(Trainer, TrainingArguments, str(tmp_path / "theirs"))
    place = str(tmp_path / "ours")
    ranks = [on_ranks(0, 1, place)] if replicas == 1 else run_ranks(on_ranks, 2, place, timeout=120)
    for rank, (found, metrics) in enumerate(ranks):
        assert metrics == pytest.approx(numbers, rel=1e-5)
        assert len(found) == (rank == 0), "the first rank computes metrics"
    ours = ranks[0][0][0]
    assert ours[0] == wanted[0] and ours[2] == wanted[2]
    np.testing.assert_allclose(ours[1], wanted[1], rtol=1e-5)
