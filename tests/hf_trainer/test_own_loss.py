"""Losses of a script: what a captured one could not repeat is refused by name. That the rest gives
what it gives in transformers is shown side by side."""

import collections
import dataclasses
import itertools
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.surroundings import Picture, surroundings
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import withhold
from tests.hf_trainer.cases import even, pad
from tests.hf_trainer.losses import Regressor, derived, focal, twice
from tests.hf_trainer.stand_in import tiny_llama

ROOT = Path(__file__).parents[2]
RUN = {
    "use_cpu": True,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "disable_tqdm": True,
    "report_to": "none",
}
RUN |= {
    "save_strategy": "no",
    "logging_steps": 1,
    "gradient_accumulation_steps": 2,
    "adam_epsilon": 1e-4,
    "seed": 3,
}


def build(
    directory,
    kind=MerakTrainer,
    compute=None,
    model=None,
    callbacks=(),
    function=None,
    collate=pad,
    **changes,
):
    arguments = TrainingArguments if kind is Trainer else MerakArguments
    kind = kind if compute is None else derived(compute)(kind)
    model = tiny_llama() if model is None else model
    given = {"compute_loss_func": function, "callbacks": list(callbacks)}
    return kind(
        model,
        arguments(str(directory), **RUN, **changes),
        collate,
        even(16, 1),
        even(4, 2),
        **given,
    )


def curve(trainer):
    trainer.train()
    numbers = ("loss", "grad_norm", "eval_loss")
    return [entry[name] for entry in trainer.state.log_history for name in numbers if name in entry]


def own(outputs):
    return outputs.loss * 2


