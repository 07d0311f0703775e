"""Generated predictions and their metrics, side by side with ``transformers.Seq2SeqTrainer``."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from megatron_merak import MerakArguments, MerakSeq2SeqArguments, MerakSeq2SeqTrainer
from megatron_merak.errors import ConfigError
from tests.ranks import run_ranks

CONFIG = GenerationConfig(max_length=12, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
SIZES = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 96,
    "dropout_rate": 0.0,
}


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(**SIZES, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    )


def pairs(count: int, seed: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, 96, (count, 2, 8), generator=draw)
    return [
        {"input_ids": row[0, : 5 + k % 4].tolist(), "labels": row[1, :6].tolist()}
        for k, row in enumerate(rows)
    ]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in rows], batch_first=True
    )
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def metrics(prediction: Any) -> dict[str, float]:
    return {
        "sum": float(prediction.predictions.sum()),
        "wide": float(prediction.predictions.shape[1]),
    }


def see(kind: type, arguments: type, directory: str, **changes: Any) -> list[Any]:
    """What an evaluation in training, one with other keywords, and a prediction give."""
    plain = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }
    plain |= {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "seed": 3,
    }
    plain |= {
        "generation_max_length": 9,
        "generation_num_beams": 2,
        "predict_with_generate": True,
        "adam_epsilon": 1e-4,
    }
    args = arguments(directory, **{**plain, **changes})
    trainer = kind(t5(), args, collate, pairs(16, 1), pairs(4, 2), compute_metrics=metrics)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_sum" in entry]
    told = trainer.evaluate(max_new_tokens=3, num_beams=1)
    found = trainer.predict(pairs(4, 4), max_length=5)
    kept = [
        {name: entry[name] for name in ("eval_loss", "eval_sum", "eval_wide")}
        for entry in (*logged, told)
    ]
    return [
        kept,
        found.predictions,
        found.label_ids,
        found.metrics["test_loss"],
        found.metrics["test_sum"],
    ]


def ours(
    rank: int, world: int, directory: str, degrees: dict[str, int], changes: dict[str, Any]
) -> list[Any]:
    return see(MerakSeq2SeqTrainer, MerakSeq2SeqArguments, directory, **degrees, **changes)


@pytest.mark.parametrize(
    ("ranks", "degrees", "changes"),
    [
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2},
            {"generation_config": CONFIG},
            marks=pytest.mark.slow,
        ),
        (1, {}, {}),
        pytest.param(2, {"tensor_model_parallel_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"per_device_train_batch_size": 4}, {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
@pytest.mark.long
def test_predictions_are_those_of_transformers(tmp_path, ranks, degrees, changes):
    wanted = see(Seq2SeqTrainer, Seq2SeqTrainingArguments, str(tmp_path / "theirs"), **changes)
    for found in run_ranks(ours, ranks, str(tmp_path / "ours"), degrees, changes, timeout=240):
        for mine, theirs in zip(found[0], wanted[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        assert np.array_equal(found[1], wanted[1]) and np.array_equal(found[2], wanted[2])
        assert found[3:] == pytest.approx(wanted[3:], rel=1e-4)


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sortish_sampler"):
        MerakSeq2SeqArguments(str(tmp_path), sortish_sampler=True)
    with pytest.raises(ConfigError, match="it has no predict_with_generate"):
        MerakSeq2SeqTrainer(t5(), MerakArguments(str(tmp_path), use_cpu=True, report_to="none"))
    given = {
        "use_cpu": True,
        "report_to": "none",
        "generation_config": GenerationConfig(num_beams=1, early_stopping=True),
    }
    with pytest.raises(ConfigError, match="generation_config .given.: .*early_stopping"):
        MerakSeq2SeqTrainer(t5(), MerakSeq2SeqArguments(str(tmp_path), **given))
