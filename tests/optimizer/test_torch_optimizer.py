"""Optimizers of torch on shards of parameters: bit for bit what they do in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Adafactor

from megatron_merak.config import OptimizerConfig
from megatron_merak.errors import ConfigError
from megatron_merak.optimizer.chained import Chained
from megatron_merak.optimizer.lion import Lion
from megatron_merak.optimizer.recipe import Recipe
from megatron_merak.optimizer.torch_optimizer import TorchOptimizer, check_layout
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer, ShardedState
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.scattered import own_span
from megatron_merak.plan import Grid, TensorSharding
from tests.hf_trainer.optimizer_cases import Lengths, Signs
from tests.ranks import run_ranks

LR, STEPS = 0.02, 4
TENSORS = (
    TensorSharding("rows", (8, 5), 0),
    TensorSharding("fused", (12, 3), 0, blocks=3),
    TensorSharding("columns", (4, 6), 1),
    TensorSharding("padded", (5, 4), 0, padded=6),
    TensorSharding("same", (7, 9)),
    TensorSharding("bias", (6,), 0),
    TensorSharding("norm", (70,)),
)
# Parameters that are frozen in a step, after other ones; "columns" has no state when a checkpoint
# is loaded.
FROZEN = (
    ("columns", "norm"),
    ("columns", "rows"),
    ("columns", "same", "padded"),
    ("rows", "fused"),
)


def parameters():
    drawn = torch.Generator().manual_seed(1)
    return {
        tensor.name: nn.Parameter(torch.randn(tensor.shape, generator=drawn)) for tensor in TENSORS
    }


def gradients(step):
    drawn = torch.Generator().manual_seed(2 + step)
    return {tensor.name: torch.randn(tensor.shape, generator=drawn) for tensor in TENSORS}


def muon(named):
    matrices = [p for p in named.values() if p.dim() == 2]
    others = [p for p in named.values() if p.dim() != 2]
    return Chained(
        [torch.optim.Muon(matrices, lr=LR, weight_decay=0.1), torch.optim.AdamW(others, lr=LR)]
    )


def of(kind, **options):
    return lambda named: kind([{"params": [*named.values()], "lr": LR}], lr=LR, **options)


MADE = {
    "muon": muon,
    "adafactor": of(Adafactor, relative_step=False, beta1=0.9, weight_decay=0.1),
    "lengths": of(Lengths, weight_decay=0.1),
    "momentum": of(torch.optim.SGD, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "adagrad": of(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "nadam": of(torch.optim.NAdam),
    "lion": of(Lion, weight_decay=0.1),
    "signs": of(Signs),
}


def alone(name, frozen=FROZEN):
    """What torch does in one process, step by step. frozen: parameters without a gradient, per
    step.
    """
    named = parameters()
    optimizer, found = MADE[name](named), []
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            named[key].grad = None if key in frozen[step] else gradient
        optimizer.step()
        found.append({key: p.detach().clone() for key, p in named.items()})
    return found


def local(tensor, whole, rank, ranks):
    """A rank's part, its padding zero."""
    if tensor.dim is None:
        return whole
    part = torch.cat(
        [whole.narrow(tensor.dim, a, b - a) for a, b in tensor.intervals(rank, ranks)], tensor.dim
    )
    extent = (tensor.padded or tensor.shape[tensor.dim]) // ranks
    missing = [*part.shape]
    missing[tensor.dim] = extent - part.shape[tensor.dim]
    return torch.cat((part, part.new_zeros(missing)), tensor.dim)