def reads_state(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return own(model(**inputs)) * trainer.state.global_step


def logs(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = own(model(**inputs))
    trainer.log({"twice": loss.detach()})
    return loss


def counts(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    trainer.calls = getattr(trainer, "calls", 0) + 1
    return own(model(**inputs))


def collects(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = own(model(**inputs))
    LOSSES.append(loss.detach())
    return loss


def branches(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss = own(model(**inputs))
    return loss if loss > 1 else loss * 2


def another_model(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return own(model(**inputs)) + OTHER(input_ids=inputs["input_ids"]).logits.mean()


def per_token(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return model(**inputs).logits.mean(-1)


def a_number(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return 1.0


def without_items(trainer, model, inputs, return_outputs=False):
    return own(model(**inputs))


def counts_on(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    return own(model(**inputs)) / next(COUNTER)


def remembers(trainer, model, inputs, return_outputs=False, num_items_in_batch=None, calls=[0]):  # noqa: B006
    calls[0] += 1
    return own(model(**inputs)) * calls[0]


def recent(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    RECENT.append(1)
    return own(model(**inputs)) * len(RECENT)


LOSSES, OTHER, COUNTER, RECENT = [], tiny_llama(), itertools.count(1), collections.deque(maxlen=5)
REFUSED = {
    reads_state: r"Own.compute_loss \(trainer.state\): it reads or calls trainer.state.*entry that the loss reads",
    logs: r"trainer.(callback_handler|log)\): it reads or calls",
    counts: r"\(trainer.calls\): it changes trainer.calls",
    collects: r"\(LOSSES\): it changes LOSSES",
    counts_on: r"it changes COUNTER",
    remembers: r"it changes default of remembers",
    recent: r"it changes RECENT",
    branches: r"test_own_loss.py:\d+ in branches: return loss if loss > 1",
    another_model: r"\(LlamaForCausalLM\): the loss calls it, and only trainer.model is captured.*model.teacher",
    per_token: r"its loss has the shape \(2, 8\)",
    a_number: r"it returned a float. Return a tensor",
    without_items: r"unexpected keyword argument 'num_items_in_batch'",
}


@pytest.mark.parametrize("compute", REFUSED, ids=lambda compute: compute.__name__)
def test_a_loss_that_could_not_be_repeated_is_refused(tmp_path, compute):
    with pytest.raises(TraceError, match=REFUSED[compute]):
        build(tmp_path, compute=compute).train()


KEPT = []


def keeps(outputs, labels, num_items_in_batch=None):
    if not KEPT:
        KEPT.append(torch.ones(()))
    return focal(outputs, labels, num_items_in_batch) * KEPT[0]


def test_a_refused_loss_stays_so_in_a_capture_that_is_tried_again(tmp_path):
    """Without its mask, and then with it, when ``KEPT`` has what the first capture put there."""
    with pytest.raises(TraceError, match="it changes KEPT"):
        build(tmp_path, function=keeps).train()


class Scale:
    """What a script keeps beside its trainer."""

    power = None

    def factor(self):
        return self.gain() if self.power is None else self.gain() ** self.power

    @staticmethod
    def gain():
        return GAIN[0]


class Settings:
    offset = 0.0


def weighed(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    loss = (
        outputs.loss * trainer.share
        + FACTORS["loss"]
        + helped()
        + torch.tensor(trainer.scales).sum()
    )
    loss = (
        loss
        * getattr(trainer.args, "alpha", 1)
        * getattr(model.config, "beta", 1)
        * trainer.args.adam_beta1
    )
    loss = loss * SCALE.factor() * (1 + trainer.first_tokens) + Settings.offset
    return (loss, outputs) if return_outputs else loss


def helped():
    return HELPED[0]


FACTORS, HELPED, GAIN, SCALE = {"loss": 0.0}, [0.0], [1.0], Scale()


class Changes(TrainerCallback):
    """Changes something after the first step."""

    def __init__(self, change):
        self.change, self.trainer = change, None

    def on_step_end(self, args, state, control, **kwargs):
        self.change(self.trainer)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda trainer: setattr(trainer, "share", 0.5),
            r"\(trainer.share\): it has changed since",
        ),
        (lambda trainer: FACTORS.update(loss=FACTORS["loss"] + 1), r"\(FACTORS\): it has changed"),
        (
            lambda trainer: setattr(trainer, "compute_loss_func", focal),
            r"\(compute_loss_func\): it has changed",
        ),
        (lambda trainer: HELPED.append(HELPED.pop() + 1), r"\(HELPED\): it has changed"),
        (
            lambda trainer: setattr(type(trainer), "scales", (2.0,)),
            r"\(Own.scales\): it has changed",
        ),
        (
            lambda trainer: setattr(trainer.model.config, "beta", 2),
            r"\(model.config.beta\): it has changed",
        ),
        (
            lambda trainer: setattr(trainer, "first_tokens", 5),
            r"\(trainer.first_tokens\): it has changed",
        ),
        (lambda trainer: GAIN.append(GAIN.pop() + 1), r"\(GAIN\): it has changed"),
        (lambda trainer: setattr(Scale, "power", 2), r"\(Scale.power\): it has changed"),
        (lambda trainer: setattr(Settings, "offset", 2.0), r"\(Settings.offset\): it has changed"),
        (lambda trainer: setattr(trainer.args, "alpha", 2), r"\(args.alpha\): it has changed"),
        (lambda trainer: setattr(trainer, "unread", 5), None),
    ],
)
def test_what_a_captured_loss_has_read_stays(tmp_path, change, told):
    trainer = build(tmp_path, compute=weighed, callbacks=[Changes(change)])
    trainer.callback_handler.callbacks[-2].trainer = trainer
    trainer.share, type(trainer).scales, trainer.model.config.beta = 2.0, (1.0,), 1
    if told is None:
        trainer.train()
        return
    with pytest.raises(ConfigError, match=told):
        trainer.train()


def test_what_functions_of_modules_and_objects_read():
    helpers = ModuleType("helpers")
    exec("FACTOR, OTHER = 2.0, 3.0\ndef scale(x): return x * FACTOR", vars(helpers))

    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = 1.0

        def forward(self, x):
            return helpers.scale(x) * self.gamma

    criterion = Criterion()

    def loss(outputs, batch):
        return criterion(outputs) * getattr(batch, "beta", 1)

    holder = SimpleNamespace(other=1)
    read = surroundings((loss,), {"args": holder})
    assert read.values["FACTOR"] == 2.0 and "OTHER" not in read.values
    assert read.values["args.beta"] == "(absent)" and "args.other" not in read.values
    before = Picture().of(criterion)
    assert Picture().of(criterion) == before
    criterion.eval()
    assert Picture().of(criterion) == before
    criterion.gamma = 2.0
    assert Picture().of(criterion) != before
    slotted = dataclasses.make_dataclass("Slotted", ["size"], slots=True)(1)
    before = Picture().of(slotted)
    slotted.size = 2
    assert Picture().of(slotted) != before
    holder.beta = 5.0
    assert surroundings((loss,), {"args": holder}).values["args.beta"] == 5.0


class Held:
    """Can be held weakly, as a class with slots of ``attrs`` can."""

    __slots__ = ("__weakref__", "size")


def test_what_others_do_is_no_change():
    def loss(outputs, batch):
        return outputs * (2 if os.getenv("TWICE") else 1)

    assert "environ" not in surroundings((loss,), {}).values
    model = tiny_llama()
    assert any(parameter._version for parameter in model.parameters())
    before = Picture().of(model)
    withhold(model, 2)
    assert Picture().of(model) == before
    held = Held()
    before = Picture().of(held)
    weak = weakref.ref(held)
    assert Picture().of(held) == before and weak() is held


def hidden_from_masks(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Without a mask another loss: so a mask that masks nothing is not left out."""
    outputs = model(**inputs)
    loss = outputs.loss if inputs.get("attention_mask") is not None else outputs.loss * 3
    return (loss, outputs) if return_outputs else loss


def mean_of_micro_batches(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    logits = model(input_ids=inputs["input_ids"])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def counts_entries(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    return (outputs.loss * len(inputs), outputs) if return_outputs else outputs.loss * len(inputs)


def in_fp32(outputs, labels, num_items_in_batch=None):
    """As mixed precision of transformers hands outputs to a loss."""
    assert outputs["logits"].dtype == torch.float32
    weights = torch.linspace(0.5, 1.5, outputs["logits"].shape[-1])
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), weight=weights)


def told(outputs, labels, num_items_in_batch=None):
    print("shape", outputs["logits"].shape, file=sys.stderr)
    return focal(outputs, labels, num_items_in_batch)


def without_gradients(outputs, labels, num_items_in_batch=None):
    return focal(outputs, labels, num_items_in_batch) * (1 if torch.is_grad_enabled() else 3)


SAME = {
    "a mask that is looked for": {"compute": hidden_from_masks},
    "a mask that is counted": {"compute": counts_entries},
    "mixed precision": {"function": in_fp32, "bf16": True},
    "gradients only in training": {
        "function": without_gradients,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "what is printed": {"function": told},
    "a plain module": {
        "model": Regressor,
        "function": focal,
        "label_names": ["labels"],
        "collate": None,
    },
    "means": {
        "model": Regressor,
        "compute": mean_of_micro_batches,
        "label_names": ["labels"],
        "collate": None,
    },
}


@pytest.mark.parametrize("name", SAME)
def test_a_script_gives_what_it_gives_in_transformers(tmp_path, name):
    curves = []
    for kind in (Trainer, MerakTrainer):
        given = dict(SAME[name])
        torch.manual_seed(0)
        model = given.pop("model", tiny_llama)()
        assert isinstance(model, nn.Module)
        curves.append(curve(build(tmp_path, kind, model=model, **given)))
    tolerance = 2e-3 if name == "mixed precision" else 1e-5
    torch.testing.assert_close(
        torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=tolerance, atol=1e-6
    )


def test_loss_is_scaled_for_ga_says_how_micro_batches_add_up(tmp_path):
    """As a mean, the loss of two micro-batches is half of what it is as a sum."""
    found = {}
    for scaled in (False, True, None):
        trainer = build(tmp_path, compute=twice)
        trainer.loss_is_scaled_for_ga = scaled
        found[scaled] = curve(trainer)[0]
    assert found[True] == found[None] == pytest.approx(2 * found[False], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_gives_the_same_losses_on_a_pipeline(tmp_path):
    found = []
    for ranks in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "examples/distill.py",
        ]
        changes = ["--output_dir", str(tmp_path), "--max_steps", "8", "--disable_tqdm", "true"]
        layout = ["--pipeline_model_parallel_size", str(ranks)]
        done = subprocess.run(
            [*command, *changes, *layout], cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.append(re.findall(r"(pupil|teacher) += +([\d.]+)", done.stdout))
    assert len(found[0]) == 2 and found[0] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_of_classification_tells_what_it_says_and_does_so_on_two_ranks(tmp_path):
    def told(ranks, *changes):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        more = [
            "examples/classification.py",
            "--output_dir",
            str(tmp_path),
            "--disable_tqdm",
            "true",
            *changes,
        ]
        done = subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True, check=True
        )
        scores = re.findall(
            r"(?:cross_entropy|focal)_(?:accuracy|recall) += +([\d.]+)", done.stdout
        )
        losses = re.findall(r"'(?:loss|eval_loss|grad_norm)': '([\d.]+)'", done.stdout)
        return [float(score) for score in scores], [float(loss) for loss in losses]

    page = (ROOT / "examples" / "classification.py").read_text()
    wanted = [float(score) for score in re.findall(r" = (\d\.\d{4})", page)]
    scores, losses = told(1)
    assert len(wanted) == 4 and scores == pytest.approx(wanted, abs=0.03)
    # the model's own loss at the first and at the eighth twentieth step
    assert losses[0] > 1.5 * losses[14]
    few = ["--max_steps", "8", "--logging_steps", "2"]
    one = told(1, *few)
    for layout in (["--tensor_model_parallel_size", "2"], ["--pipeline_model_parallel_size", "2"]):
        scores, losses = told(2, *few, *layout)
        assert scores == pytest.approx(one[0], abs=2e-3)
        assert losses == pytest.approx(one[1], rel=1e-3) and len(losses) == 18
