"""Micro-batches are halved, and padded, only where the loss and every gradient stay those of
transformers.Trainer.
"""

import warnings

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches import leaner
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "max_grad_norm": 0.0,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))


def classifier():
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, **drops, num_labels=3))


def mixtral():
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **experts, router_aux_loss_coef=0.5))


def dropping_gpt2():
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32, **drops)
    )


def classified(rows):
    batch = collate([{"input_ids": row["input_ids"], "labels": []} for row in rows])
    return batch | {"labels": torch.tensor([len(row["input_ids"]) % 3 for row in rows])}


def trained(kind, arguments, directory, make, collator, ragged=False, **changes):
    """(losses, gradient norms) of the steps; what was said meanwhile."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = kind(
            make(),
            arguments(directory, **{**RUN, **changes}),
            collator,
            samples(8, ragged),
            samples(5),
        )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    said = [text for text in (str(entry.message) for entry in told) if "batches" in text]
    return (
        [entry["loss"] for entry in steps],
        [entry["grad_norm"] for entry in steps],
        said,
        trainer,
    )


def as_in_transformers(directory, make, collator, **changes):
    """The trainer that gave the losses and norms of transformers, that of transformers, and what
    ours said.
    """
    expected = trained(Trainer, TrainingArguments, directory, make, collator, **changes)
    losses, norms, said, trainer = trained(
        MerakTrainer, MerakArguments, directory, make, collator, **changes
    )
    assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(
        expected[1], rel=1e-4
    )
    return trainer, expected[3], said


class Pooled(nn.Module):
    """The mean over all positions, and no word of a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.head = nn.Embedding(64, 16), self.mixer(), nn.Linear(16, 3)

    def mixer(self):
        return nn.Linear(16, 16)

    def mixed(self, words):
        return self.mix(words).tanh()

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.mixed(self.words(input_ids)).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(Pooled):
    def mixer(self):
        return nn.GRU(16, 8, batch_first=True, bidirectional=True)

    def mixed(self, words):
        return self.mix(words)[0]


class Tagged(Pooled):
    """Classes that are whole numbers, several per row."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        words = self.words(input_ids) * attention_mask[..., None]
        logits = self.head(words.sum(1))
        return {"loss": (logits.sigmoid() - labels).square().mean(), "logits": logits}


class Normed(Pooled):
    """Running statistics, which a comparison must not move."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, input_ids, attention_mask=None, labels=None):
        words = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        logits = self.head(self.norm(words))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def last_token():
    """Llama's classifier without a padding token takes the last position of every row, whatever
    stands there.
    """
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3))


def tagged(rows):
    batch = classified(rows)
    return batch | {"labels": torch.tensor([[row["input_ids"][-1] % 2, 1, 0] for row in rows])}


PADDED = {
    "pooled": (Pooled, classified, False),
    "recurrent": (Recurrent, classified, False),
    "last token": (last_token, classified, False),
    "several classes": (Tagged, tagged, True),
    "running statistics": (Normed, classified, True),
    "causal": (llama, collate, True),
    "bidirectional": (classifier, classified, True),
}