def steps(rank, world_size, layout, name):
    """Steps on this rank's shards. Returns None, or the first parameter that is not as in one
    process.
    """
    tp, sharding = LAYOUTS[layout]
    mesh = build_mesh(Grid(tp=tp, dp=world_size // tp), rank, torch.device("cpu"))
    tensors = {each.name: each for each in TENSORS} if tp > 1 else {}
    named = parameters()
    recipe = Recipe(MADE[name](named), named.items(), "cpu")
    cut = {each.name: named[each.name].detach() for each in TENSORS}
    if tp > 1:
        rank = mesh.tp_rank
        cut = {each.name: local(each, cut[each.name], rank, tp) for each in TENSORS}
    entries = [
        BufferEntry(key, tuple(part.shape), recipe.group_of(key)) for key, part in cut.items()
    ]
    shards = (mesh.shard_ranks, mesh.shard_rank, sharding)
    buffer = ParameterBuffer([entries[:3], entries[3:]], torch.float32, "cpu", 40, *shards)
    for buckets in buffer.filling():
        for key in (key for bucket in buckets for key in bucket.names):
            buffer.parameter(key).copy_(cut[key])
    made = TorchOptimizer(buffer, OptimizerConfig(clip_grad=0.0), recipe, mesh, tensors)
    for step, expected in enumerate(alone(name)):
        for key, whole in gradients(step).items():
            mine = local(tensors[key], whole, mesh.tp_rank, tp) if tp > 1 else whole
            low, high = own_span(buffer, key)
            start = buffer.slots[key].start
            for own in buffer.own_grad(key):
                own.copy_(mine.flatten()[low - start : high - start])
        made.freeze(FROZEN[step])
        made.step([(LR, group.options.get("weight_decay", 0.0)) for group in recipe.groups])
        if step == 1:  # as a checkpoint does it
            kept = {
                kind: {k: v.clone() for k, v in state.parts.items()}
                for kind, state in made.state().items()
            }
            others = {
                kind: {k: v.clone() for k, v in tensors.items()}
                for kind, tensors in made.other_state().items()
            }
            missed = made.missed
            made = TorchOptimizer(buffer, OptimizerConfig(clip_grad=0.0), recipe, mesh, tensors)
            made.missed = missed
            for kind, state in made.state().items():
                assert [*state.parts] == [*kept[kind]]
                for key, part in state.parts.items():
                    part.copy_(kept[kind][key])
            for kind, values in made.other_state().items():
                for key, value in values.items():
                    value.copy_(others[kind][key])
            made.steps = 2
        for key, whole in expected.items():
            mine = local(tensors[key], whole, mesh.tp_rank, tp) if tp > 1 else whole
            low, high = own_span(buffer, key)
            start = buffer.slots[key].start
            for (first, last, _), values in zip(buffer.owned, buffer.own_data, strict=True):
                if first <= low < high <= last:
                    if not torch.equal(
                        values[low - first : high - first],
                        mine.flatten()[low - start : high - start],
                    ):
                        return key, step
    dist.barrier()
    return None


LAYOUTS = {
    "tensor": (2, ShardedState.NOTHING),
    "optimizer": (1, ShardedState.OPTIMIZER),
    "gradients": (1, ShardedState.GRADIENTS),
    "parameters": (1, ShardedState.PARAMETERS),
    "both": (2, ShardedState.OPTIMIZER),
}


def all_steps(rank, world_size, layout):
    return {name: steps(rank, world_size, layout, name) for name in MADE}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_stepped_as_torch_steps_whole_parameters(layout):
    for found in run_ranks(all_steps, 4 if layout == "both" else 2, layout):
        assert found == dict.fromkeys(MADE)


@pytest.mark.parametrize("name", ["muon", "momentum"])
def test_16_bit_parameters_are_rounded_from_fp32_ones(name):
    named = parameters()
    made = Recipe(MADE[name](named), named.items(), "cpu")
    entries = [[BufferEntry(key, tuple(p.shape), made.group_of(key)) for key, p in named.items()]]
    buffer = ParameterBuffer(entries, torch.bfloat16, "cpu")
    for key, p in named.items():
        p.data = p.data.bfloat16().float()
        buffer.parameter(key).copy_(p.data)
    ours = TorchOptimizer(
        buffer, OptimizerConfig(clip_grad=1.0), made, build_mesh(Grid(), 0, torch.device("cpu")), {}
    )
    theirs = MADE[name](named)
    for step in range(STEPS):
        for key, gradient in gradients(step).items():
            named[key].grad = gradient.clone()
            buffer.grad(key).copy_(gradient)
        norm = nn.utils.clip_grad_norm_(named.values(), 1.0).item()
        result = ours.step([(LR, group.options["weight_decay"]) for group in made.groups])
        assert result.grad_norm == pytest.approx(norm, rel=1e-6) and norm > 1
        theirs.step()
        for key, p in named.items():
            assert torch.allclose(
                buffer.view(buffer.master, key), p, rtol=0, atol=1e-2 if name == "muon" else 1e-6
            ), key
            assert torch.equal(buffer.parameter(key), buffer.view(buffer.master, key).bfloat16())


def recipe(optimizer, named):
    return Recipe(optimizer, named.items(), "cpu")


def test_what_can_be_cut_is_found_by_trying():
    named = parameters()
    elementwise = {
        name: recipe(MADE[name](named), named).groups[0].traits.elementwise for name in MADE
    }
    assert [name for name, found in elementwise.items() if not found] == [
        "muon",
        "adafactor",
        "lengths",
    ]
    assert recipe(MADE["adafactor"](named), named).other_shaped == [
        "step",
        "RMS",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
    ]


class Random(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p))


class Together(torch.optim.SGD):
    """Clips by the norm of all of its parameters."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Halves(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["small"] = p.grad.bfloat16()


class Drifting(torch.optim.SGD):
    """Moves what has no gradient, such as padding."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad + 1)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (torch.optim.LBFGS, "LBFGS: a step of it fails: .*closure"),
        (torch.optim.SparseAdam, "SparseAdam: a step of it fails"),
        (Random, "Random: its steps are random"),
        (Halves, "Halves: its state 'small' is bfloat16"),
    ],
)
def test_what_cannot_be_divided_is_named(kind, told):
    named = parameters()
    with pytest.raises(ConfigError, match=told):
        recipe(kind([*named.values()], lr=LR), named)


