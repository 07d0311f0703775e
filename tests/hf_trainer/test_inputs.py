"""What MerakTrainer is given: what it takes, as transformers.Trainer does, and what it refuses by
name.
"""

import json

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from megatron_merak.errors import ConfigError, DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.engine import wishes
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.reference import accuracy
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama

RUN = {
    "use_cpu": True,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def arguments(directory, **changes):
    return MerakArguments(str(directory), **{**RUN, **changes})


def build(
    directory, kind=EagerTrainer, model=None, data=None, evaluation=None, changes=None, **given
):
    model = tiny_llama() if model is None and "model_init" not in given else model
    return kind(model, arguments(directory, **(changes or {})), collate, data, evaluation, **given)


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"compute_loss_func": 3}, "compute_loss_func 3: it cannot be called"),
        ({"optimizers": (None, 1)}, "optimizers"),
        ({"optimizers": (3, None)}, "optimizers int: it is not a torch.optim.Optimizer"),
        (
            {"optimizers": (SGD, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            "optimizers and optimizer_cls_and_kwargs SGD: both define",
        ),
        (
            {"optimizers": (SGD, None), "model_init": tiny_llama},
            "optimizers SGD: .*Override create_optimizer",
        ),
        ({"optimizers": (None, LambdaLR(SGD, float))}, "optimizers LambdaLR: .*another optimizer"),
        ({"model_init": tiny_llama, "model": tiny_llama()}, "exactly one of the two"),
        ({"changes": {"eval_strategy": "epoch"}}, "eval_strategy"),
        ({"changes": {"save_strategy": "best"}}, "metric_for_best_model"),
        ({"changes": {"report_to": "carrier_pigeon"}}, "report_to"),
        ({"changes": {"output_dir": "/proc/none"}}, "output_dir"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, given, told):
    with pytest.raises(ConfigError, match=told):
        build(given.get("changes", {}).pop("output_dir", tmp_path), **given)


def test_other_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dict"):
        MerakTrainer(tiny_llama(), {"output_dir": str(tmp_path)})


def test_a_model_without_anything_to_train_is_refused(tmp_path):
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(
        ConfigError, match="none of its parameters requires a gradient.*is_trainable=True"
    ):
        build(tmp_path, model=model, data=samples(4)).train()


def test_missing_datasets_are_told(tmp_path):
    with pytest.raises(ConfigError, match="train_dataset"):
        build(tmp_path, evaluation=samples(2)).train()
    with pytest.raises(ConfigError, match="eval_dataset"):
        build(tmp_path, data=samples(2)).evaluate()
    with pytest.raises(ConfigError, match="Give a dataset"):
        build(tmp_path).save_model()

    class NoLength:
        def __getitem__(self, index):
            return samples(1)[0]

    with pytest.raises(DataError, match="no length"):
        build(tmp_path, data=NoLength()).train()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples(3))

    with pytest.raises(ConfigError, match="max_steps"):
        build(tmp_path, data=Stream(), changes={"max_steps": -1}).train()


def test_callbacks_come_and_go(tmp_path):
    class Mine(TrainerCallback):
        pass

    trainer = build(tmp_path, data=samples(4), callbacks=[Mine])
    assert isinstance(trainer.pop_callback(Mine), Mine) and trainer.pop_callback(Mine) is None
    trainer.add_callback(Mine())
    trainer.remove_callback(Mine)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert PrinterCallback in kinds and ProgressCallback not in kinds and Mine not in kinds


def test_tensorboard_hears_the_logs(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    changes = {"report_to": "tensorboard", "logging_steps": 1}
    build(tmp_path, data=samples(4), changes=changes).train()
    assert list((tmp_path / "board").rglob("events.out.tfevents*"))


def test_progress_bars_are_shown_where_they_are_wanted(tmp_path, capsys):
    changes = {"disable_tqdm": False, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
    build(tmp_path, data=samples(4), evaluation=samples(2), changes=changes).train()
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "eval_loss" in shown.out + shown.err


def test_several_evaluation_sets(tmp_path):
    sets = {"one": samples(3), "two": samples(2, seed=5)}
    trainer = build(tmp_path, data=samples(4), evaluation=sets)
    metrics = trainer.evaluate()
    assert {"eval_one_loss", "eval_two_loss"} <= metrics.keys()
    assert trainer.evaluate("two", metric_key_prefix="x")["x_loss"] == metrics["eval_two_loss"]
    assert trainer.evaluate(sets["one"])["eval_loss"] == metrics["eval_one_loss"]


def test_predictions_without_labels(tmp_path):
    rows = [{"input_ids": row["input_ids"], "labels": []} for row in samples(3)]

    def unlabelled(rows):
        batch = collate(rows)
        del batch["labels"]
        return batch

    trainer = EagerTrainer(tiny_llama(), arguments(tmp_path), unlabelled)
    found = trainer.predict(rows)
    assert (
        found.label_ids is None
        and "test_loss" not in found.metrics
        and found.predictions.shape[0] == 3
    )


def test_predictions_of_several_outputs(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    model = BertForQuestionAnswering(config)

    def spans(rows):
        batch = collate([row | {"labels": []} for row in rows])
        return {k: batch[k] for k in ("input_ids", "attention_mask")} | {
            "start_positions": torch.tensor([1] * len(rows)),
            "end_positions": torch.tensor([2] * len(rows)),
        }

    seen = {}

    def metrics(prediction):
        seen.update(
            shapes=[x.shape for x in prediction.predictions],
            labels=[x.tolist() for x in prediction.label_ids],
        )
        return {}

    changes = arguments(tmp_path, length_buckets="none", per_device_eval_batch_size=2)
    EagerTrainer(model, changes, spans, None, samples(3), compute_metrics=metrics).evaluate()
    longest = max(len(row["input_ids"]) for row in samples(3))
    assert seen["labels"] == [[1] * 3, [2] * 3] and seen["shapes"][0] == seen["shapes"][1] == (
        3,
        longest,
    )


def test_logits_can_be_made_small_before_they_are_kept(tmp_path):
    given = {"compute_metrics": lambda p: {"right": float((p.predictions == p.label_ids).mean())}}
    small = build(
        tmp_path,
        evaluation=samples(3),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        **given,
    )
    assert 0 <= small.evaluate()["eval_right"] <= 1
    assert small.predict(samples(3)).predictions.shape == (
        3,
        max(len(row["labels"]) for row in samples(3)),
    )


def test_a_model_is_made_anew_for_every_training(tmp_path):
    trainer = build(tmp_path, data=samples(4), model_init=lambda: tiny_llama())
    first, second = trainer.train().training_loss, trainer.train().training_loss
    assert first == second


def test_workers_bring_the_same_batches(tmp_path):
    alone, helped = (
        build(tmp_path, data=samples(8), changes={"dataloader_num_workers": n}) for n in (0, 2)
    )
    assert alone.train().training_loss == helped.train().training_loss
    assert alone.engine.seen == helped.engine.seen


def test_columns_that_the_model_does_not_take_are_dropped(tmp_path):
    rows = [row | {"text": "some", "number": n} for n, row in enumerate(samples(4))]

    def strict(rows):
        assert all(row.keys() == {"input_ids", "labels"} for row in rows)
        return collate(rows)

    EagerTrainer(tiny_llama(), arguments(tmp_path), strict, rows).train()
    with pytest.raises(AssertionError):
        EagerTrainer(
            tiny_llama(), arguments(tmp_path, remove_unused_columns=False), strict, rows
        ).train()


def test_files_of_metrics_and_state(tmp_path):
    trainer = build(tmp_path, data=samples(4), evaluation=samples(3), compute_metrics=accuracy)
    output = trainer.train()
    trainer.log_metrics("train", output.metrics)
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    trainer.save_model()
    assert (
        json.loads((tmp_path / "train_results.json").read_text())["train_loss"]
        == output.training_loss
    )
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "training_args.json").exists()


def test_a_tokenizer_pads_and_is_told_to_callbacks(tmp_path):
    from tokenizers import Tokenizer, models

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(n): n for n in range(64)}, "1"))
    )
    words.pad_token, words.eos_token = "3", "2"
    seen = []

    class Mine(TrainerCallback):
        def on_train_begin(
            self, args, state, control, processing_class=None, lr_scheduler=None, **kwargs
        ):
            seen.append(
                (processing_class, lr_scheduler.get_last_lr(), len(kwargs["train_dataloader"]))
            )

    rows = [{"input_ids": row["input_ids"]} for row in samples(4)]
    collator = DataCollatorForLanguageModeling(words, mlm=False)
    trainer = EagerTrainer(
        tiny_llama(),
        arguments(tmp_path, length_buckets="16"),
        collator,
        rows,
        processing_class=words,
        callbacks=[Mine],
    )
    trainer.train()
    assert seen == [(words, [5e-5, 5e-5], 2)] and trainer.engine.shapes == {(2, 16)}
    assert trainer.model.config.pad_token_id == 3
    assert trainer.feed.neutral.padding.pad_id == 3