def some(names, now):
    """The cases of a test, of which those that are not in ``now`` are long."""
    return [pytest.param(name, marks=() if name in now else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", some(PADDED, ("pooled", "running statistics", "causal")))
def test_padding_that_a_model_notices_is_left_out(tmp_path, name):
    make, collator, neutral = PADDED[name]
    changes = {"per_device_train_batch_size": 1 + neutral, "max_steps": 4, "ragged": True}
    trainer, theirs, said = as_in_transformers(str(tmp_path), make, collator, **changes)
    assert ("training batches are not padded" in "".join(said)) != neutral
    for mine, other in zip(trainer.model.buffers(), theirs.model.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    shapes = [shapes for role, shapes in trainer.engine.programs[0]._programs if role.training]
    lengths = {shape[1] for shapes in shapes for entry, shape, _ in shapes if entry == "input_ids"}
    assert lengths & {8, 12} and lengths - {8, 12}


def turned(rows):
    """Padded in front."""
    batch = collate(rows)
    ends = batch["attention_mask"].sum(1).tolist()
    return {
        name: torch.stack([x.roll(-n) for x, n in zip(value, ends, strict=True)])
        for name, value in batch.items()
    }


def eager_llama():
    """A position that attends to nothing gets the mean of its row, padding included."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, pad_token_id=0, attn_implementation="eager")
    return LlamaForCausalLM(config)


def turned_later(rows):
    """Padded in front, but for batches with one of the first two samples."""
    batch = turned(rows)
    return batch if min(row["input_ids"][0] for row in rows) > 2 else collate(rows)


@pytest.mark.parametrize(
    "collator", [turned_later, pytest.param(turned, marks=pytest.mark.long)], ids=["later", "all"]
)
def test_padding_in_front_has_a_trial_of_its_own(tmp_path, collator):
    changes = {"per_device_train_batch_size": 2, "max_steps": 4, "ragged": True}
    changes |= {"train_sampling_strategy": "sequential"}
    _, _, said = as_in_transformers(str(tmp_path), eager_llama, collator, **changes)
    assert "training batches are not padded" in "".join(said)


def counted(rows):
    """What stands at padding is a target."""
    batch = collate(rows)
    return batch | {"labels": batch["labels"].clamp(min=0)}


# The model, its batches, and whether training leaves out the masks of their padding.
MASKED = {
    "causal": (llama, collate, True),
    "padded in front": (llama, turned, False),
    "targets at padding": (llama, counted, False),
    "a loss that counts padding": (mixtral, collate, False),
    "bidirectional": (classifier, classified, False),
}


@pytest.mark.parametrize("name", some(MASKED, ("causal", "targets at padding")))
def test_masks_of_padding_go_where_they_change_nothing(tmp_path, monkeypatch, name):
    monkeypatch.setattr(leaner, "LONGEST", 0)  # else such batches become one row
    make, collator, goes = MASKED[name]
    changes = {"max_steps": 3, "ragged": True}
    trainer, theirs, _ = as_in_transformers(str(tmp_path), make, collator, **changes)
    assert bool(trainer.feed.masks.refused) == (name == "a loss that counts padding")
    made = trainer.engine.programs[0]._programs
    ran = [{entry for entry, *_ in shapes} for role, shapes in made if role.training]
    # or was tried
    assert any("attention_mask" not in entries for entries in ran) == (goes or "loss" in name)
    asked = theirs.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(asked, rel=1e-5)


class OfOtherWords(LlamaForCausalLM):
    """Computes with what `changed` makes of the words of a batch."""

    def forward(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        position_ids=None,
        num_items_in_batch=None,
    ):
        words = self.changed(self.get_input_embeddings()(input_ids))
        given = {"attention_mask": attention_mask, "labels": labels, "position_ids": position_ids}
        return super().forward(inputs_embeds=words, **given, num_items_in_batch=num_items_in_batch)


class Convolved(OfOtherWords):
    """Each token has something of the one before it, whichever document that is of."""

    def changed(self, words):
        return words + nn.functional.pad(words, (0, 0, 1, 0))[:, :-1]


def convolved():
    torch.manual_seed(0)
    return Convolved(LlamaConfig(**SMALL))


class Stretched(OfOtherWords):
    """Computes otherwise with more tokens than a row may have."""

    def changed(self, words):
        return words * 2 if words.shape[1] > self.config.max_position_embeddings else words


def stretched():
    torch.manual_seed(0)
    return Stretched(LlamaConfig(**SMALL, max_position_embeddings=38))


def token_classifier():
    torch.manual_seed(0)
    return LlamaForTokenClassification(LlamaConfig(**SMALL, num_labels=3, classifier_dropout=0.0))


def of_tokens(rows, begin=None):
    """A class for every token. begin: that of the first, None for one like the others'."""
    batch = collate(rows)
    labels = (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0] = labels[:, 0] if begin is None else begin
    return batch | {"labels": labels}


def of_later_tokens(rows):
    """First tokens have no class, but for those of batches with many tokens."""
    return of_tokens(rows, None if collate(rows)["attention_mask"].sum() > 38 else -100)


# The model, its batches, and whether rows of these become one, once all batches were seen.
ROWS = {
    "causal": (llama, collate, True),
    "experts": (mixtral, collate, True),
    "padded in front": (llama, turned, False),
    "targets at padding": (llama, counted, False),
    "bidirectional": (classifier, classified, False),
    "convolved": (convolved, collate, False),
    "first tokens are targets": (token_classifier, of_tokens, False),
    "some first tokens are targets": (token_classifier, of_later_tokens, False),
    "more tokens than a row has": (stretched, collate, False),
}


@pytest.mark.parametrize(
    "name", some(ROWS, ("causal", "targets at padding", "first tokens are targets"))
)
def test_rows_become_one_where_that_changes_nothing(tmp_path, name):
    make, collator, one = ROWS[name]
    # the first batch has 36 tokens, the second 41
    changes = {"max_steps": 4, "ragged": True, "seed": 6}
    trainer, theirs, _ = as_in_transformers(str(tmp_path), make, collator, **changes)
    steps = [trainer.prepare_step([batch]) for batch in theirs.get_train_dataloader()]
    ran = {entry["input_ids"].shape[0] == 1 for (entry,) in steps}
    assert ran == {one} and bool(trainer.feed.rows.refused) == (
        make in (convolved, token_classifier, stretched)
    )


def test_tokens_go_to_one_row_and_their_scores_back():
    rows = [{"input_ids": [*range(1, n)], "labels": [*range(1, n)]} for n in (4, 7, 3)]
    batch = collate(rows)
    made = leaner.as_documents(batch)
    assert (
        made["input_ids"].tolist() == [[1, 2, 3, 1, 2, 3, 4, 5, 6, 1, 2]]
        and "attention_mask" not in made
    )
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]]
    assert made["labels"].tolist() == [[-100, 2, 3, -100, 2, 3, 4, 5, 6, -100, 2]]
    padded = torch.cat((made["input_ids"], made["input_ids"].new_full((1, 5), 9)), 1)
    assert torch.equal(leaner.in_rows(padded, batch["attention_mask"]), batch["input_ids"])


HALVED = ((classifier, classified, False), (mixtral, collate, False), (llama, collate, True))


# at most one of the two has a batch to pad at a time
REPLICAS = {"per_device_train_batch_size": 1, "max_steps": 3}
MIXED = {"per_device_train_batch_size": 2, "max_steps": 2}


def in_halves(rank, world_size, directory):
    results = []
    for make, collator, _ in HALVED:
        degrees = {"tensor_model_parallel_size": 2, "tp_comm_overlap": "sub-pipeline"}
        *found, trainer = trained(
            MerakTrainer, MerakArguments, directory, make, collator, **degrees
        )
        results.append((*found, trainer.engine.halves))
    dropped = trained(MerakTrainer, MerakArguments, directory, dropping_gpt2, collate, **degrees)[3]
    replicas = trained(
        MerakTrainer,
        MerakArguments,
        directory,
        Pooled,
        collator=classified,
        ragged=True,
        **REPLICAS,
    )[:3]
    rows = trained(
        MerakTrainer, MerakArguments, directory, llama, collator=collate, ragged=True, **MIXED
    )
    return results, dropped.engine.halves, replicas, (*rows[:2], rows[3].feed.rows._shown)


@pytest.mark.timeout(200)
@pytest.mark.long
def test_halves_that_do_not_add_up_run_whole(tmp_path):
    alone = trained(
        Trainer,
        TrainingArguments,
        str(tmp_path),
        Pooled,
        collator=classified,
        ragged=True,
        **REPLICAS,
        gradient_accumulation_steps=2,
    )
    whole = {**MIXED, "gradient_accumulation_steps": 2}
    both = trained(
        Trainer, TrainingArguments, str(tmp_path), llama, collator=collate, ragged=True, **whole
    )
    for rank, (ran, dropped, replicas, rows) in enumerate(
        run_ranks(in_halves, 2, str(tmp_path), timeout=150)
    ):
        for (make, collator, adds_up), (losses, norms, said, halved) in zip(
            HALVED, ran, strict=True
        ):
            expected = trained(Trainer, TrainingArguments, str(tmp_path), make, collator)
            assert losses == pytest.approx(expected[0], rel=1e-5) and norms == pytest.approx(
                expected[1], rel=1e-4
            )
            assert halved is adds_up and len(said) == (rank == 0 and not adds_up), said
        assert dropped is True, "dropout is no reason to differ"
        assert replicas[0] == pytest.approx(alone[0], rel=1e-5) and replicas[1] == pytest.approx(
            alone[1], rel=1e-4
        )
        assert ["changes by" in text for text in replicas[2]] == [True] * (rank == 0)
        assert rows[0] == pytest.approx(both[0], rel=1e-5) and rows[1] == pytest.approx(
            both[1], rel=1e-4
        )
        assert rows[2]
