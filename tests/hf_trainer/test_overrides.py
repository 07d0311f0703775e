"""What subclasses and callbacks may change: with the effect that it has in transformers.Trainer, or
refused.
"""

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import ConfigError, DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.ranks import RankFailure, run_ranks

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "disable_tqdm": True,
        "seed": 3,
    },
    **{
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "report_to": "none",
    },
}
LOGGED = ("loss", "learning_rate", "grad_norm")


def trained(kind, directory, methods=None, callbacks=(), **changes):
    """(logs, trainer) of a short run; ``methods``: what a subclass of ``kind`` overrides."""
    arguments = TrainingArguments if kind is Trainer else MerakArguments
    unpadded = {} if kind is Trainer else {"length_buckets": "none"}
    args = arguments(str(directory), **RUN | unpadded | changes)
    kind = type("Mine", (kind,), methods or {})
    trainer = kind(
        tiny_llama(), args, collate, samples(18), samples(5, seed=7), callbacks=list(callbacks)
    )
    trainer.train()
    return [
        [entry[k] for k in LOGGED] for entry in trainer.state.log_history if "loss" in entry
    ], trainer


def assert_alike(directory, methods=None, callbacks=tuple, kind=MerakTrainer, **changes):
    """Both trainers' logs agree, and the overrides or callbacks did something."""
    theirs, _ = trained(Trainer, directory / "theirs", methods, callbacks(), **changes)
    ours, trainer = trained(kind, directory / "ours", methods, callbacks(), **changes)
    plain, _ = trained(Trainer, directory / "plain", **changes)
    np.testing.assert_allclose(ours, theirs, rtol=3e-5)
    assert abs(np.array(plain)[:, 0] - np.array(theirs)[:, 0]).max() > 1e-3, (
        "it changes nothing in transformers either"
    )
    return trainer


