"""docs/trainer.md says of every name of the installed transformers how it stands here."""

import inspect

import pytest
from transformers import Trainer, TrainingArguments

from megatron_merak.hf_trainer import overrides
from megatron_merak.hf_trainer.arguments import fields as of_fields
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from tests.hf_trainer.stand_in import EagerTrainer, collate, tiny_llama
from tools import trainer_table

LACKING = of_fields.NEWER - TrainingArguments.__dataclass_fields__.keys()
LATER = {  # of other releases of transformers 5
    "current_gradient_accumulation_steps",
    "optimizer_step",
    "end",
    "is_distributed_loading_by_transformers",
    "loss_is_scaled_for_ga",
    "_defer_fsdp_gradient_reduction",
    "_sync_replicated_trainable_parameters",
}


@pytest.mark.skipif(bool(LACKING), reason="the document is of a newer release of transformers")
def test_the_document_is_what_the_tool_writes():
    assert trainer_table.DOCUMENT.read_text() == trainer_table.document(), (
        "run tools/trainer_table.py --write"
    )


def test_every_refusal_has_its_own_reason():
    """A release of transformers that brings a name fails here, until the name is served or refused
    by reason.
    """
    plain = f"{overrides.OTHER.why}."
    found = [
        name
        for name, _, told in trainer_table.trainer_rows() + trainer_table.argument_rows()
        if plain in told
    ]
    assert found == []
    private = {name for name in dir(Trainer) if name.startswith("_") and not name.startswith("__")}
    assert (
        sorted(name for name in private if name not in overrides.REFUSED and not _served(name))
        == []
    )


def test_the_tables_name_nothing_that_transformers_has_not():
    known = {
        *dir(Trainer),
        *trainer_table.attributes(Trainer),
        *inspect.signature(Trainer.__init__).parameters,
    }
    assert {*overrides.REFUSED, *overrides.DIFFERENT} - known <= LATER
    fields = {*TrainingArguments.__dataclass_fields__} | LACKING
    assert {*of_fields.REFUSED, *of_fields.HONOURED, *of_fields.DIFFERENT} <= fields
    assert not {*of_fields.REFUSED} & {*of_fields.HONOURED}
    assert not {*overrides.REFUSED} & {*overrides.DIFFERENT}


def test_what_is_the_same_is_there(tmp_path):
    trainer = EagerTrainer(tiny_llama(), MerakArguments(str(tmp_path), use_cpu=True), collate)
    parameters = inspect.signature(EagerTrainer.__init__).parameters
    for name, how, _ in trainer_table.trainer_rows():
        assert (how == "refused") != (
            hasattr(trainer, name) or name in ("callbacks", "optimizers")
        ), name
        if callable(theirs := inspect.getattr_static(Trainer, name, None)) and how != "refused":
            ours = [*inspect.signature(getattr(EagerTrainer, name)).parameters]
            assert ours == [*inspect.signature(theirs).parameters], name
    assert [*parameters] == [*inspect.signature(Trainer.__init__).parameters]


def _served(name):
    return not isinstance(inspect.getattr_static(EagerTrainer, name), overrides.Refused)
