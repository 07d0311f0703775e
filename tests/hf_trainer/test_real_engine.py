"""MerakTrainer with its real engine against the unmodified eager model: ragged batches, every kind
of parallelism.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.reference import accuracy, untimed
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.hf_trainer.test_resume import masked
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "warmup_ratio": 0.2,
    "logging_steps": 1,
    "save_steps": 3,
    "eval_strategy": "epoch",
    "per_device_eval_batch_size": 5,
    "length_buckets": "16",
    "disable_tqdm": True,
}


def trainer(kind, directory, count=11, **changes):
    args = MerakArguments(str(directory), **{**RUN, **changes})
    data = samples(count), samples(5, seed=5)
    return kind(tiny_llama(), args, masked, *data, compute_metrics=accuracy)


def logs(found):
    return [untimed(entry) for entry in found.state.log_history]


def count(layouts):
    """Samples: the last batch is a part of one, and so is the last step, where one replica
    trains.
    """
    return 11 if layouts == [(1, 1)] else 12


def run(rank, world_size, directory, layouts):
    """Per layout: logs, predictions; then a run that goes on from the last one's checkpoint."""
    results = []
    for tp, pp in layouts:
        degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        # other tests have the default
        degrees |= {"rank_order": "pp-dp-tp"} if world_size > 1 else {}
        # on parts of sequences; those of odd lengths are not divided
        degrees |= {"sequence_parallel": True, "length_buckets": "none"} if pp > 1 else {}
        changes = degrees | {
            "gradient_accumulation_steps": 2 * tp * pp // world_size,
            "count": count(layouts),
        }
        whole = trainer(MerakTrainer, f"{directory}/{tp}{pp}", **changes)
        whole.train()
        predicted = whole.predict(samples(5, seed=9))
        whole.save_model(f"{directory}/{tp}{pp}/final")
        results.append((logs(whole), predicted.predictions, untimed(predicted.metrics)))
    resumed = trainer(MerakTrainer, f"{directory}/resumed", **changes | {"eval_strategy": "no"})
    resumed.train(resume_from_checkpoint=f"{directory}/{tp}{pp}/checkpoint-3")
    return results, logs(resumed)


def check(found, resumed, directory, layouts):
    eager = trainer(EagerTrainer, directory / "eager", count=count(layouts))
    eager.train()
    wanted, predicted = logs(eager), eager.predict(samples(5, seed=9))
    for (tp, pp), (told, predictions, metrics) in zip(layouts, found, strict=True):
        for ours, theirs in zip(told, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), (tp, pp)
        np.testing.assert_allclose(predictions, predicted.predictions, rtol=1e-3, atol=1e-4)
        assert metrics == pytest.approx(untimed(predicted.metrics), rel=1e-4)
        loaded = LlamaForCausalLM.from_pretrained(directory / f"{tp}{pp}" / "final")
        for name, value in eager.model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-3, atol=1e-5)
    (told, _, _) = found[-1]
    assert [e for e in resumed if "loss" in e] == [e for e in told if "loss" in e]


def test_one_process(tmp_path):
    layouts = [(1, 1)]
    check(*run(0, 1, str(tmp_path), layouts), tmp_path, layouts)


def test_four_ranks(tmp_path):
    layouts = [(2, 1), (2, 2)]
    ranks = run_ranks(run, 4, str(tmp_path), layouts, timeout=200)
    for found, resumed in ranks:
        assert [entry[0] for entry in found] == [
            entry[0] for entry in ranks[0][0]
        ] and resumed == ranks[0][1]
    check(*ranks[0], tmp_path, layouts)


def test_a_model_without_weights_draws_its_own(tmp_path):
    with init_empty_weights():
        model = tiny_llama()
    args = MerakArguments(str(tmp_path), **{**RUN, "max_steps": 1, "eval_strategy": "no"})
    built = MerakTrainer(model, args, collate, samples(4))
    built.save_model(str(tmp_path / "drawn"))
    drawn = LlamaForCausalLM.from_pretrained(tmp_path / "drawn").state_dict()
    assert drawn["model.norm.weight"].tolist() == [1.0] * 16
    assert abs(drawn["lm_head.weight"].std().item() - model.config.initializer_range) < 0.003
    assert built.train().training_loss == pytest.approx(np.log(64), rel=0.01)