class Flag(torch.optim.SGD):
    """Keeps what it was given where nobody looks for it; ``hidden`` under another name."""

    def __init__(self, params, lr, flag=False, hidden=1):
        super().__init__(params, lr)
        self.flag, self.other = flag, hidden

    def step(self, closure=None):
        super().step()


class Holds(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.inner = [torch.optim.SGD(self.param_groups, lr)]


class Free(torch.optim.SGD):
    def train(self):
        pass

    eval = train


def test_what_another_one_would_not_do_is_named():
    named = parameters()
    mine = [*named.values()]
    assert recipe(Flag(mine, LR, True), named).make({0: mine}).flag
    with pytest.raises(ConfigError, match="Flag: other is 2, and 1 in others of its class"):
        recipe(Flag(mine, LR, hidden=2), named)
    with pytest.raises(
        ConfigError, match=r"Holds: it hands its parameters to other optimizers \(inner\)"
    ):
        recipe(Holds(mine, LR), named)
    with pytest.raises(ConfigError, match=r"Free: it has a train\(\) and an eval\(\)"):
        recipe(Free(mine, LR), named)
    hooked = torch.optim.SGD(mine, LR)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="SGD: it has hooks"):
        recipe(hooked, named)


def test_an_optimizer_of_all_parameters_is_for_ranks_that_have_all():
    named = parameters()
    coupled = recipe(Together([*named.values()], lr=LR), named)
    check_layout(coupled, 1, False)
    for layout in ((2, False), (1, True)):
        with pytest.raises(
            ConfigError, match="Together: its update of a parameter depends on the others"
        ):
            check_layout(coupled, *layout)
    drifting = recipe(Drifting([*named.values()], lr=LR), named)
    assert not drifting.groups[0].traits.elementwise and drifting.groups[0].traits.independent


def test_an_optimizer_in_use_is_refused():
    named = parameters()
    optimizer = MADE["momentum"](named)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ConfigError, match="SGD: it has stepped"):
        recipe(optimizer, named)
    with pytest.raises(ConfigError, match=r"shape \(3,\) in its groups is none of the model's"):
        recipe(torch.optim.SGD([nn.Parameter(torch.zeros(3))]), named)


def test_a_chain_steps_and_is_saved_by_itself():
    named, again = parameters(), parameters()
    wanted, first, second = alone("muon", [()] * STEPS), MADE["muon"](named), MADE["muon"](again)
    for step in range(STEPS):
        if step == 2:
            second.load_state_dict(first.state_dict())
            first = second
            for key, p in again.items():
                p.data.copy_(named[key])
            named = again
        for key, gradient in gradients(step).items():
            named[key].grad = gradient
        first.step()
        assert all(torch.equal(p, wanted[step][key]) for key, p in named.items()), step
