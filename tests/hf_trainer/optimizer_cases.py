"""Short runs with every optimizer, through transformers.Trainer and through MerakTrainer."""

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor, Trainer, TrainingArguments

from megatron_merak.hf_trainer.arguments.optimizers import muon
from megatron_merak.optimizer.lion import Lion
from tests.hf_trainer.stand_in import collate, samples, tiny_llama

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "seed": 3,
    },
    **{
        "disable_tqdm": True,
        "report_to": "none",
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
    },
    **{"save_steps": 3, "warmup_steps": 2},
}


class Signs(torch.optim.Optimizer):
    """A script's own: the sign of a momentum which it makes anew in every step."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("slow", torch.zeros_like(p))
                    self.state[p]["slow"] = group["beta"] * before + p.grad
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(
                        self.state[p]["slow"].sign(),
                        alpha=group["lr"] / self.state[p]["count"] ** 0.5,
                    )


class Lengths(torch.optim.Optimizer):
    """A script's own, of whole parameters: updates are as long as the weights, as in LARS."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad + group["weight_decay"] * p
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(update, 0.1)
                    self.state[p]["rows"] = (
                        mean.square().sum(-1) if p.dim() > 1 else mean.square().sum()
                    )
                    p.sub_(mean * (p.norm() / mean.norm()), alpha=group["lr"])


def in_groups(kind, **options):
    """Three groups of a script's own, one of which has another rate, and its own schedule."""

    def given(model):
        named = [*model.named_parameters()]
        layers = [p for name, p in named if "layers" in name and p.dim() > 1]
        vectors = [p for name, p in named if p.dim() < 2]
        outer = [p for name, p in named if p.dim() > 1 and "layers" not in name]
        groups = [{"params": layers}, {"params": vectors, "lr": 3e-3}, {"params": outer}]
        optimizer = kind(groups, lr=1e-2, **options)
        return {
            "optimizers": (
                optimizer,
                LambdaLR(optimizer, [lambda k: 1 / (1 + k)] * 2 + [lambda k: 1.0]),
            )
        }

    return given


def of_class(kind, **options):
    return lambda model: {"optimizer_cls_and_kwargs": (kind, options)}


def muon_of(model):
    """For transformers, which has no such name."""
    return {
        "optimizer_cls_and_kwargs": (
            lambda: muon,
            {"lr": 1e-2, "weight_decay": 0.1, "nesterov": False},
        )
    }


def some(model):
    """A script that leaves out embeddings and head."""
    return {
        "optimizers": (
            torch.optim.AdamW(model.model.layers.parameters(), lr=1e-2, weight_decay=0.3),
            None,
        )
    }


# name -> (arguments, what is given beside them, by the model; for MerakTrainer where it differs)
CASES = {
    "adamw_torch": ({"optim": "adamw_torch"}, None),
    "adamw_torch_fused": ({"optim": "adamw_torch_fused"}, None),
    "sgd": ({"optim": "sgd"}, None),
    "momentum": ({"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"}, None),
    "adagrad": ({"optim": "adagrad", "optim_args": "lr_decay=0.01,eps=1e-6"}, None),
    "rmsprop": ({"optim": "rmsprop", "optim_args": "momentum=0.5,alpha=0.9"}, None),
    "adafactor": ({"optim": "adafactor"}, None),
    "adafactor with momentum": (
        {},
        of_class(Adafactor, lr=1e-2, scale_parameter=True, relative_step=False, beta1=0.9),
    ),
    "torch's adafactor": ({}, of_class(torch.optim.Adafactor, lr=1e-2)),
    "adam": ({}, of_class(torch.optim.Adam, lr=1e-2, amsgrad=True)),
    "nadam": ({}, of_class(torch.optim.NAdam, lr=1e-2, decoupled_weight_decay=True)),
    "radam": ({}, of_class(torch.optim.RAdam, lr=1e-2)),
    "adamax": ({}, of_class(torch.optim.Adamax, lr=1e-2)),
    "adadelta": ({}, of_class(torch.optim.Adadelta, lr=1.0)),
    "asgd": ({}, of_class(torch.optim.ASGD, lr=1e-2, t0=2)),
    "rprop": ({}, of_class(torch.optim.Rprop, lr=1e-3)),
    "lion": ({}, of_class(Lion, lr=1e-3, betas=(0.9, 0.999))),
    "muon": ({}, muon_of),
    "own groups": ({}, in_groups(torch.optim.SGD, momentum=0.9, weight_decay=0.05)),
    "own adamw": ({}, in_groups(torch.optim.AdamW, betas=(0.8, 0.9))),
    "signs": ({}, in_groups(Signs)),
    "lengths": ({}, of_class(Lengths, lr=1e-2)),
    "some": ({}, some),
}
OURS = {  # by names that transformers does not have, or only with bitsandbytes
    "lion": {"optim": "lion_32bit", "learning_rate": 1e-3},
    "muon": {"optim": "muon", "optim_args": "nesterov=false"},
}
THEIRS = {"lion": {"learning_rate": 1e-3}}


def run(kind, arguments, name, directory, changes, resume=None, model=tiny_llama):
    """Losses, gradient norms, rates, and the weights that were saved."""
    settings, given = CASES[name]
    own = kind is not Trainer and name in OURS
    settings = {**RUN, **settings, **(OURS[name] if own else THEIRS.get(name, {})), **changes}
    trained = model()
    more = {} if given is None or own else given(trained)
    trainer = kind(
        trained, arguments(str(directory), **settings), collate, samples(24, ragged=False), **more
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{directory}/last")
    return trainer, [
        [entry[key] for key in ("loss", "grad_norm", "learning_rate")]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def expected(name, directory):
    """What transformers does."""
    return run(
        Trainer,
        TrainingArguments,
        name,
        directory,
        {"per_device_train_batch_size": 4, "save_strategy": "no"},
    )[1]


def moved(weights):
    """How far weights went from where they began: [n]."""
    begun = dict(tiny_llama().state_dict())
    return torch.cat([(value - begun[name]).flatten() for name, value in sorted(weights.items())])
