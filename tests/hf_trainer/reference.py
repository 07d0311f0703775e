"""What a trainer does in a few runs: order of samples, events, logs, checkpoints, predictions.

A case runs under ``transformers.Trainer`` and under ``MerakTrainer`` alike, on the same eager
model.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.hf_trainer.stand_in import collate, samples, tiny_llama

TIMES = ("runtime", "per_second", "preparation_time")


def accuracy(prediction):
    found, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def sorted_classes(prediction):
    return {"mean": float(prediction.predictions.mean()), "rows": len(prediction.label_ids)}


def tiny_classifier():
    """A loss that knows nothing of ``num_items_in_batch``: a step's loss is the mean over its
    micro-batches.
    """
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.accepts_loss_kwargs = False
    return model


def classified(count, seed=1):
    return [
        {"input_ids": row["input_ids"], "label": len(row["input_ids"]) % 3}
        for row in samples(count, seed=seed)
    ]


def collate_classified(rows):
    batch = collate([{"input_ids": row["input_ids"], "labels": []} for row in rows])
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


LANGUAGE = (tiny_llama, collate, samples, accuracy)
CLASSES = (tiny_classifier, collate_classified, classified, sorted_classes)
# name -> (what is trained, arguments, early stopping)
CASES = {
    "epochs": (
        LANGUAGE,
        {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 0.2,
            "eval_strategy": "epoch",
            "per_device_eval_batch_size": 3,
        },
        False,
    ),
    "steps": (
        LANGUAGE,
        {
            "max_steps": 7,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "logging_steps": 3,
            "logging_first_step": True,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "eval_strategy": "steps",
            "eval_steps": 3,
            "per_device_eval_batch_size": 3,
            "max_grad_norm": 0.05,
            "data_seed": 7,
            "include_num_input_tokens_seen": "non_padding",
            "eval_on_start": True,
            "dataloader_drop_last": True,
            "save_steps": 2,
            "save_total_limit": 2,
        },
        False,
    ),
    "fraction of an epoch": (
        LANGUAGE,
        {
            "num_train_epochs": 1.3,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "logging_strategy": "epoch",
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 2,
            "save_strategy": "epoch",
            "max_grad_norm": 0.0,
        },
        False,
    ),
    "best model": (
        LANGUAGE,
        {
            "max_steps": 12,
            "per_device_train_batch_size": 4,
            "logging_steps": 2,
            "learning_rate": 3e-2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
        },
        True,
    ),
    "classes": (
        CLASSES,
        {
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "eval_strategy": "epoch",
            "save_strategy": "best",
            "metric_for_best_model": "mean",
            "greater_is_better": True,
            "include_for_metrics": ["inputs", "loss"],
        },
        False,
    ),
}


class Witness(TrainerCallback):
    """Every event with the step and the wishes of the control."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **kwargs):
            wishes = [wish for wish, value in vars(control).items() if value]
            self.events.append([name, state.global_step, *wishes])

        return note


def untimed(record):
    return {key: value for key, value in record.items() if not any(part in key for part in TIMES)}


def record(trainer_class, arguments_class, name: str, batches_of) -> dict:
    """Run a case; ``batches_of(trainer)`` gives the first tokens of every micro-batch's rows that
    were trained on.
    """
    (model, collator, data, metrics), arguments, stops = CASES[name]
    witness = Witness()
    with tempfile.TemporaryDirectory() as directory:
        args = arguments_class(
            directory, use_cpu=True, seed=3, disable_tqdm=True, report_to="none", **arguments
        )
        callbacks = [
            witness,
            *([EarlyStoppingCallback(early_stopping_patience=2)] if stops else []),
        ]
        trainer = trainer_class(
            model(),
            args,
            collator,
            data(22),
            data(7, seed=5),
            compute_metrics=metrics,
            callbacks=callbacks,
        )
        output = trainer.train()
        state = {
            k: v
            for k, v in vars(trainer.state).items()
            if k not in ("log_history", "best_model_checkpoint")
        }
        best = trainer.state.best_model_checkpoint
        kept = sorted(path.name for path in Path(directory).glob("checkpoint-*"))
        events = list(witness.events)
        args.dataloader_drop_last = False
        predicted = trainer.predict(data(7, seed=9))
    return {
        "batches": batches_of(trainer),
        "events": events,
        "logs": [untimed(entry) for entry in trainer.state.log_history],
        "state": state,
        "best": best and Path(best).name,
        "kept": kept,
        "output": [output.global_step, output.training_loss, untimed(output.metrics)],
        "weights": {n: p.double().norm().item() for n, p in trainer.model.state_dict().items()},
        "predictions": [
            list(predicted.predictions.shape),
            float(np.abs(predicted.predictions).mean()),
        ],
        "labels": predicted.label_ids.tolist(),
        "metrics": untimed(predicted.metrics),
    }


def record_transformers(name: str) -> dict:
    class Spied(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    seen = []
    return record(Spied, TrainingArguments, name, lambda trainer: seen)