class Rates(TrainerCallback):
    """Sets rates of single groups, before a step, within one and after one."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 1:
            optimizer.param_groups[0]["lr"] *= 3

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 2:
            optimizer.param_groups[1]["lr"] = 0.05

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["weight_decay"] *= 2
        optimizer.param_groups[1]["weight_decay"] = 5.0


def test_callbacks_set_learning_rates_and_weight_decay(tmp_path):
    assert_alike(tmp_path, callbacks=lambda: [Rates()])


def test_weight_decay_goes_to_the_parameters_that_are_named(tmp_path):
    def names(self, model):
        return [name for name, _ in model.named_parameters() if "norm" in name]

    assert_alike(tmp_path, {"get_decay_parameter_names": names}, weight_decay=5.0)


def test_a_schedule_of_a_subclass_moves_the_rate(tmp_path):
    def create(self, num_training_steps, optimizer=None):
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = LambdaLR(optimizer, [lambda k: 1 + k, lambda k: 1 / (1 + k)])
        return self.lr_scheduler

    assert_alike(tmp_path, {"create_scheduler": create})


class Backwards(Sampler):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.arange(self.count).roll(self.epoch).flip(0))


SAMPLERS = {
    "epochs": lambda data: Backwards(len(data)),
    "fewer": lambda data: Backwards(7),
    "random": lambda data: RandomSampler(data, replacement=True, num_samples=9),
    "own": lambda data: SubsetRandomSampler(range(3, 12), torch.Generator().manual_seed(5)),
    "none": lambda data: None,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_come_in_the_order_of_a_subclass(tmp_path, name):
    methods = {
        "_get_train_sampler": lambda self, train_dataset=None: SAMPLERS[name](self.train_dataset)
    }
    assert_alike(tmp_path, methods, kind=EagerTrainer)


def test_an_evaluation_is_in_the_order_of_a_subclass(tmp_path):
    methods = {"_get_eval_sampler": lambda self, eval_dataset: Backwards(len(eval_dataset) - 1)}
    theirs = trained(Trainer, tmp_path / "theirs", methods)[1].predict(samples(5, ragged=False))
    ours = trained(EagerTrainer, tmp_path / "ours", methods)[1].predict(samples(5, ragged=False))
    assert np.array_equal(ours.label_ids, theirs.label_ids) and len(ours.label_ids) == 4
    np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-4, atol=1e-6)


def test_a_sampler_may_ask_this_librarys_own(tmp_path):
    def reversed_order(self, train_dataset=None):
        own = MerakTrainer._get_train_sampler(self, train_dataset)
        return [*own][::-1]

    trainer = trained(EagerTrainer, tmp_path, {"_get_train_sampler": reversed_order})[1]
    assert trainer.engine.seen[0][0] != trained(EagerTrainer, tmp_path)[1].engine.seen[0][0]


def _own_order(rank, world, directory):
    methods = {
        "_get_train_sampler": lambda self, train_dataset=None: np.random.RandomState(
            rank
        ).permutation(18)
    }
    trained(EagerTrainer, directory, methods)


def _own_rates(rank, world, directory):
    class Mine(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            if rank == 1:
                optimizer.param_groups[0]["lr"] = 1.0

    trained(EagerTrainer, directory, callbacks=[Mine()])


@pytest.mark.parametrize(
    ("act", "told"), [(_own_order, "a different order"), (_own_rates, "rates")]
)
def test_ranks_that_differ_are_told(tmp_path, act, told):
    with pytest.raises(RankFailure, match=told) as failure:
        run_ranks(act, 2, str(tmp_path))
    assert isinstance(failure.value.__cause__, ConfigError | DataError)


class Batched(Sampler):
    def __iter__(self):
        return iter([[0, 1], [2, 3]])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (Batched(), "items other than sample indices"),
        (iter([1, 2]), "no length"),
        (type("S", (Backwards,), {"__len__": lambda s: 3})(8), "its length is 3"),
    ],
)
def test_samplers_that_cannot_be_divided_are_refused(tmp_path, sampler, told):
    with pytest.raises(DataError, match=told):
        trained(
            EagerTrainer, tmp_path, {"_get_train_sampler": lambda self, train_dataset=None: sampler}
        )


@pytest.mark.parametrize(
    "method",
    [
        "create_optimizer_and_scheduler",
        "get_train_dataloader",
        "get_batch_samples",
        "_prepare_inputs",
        "training_step",
        "_save",
        "_set_signature_columns_if_needed",
        "evaluation_loop",
        "floating_point_ops",
    ],
)
def test_an_override_that_would_never_be_called_is_refused(tmp_path, method):
    class Mixed:
        pass

    setattr(Mixed, method, lambda self, *_, **__: None)
    with pytest.raises(ConfigError, match=f"Mixed.{method}.*no effect"):
        type("Mine", (Mixed, EagerTrainer), {})(
            tiny_llama(), MerakArguments(str(tmp_path), use_cpu=True)
        )


def test_every_name_of_transformers_is_served_or_refused():
    for name in dir(Trainer):
        assert hasattr(MerakTrainer, name), name
    with pytest.raises(ConfigError, match="Derive it from MerakTrainer"):
        type("Both", (MerakTrainer, Trainer), {})(tiny_llama())


def test_a_subclass_may_have_names_of_its_own(tmp_path):
    def warn(self, number, words):
        raise AssertionError("it is the script's")

    own = {"say": warn, "warn": warn, "saving": 3, "ranks": ()}
    _, trainer = trained(MerakTrainer, tmp_path, own, max_steps=1, save_strategy="steps")
    trainer.save_model(str(tmp_path / "last"))
    assert [trainer.saving, trainer.ranks] == [3, ()]


def test_what_only_transformers_has_is_neither_set_nor_read(tmp_path):
    trainer = EagerTrainer(tiny_llama(), MerakArguments(str(tmp_path), use_cpu=True), collate)
    for name in ("compute_loss_context_manager", "label_names", "optimizer", "lr_scheduler"):
        with pytest.raises(ConfigError, match=name):
            setattr(trainer, name, None)
    assert not hasattr(trainer, "accelerator")
    with pytest.raises(AttributeError, match="Use trainer.args"):
        trainer.accelerator  # noqa: B018
    assert trainer.optimizer is None and trainer.lr_scheduler is None


def test_a_collator_set_later_makes_the_batches(tmp_path):
    trainer = EagerTrainer(tiny_llama(), MerakArguments(str(tmp_path), **RUN), None, samples(8))
    trainer.data_collator = lambda rows: collate(
        [{k: v[:5] for k, v in row.items()} for row in rows]
    )
    trainer.train()
    assert {shape[1] for shape in trainer.engine.shapes} == {8}  # 5 in a bucket


def betas(optimizer, model):
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)


def members(optimizer, model):
    optimizer.param_groups[1]["params"] = []


def removed(optimizer, model):
    optimizer.param_groups[1]["params"].pop()


def negative(optimizer, model):
    optimizer.param_groups[1]["lr"] = -1.0


def more(optimizer, model):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def stepped(optimizer, model):
    optimizer.step()


def zeroed(optimizer, model):
    optimizer.zero_grad()


def moments(optimizer, model):
    optimizer.state[model.lm_head.weight]["exp_avg"].zero_()


def loaded(optimizer, model):
    optimizer.load_state_dict({})


CHANGES = (betas, members, removed, negative, more, stepped, zeroed, moments, loaded)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_changes_of_the_optimizer_are_refused(tmp_path, change):
    class Mine(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, model=None, **kwargs):
            change(optimizer, model)

    with pytest.raises(ConfigError, match="optimizer|requires_grad|lm_head"):
        trained(EagerTrainer, tmp_path, callbacks=[Mine()])


def test_a_schedule_that_moves_betas_is_refused(tmp_path):
    def cycle(self, num_training_steps, optimizer=None):
        return OneCycleLR(self.optimizer, 0.1, total_steps=num_training_steps)

    with pytest.raises(ConfigError, match="betas"):
        trained(EagerTrainer, tmp_path, {"create_scheduler": cycle})


def test_groups_are_those_of_transformers(tmp_path):
    ours, theirs = (trained(kind, tmp_path)[1] for kind in (EagerTrainer, Trainer))
    for mine, other in zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True):
        assert [p.shape for p in mine["params"]] == [p.shape for p in other["params"]]
        assert {
            k: other[k] for k in ("lr", "weight_decay", "betas", "eps", "initial_lr")
        }.items() <= mine.items()
    assert (
        ours.get_learning_rates() == theirs.get_learning_rates()
        and len(ours.get_optimizer_group()) == 2
    )
    assert ours.get_num_trainable_parameters() == theirs.get_num_trainable_parameters()
    assert ours.lr_scheduler.state_dict() == theirs.lr_scheduler.state_dict()


def test_a_second_training_goes_on_as_in_transformers(tmp_path):
    found = []
    for kind in (Trainer, EagerTrainer):
        trainer = trained(kind, tmp_path)[1]
        trainer.optimizer.param_groups[0]["weight_decay"] = 2.0
        trainer.train()
        found.append(
            [[entry[k] for k in LOGGED] for entry in trainer.state.log_history if "loss" in entry]
        )
    np.testing.assert_allclose(found[1], found[0], rtol=3e-5)


def test_arguments_that_are_changed_too_late_are_refused(tmp_path):
    args = MerakArguments(str(tmp_path / "a"), **RUN)
    args.neftune_noise_alpha = 0.1
    with pytest.raises(ConfigError, match="neftune_noise_alpha 0.1: the padding of batches"):
        MerakTrainer(tiny_llama(), args, collate)
    trainer = trained(MerakTrainer, tmp_path)[1]
    trainer.args.max_grad_norm = 0.5
    with pytest.raises(ConfigError, match="clip_grad 0.5: the model was captured with 1.0"):
        trainer.train()


class Watches(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]


def test_a_callback_that_looks_at_gradients_is_refused(tmp_path):
    for given in (Watches, Watches()):
        with pytest.raises(ConfigError, match="Watches.on_pre_optimizer_step .*reads .grad"):
            trained(EagerTrainer, tmp_path, callbacks=[given])
    with pytest.raises(ConfigError, match="reads .grad"):
        EagerTrainer(
            tiny_llama(), MerakArguments(str(tmp_path), use_cpu=True), collate
        ).add_callback(Watches)
