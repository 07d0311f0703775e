"""Parameters without values: what they tell, and what of them raises."""

import copy
import gc
import io
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.errors import ConfigError
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.capture.fake_model import make_fake_model
from megatron_merak.stages.guard import check_weights
from megatron_merak.stages.user_model import take
from megatron_merak.stages.withheld import has_memory, is_withheld, restore, withhold


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.inner.weight = nn.Parameter(torch.randn(4, 4).t())  # other strides
        self.head.bias.requires_grad_(False)
        self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return self.head(self.inner(self.embedding(x)) + self.table)


def withheld(model=None):
    model = Net() if model is None else model
    withhold(model, 2)
    return model


def described(model):
    return [
        (
            name,
            p.shape,
            p.size(),
            p.dtype,
            p.device,
            p.stride(),
            p.is_contiguous(),
            p.numel(),
            p.nbytes,
            p.dim(),
            p.requires_grad,
            p.is_leaf,
            p.grad,
            p.ndim,
            p.element_size(),
            p.is_floating_point(),
            p.type(),
            p.layout,
            p.data.dtype,
            p.data.requires_grad,
            p.detach().shape,
            p.is_cuda,
            p.is_meta,
            p.storage_offset(),
            isinstance(p, nn.Parameter),
        )
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def test_what_a_parameter_is_can_be_asked():
    torch.manual_seed(0)
    model = Net()
    whole, before = copy.deepcopy(model), [*model.parameters()]
    withheld(model)
    assert described(model) == described(whole) and str(model) == str(whole)
    assert all(
        one is other and is_withheld(one)
        for one, other in zip(model.parameters(), before, strict=True)
    )
    assert model.head.weight is model.embedding.weight and torch.equal(model.table, whole.table)
    assert len({*model.parameters()}) == len(before) and len(model.embedding.weight) == 6
    text = f"{model.inner.bias} {model.inner.bias!r}"
    assert (
        text.count("inner.bias: (4,), torch.float32, device='cpu', its values sharded over 2 ranks")
        == 2
    )
    model.eval().train().requires_grad_(False).requires_grad_(True)
    assert model.head.bias.requires_grad and model.to("cpu") is model
    torch.optim.AdamW(model.parameters()).zero_grad()
    made = (
        torch.zeros_like(model.inner.weight),
        model.low.new_ones(2),
        torch.empty_like(model.scalar),
    )
    assert (
        made[0].stride() == (1, 4)
        and made[0].eq(0).all()
        and [type(x) for x in made] == [torch.Tensor] * 3
    )
    assert made[1].dtype == torch.bfloat16 and torch.ones(2).to(model.low).dtype == torch.bfloat16


def test_counts_of_transformers():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )

    def told():
        sizes = (
            model.num_parameters(),
            model.num_parameters(True, True),
            model.get_memory_footprint(),
        )
        return *sizes, model.device, model.dtype, repr(model)

    before = told()
    withheld(model)
    assert told() == before


READS = {
    "clone": lambda p: p.clone(),
    "of data": lambda p: p.data.clone(),
    "of detach": lambda p: p.detach().add(1),
    "an average": lambda p: torch.zeros(4).lerp_(p, 0.5),
    "averages": lambda p: torch._foreach_lerp_([torch.zeros(4)], [p.detach()], 0.5),
    "named argument": lambda p: torch.add(torch.zeros(4), other=p),
    "copy to": lambda p: torch.zeros(4).copy_(p.data),
    "out": lambda p: torch.add(torch.zeros(4), 1, out=p),
    "cat": lambda p: torch.cat([torch.zeros(1), p]),
    "norm": lambda p: p.norm(),
    "item": lambda p: p[0].item(),
    "loop": lambda p: [*p],
    "float": lambda p: float(p.data.sum()),
    "compare": lambda p: p == 1,
    "truth": lambda p: bool(p),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "array": lambda p: np.asarray(p.detach()),
    "on the host": lambda p: p.detach().cpu().float().numpy(),
    "in another dtype": lambda p: p.to(torch.float64).sum(),
    "address": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "typed storage": lambda p: p.storage(),
    "capsule": lambda p: from_dlpack(p.detach()),
    "transposed": lambda p: p.T,
    "view": lambda p: p.view(2, 2),
    "norms": lambda p: nn.utils.get_total_norm([p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: F.linear(torch.ones(4), torch.ones(4, 4), p),
    "file": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "file of data": lambda p: torch.save({"weight": p.data}, io.BytesIO()),
    "pickle": pickle.dumps,
    "a copy": lambda p: copy.deepcopy(p).sum(),
    "shared": lambda p: p.share_memory_(),
    "each element": lambda p: p.data.apply_(lambda x: x),
    "elements of two": lambda p: torch.zeros(4).map_(p.data, lambda x, y: y),
    "no number": lambda p: p.isnan().any(),
    "length": lambda p: p.norm() < 1,
    "equal": lambda p: torch.equal(p, torch.zeros(4)),
}
WRITES = {
    "product": lambda p: p.mul_(2),
    "operator": lambda p: p.__imul__(2),
    "element": lambda p: p.__setitem__(0, 1.0),
    "fill": lambda p: nn.init.zeros_(p),
    "data": lambda p: setattr(p, "data", torch.zeros(4)),
    "of data": lambda p: p.data.copy_(torch.zeros(4)),
    "of detach": lambda p: p.detach().zero_(),
    "several": lambda p: torch._foreach_mul_([p], 2),
}


@pytest.mark.parametrize(
    "use", [*READS.values(), *WRITES.values()], ids=[*READS, *(f"write {k}" for k in WRITES)]
)
def test_values_cannot_be_read_or_written(use):
    parameter = withheld().inner.bias
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"model.inner.bias \(.*trainer.gather_model\(\) on every"),
    ):
        use(parameter)
    assert is_withheld(parameter)