class EndsMidway(TrainerCallback):
    """Wishes something between the micro-batches of the third step."""

    def __init__(self, wish):
        self.wish = wish

    def on_substep_end(self, args, state, control, **kwargs):
        setattr(control, self.wish, state.global_step == 2)


def test_training_that_a_callback_ends_midway_discards_that_gradient(tmp_path):
    changes = {"max_steps": 6, "gradient_accumulation_steps": 2}
    callbacks = [EndsMidway("should_training_stop")]
    ours = build(tmp_path, data=samples(24, ragged=False), changes=changes, callbacks=callbacks)
    theirs = Trainer(
        tiny_llama(),
        TrainingArguments(str(tmp_path), **{**RUN, **changes}),
        collate,
        samples(24, ragged=False),
        callbacks=callbacks,
    )
    for trainer in (ours, theirs):
        trainer.train()
        assert trainer.state.global_step == 2 and trainer.state.epoch == pytest.approx(1 / 3)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    ended = build(
        tmp_path, data=samples(24), changes=changes, callbacks=[EndsMidway("should_epoch_stop")]
    )
    with pytest.raises(ConfigError, match="should_epoch_stop True: .*Set it in on_step_end"):
        ended.train()


def test_a_limit_that_is_infinite_clips_nothing(tmp_path):
    args = arguments(tmp_path, max_grad_norm=float("inf"))
    assert wishes(args)["optimizer"].clip_grad == 0.0


def test_rows_of_an_evaluation_are_weighed_alike(tmp_path):
    """The last batch is smaller: its loss counts for its rows only, as in transformers."""
    rows = samples(5, ragged=False, seed=5)
    changes = {"per_device_eval_batch_size": 3}
    found = build(tmp_path, evaluation=rows, changes=changes).evaluate()["eval_loss"]
    model = tiny_llama().eval()
    with torch.no_grad():
        losses = [model(**collate(part)).loss.item() for part in (rows[:3], rows[3:])]
    assert found == pytest.approx(np.average(losses, weights=[3, 2]), rel=1e-6)