def test_writes_are_told_what_to_do():
    for use in WRITES.values():
        with (
            torch.no_grad(),
            pytest.raises(ConfigError, match="Write weights before the trainer is first used"),
        ):
            use(withheld().inner.bias)


def test_uses_of_the_module():
    model = withheld()
    for use in (
        lambda: model(torch.zeros(1, dtype=torch.int64)),
        lambda: model.inner(torch.ones(4)),
    ):
        with pytest.raises(ConfigError, match=r"model\.(embedding|inner)\.weight"):
            use()
    with pytest.raises(ConfigError, match="pickled"):
        torch.save(model, io.BytesIO())
    with pytest.raises(
        RuntimeError, match=r"model.inner.weight.*copy_.*the trained weights are sharded"
    ):
        model.inner.load_state_dict(nn.Linear(4, 4).state_dict())
    twin = copy.deepcopy(model)
    assert described(twin) == described(model) and twin.head.weight is twin.embedding.weight
    assert not {*map(id, twin.parameters())} & {*map(id, model.parameters())}
    with pytest.raises(ConfigError, match=r"model.low \(sum\)"):
        twin.low.sum()
    with pytest.raises(ConfigError, match=r"model.inner.weight \(clone\)"):
        model.inner.state_dict()["weight"].clone()
    with pytest.raises(ConfigError, match=r"model.low .read.: .* sharded over 2 ranks"):
        check_weights(nn.Sequential(model))
    traced = make_fake_model(model, True, torch.bfloat16)
    assert traced.inner.weight.stride() == (1, 4) and traced.inner.weight.dtype == torch.bfloat16


def test_memory_is_freed_and_comes_back():
    model = Net()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    version = model.inner.weight._version
    storages = [p.untyped_storage()._weak_ref() for p in model.parameters()]
    withheld(model)
    gc.collect()
    assert all(torch.UntypedStorage._expired(storage) for storage in storages)
    assert model.inner.weight._version == version
    assert [*withhold(model, 2)] == [*values]  # once more changes nothing
    before = [*model.parameters()]
    take(model, values)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert all(
        type(p) is nn.Parameter and torch.equal(p, values[name])
        for name, p in model.named_parameters()
    )
    assert pickle.loads(pickle.dumps(model)).inner.bias.equal(values["inner.bias"])
    model(torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert model.inner.weight.grad is not None


def test_whoever_holds_a_parameter_sees_it_withheld_and_restored():
    model = Net()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = model.inner.weight
    held.no_decay = True
    optimizer = torch.optim.SGD([held])
    weak = weakref.ref(held)  # as torch.compile has
    before = model(torch.zeros(1, dtype=torch.int64))  # its backward keeps the weight
    withheld(model)
    assert weak() is held and held.no_decay and before.requires_grad
    with pytest.raises(ConfigError, match=r"model.inner.weight \(norm\)"):
        optimizer.param_groups[0]["params"][0].norm()
    held.requires_grad_(False)
    take(model, values)
    assert (
        weak() is held
        and held.no_decay
        and not held.requires_grad
        and torch.equal(held, values["inner.weight"])
    )


def test_what_is_absent_is_no_attribute():
    parameter = withheld().inner.weight
    assert not hasattr(parameter, "T") and not hasattr(parameter, "mT") and parameter.grad is None


def test_parameters_on_meta():
    model = Net().to("meta")
    before = described(model)
    withheld(model)
    assert described(model) == before and all(map(is_withheld, model.parameters()))
    with pytest.raises(ConfigError, match="gather_model"):
        model.low.sum()
    for parameter in model.parameters():
        restore(parameter, None)
    assert described(model) == before and not any(map(is_withheld, model.parameters()))


def test_moves_are_those_of_the_parameter():
    model = withheld()
    model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64} and all(
        map(is_withheld, model.parameters())
    )
    assert model.inner.weight.stride() == (1, 4)
    model.bfloat16().float()
    assert {p.dtype for p in model.parameters()} == {
        torch.float32
    } and model.head.weight is model.embedding.weight
    with pytest.raises(ConfigError):
        model.to_empty(device="cpu")


def test_parameters_that_never_had_memory():
    with init_empty_weights():
        model = Net()
    kinds = [type(p) for p in model.parameters()]
    withheld(model)
    assert all(
        is_withheld(p) and not has_memory(p) and isinstance(p, nn.Parameter)
        for p in model.parameters()
    )
    for use in (
        lambda p: p.sum(),
        lambda p: torch.zeros(4).lerp_(p.detach(), 0.5),
        lambda p: p.data.float().tolist(),
    ):
        with pytest.raises(ConfigError, match=r"model.inner.bias .*gather_model"):
            use(model.inner.bias)
    twin = copy.deepcopy(model)
    assert all(map(is_withheld, twin.parameters())) and not any(map(has_memory, twin.parameters()))
    for parameter in model.parameters():
        restore(parameter, None)
    assert [type(p) for p in model.parameters()] == kinds


def test_a_worker_process_gets_a_model_that_is_withheld():
    model = withheld()
    # as a DataLoader sends a collator that holds one
    there = pickle.loads(ForkingPickler.dumps(model))
    assert described(there) == described(model) and there.head.weight is there.embedding.weight
    assert torch.equal(there.table, model.table)
    with pytest.raises(ConfigError, match=r"model.low \(sum\)"):
        there.low.sum()
