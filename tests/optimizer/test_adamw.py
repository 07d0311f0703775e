import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from tests.ranks import run_ranks

LR = 1e-2
RATES = [(LR, 0.1), (LR, 0.0)]  # with weight decay, and without
CONFIG = OptimizerConfig(
    lr=LR, weight_decay=0.1, clip_grad=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8
)
SHAPES = {  # sizes on purpose no multiple of a vector register
    "a.weight": ((17, 31), True),
    "a.bias": ((31,), False),
    "b.weight": ((64, 33), True),
    "b.norm": ((3,), False),
    "b.scale": ((), False),
}


def make_buffer(dtype=torch.float32, uncounted=()):
    groups = [
        [
            BufferEntry(n, shape, 1 - decay, n not in uncounted)
            for n, (shape, decay) in SHAPES.items()
            if n[0] == unit
        ]
        for unit in "ab"
    ]
    buffer = ParameterBuffer(groups, dtype, "cpu")
    generator = torch.Generator().manual_seed(1)
    for name in SHAPES:
        buffer.parameter(name).copy_(torch.randn(SHAPES[name][0], generator=generator))
    return buffer


def gradients(step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: scale * torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()
    }


def fill(buffer, grads):
    for name, grad in grads.items():
        buffer.grad(name).copy_(grad)


def torch_adamw(parameters):
    """torch's own optimizer on separate tensors, decayed ones first."""
    chosen = {
        decay: [parameters[name] for name in SHAPES if SHAPES[name][1] == decay]
        for decay in (True, False)
    }
    groups = [
        {"params": chosen[True], "weight_decay": 0.1},
        {"params": chosen[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


def padding_is_zero(buffer, flat):
    inside = torch.zeros(buffer.size, dtype=torch.bool)
    for slot in buffer.slots.values():
        inside[slot.start : slot.stop] = True
    return not flat[~inside].any()


def whole_vectors(tensor):
    """`tensor` flattened, without its last elements that fill no vector register: torch's CPU
    kernel rounds those in scalar code, which differs in the last bit. In a buffer padding fills the
    register, wherever a parameter lies."""
    flat = tensor.flatten()
    return flat[: flat.numel() // 16 * 16]


def test_equals_torch_bitwise():
    buffer = make_buffer()
    parameters = {name: buffer.parameter(name).clone() for name in SHAPES}
    padded = {
        name: torch.nn.functional.pad(p.flatten(), (0, -p.numel() % 16))
        for name, p in parameters.items()
    }
    ours, theirs, theirs_padded = (
        AdamW(buffer, CONFIG),
        torch_adamw(parameters),
        torch_adamw(padded),
    )
    for step in range(5):
        grads = gradients(step)
        fill(buffer, grads)
        for name, grad in grads.items():
            parameters[name].grad = grad
            padded[name].grad = torch.nn.functional.pad(grad.flatten(), (0, -grad.numel() % 16))
        rate = LR / (step + 1)
        for group in theirs.param_groups + theirs_padded.param_groups:
            group["lr"] = rate
        theirs.step()
        theirs_padded.step()
        assert not ours.step([(rate, 0.1), (rate, 0.0)]).skipped
        flats = ours.state() | {"parameter": buffer.data}
        for name in SHAPES:
            for kind, flat in flats.items():
                mine = buffer.view(flat, name)
                other, other_padded = (
                    tensors[name] if kind == "parameter" else optimizer.state[tensors[name]][kind]
                    for tensors, optimizer in ((parameters, theirs), (padded, theirs_padded))
                )
                assert torch.equal(mine.flatten(), other_padded[: mine.numel()]), (step, name, kind)
                assert torch.equal(whole_vectors(mine), whole_vectors(other)), (step, name, kind)
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert ours.steps == 5
    assert padding_is_zero(buffer, buffer.data)


def test_bf16_updates_an_fp32_master():
    buffer = make_buffer(torch.bfloat16)
    master = buffer.data.float()
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    decay = torch.zeros_like(master)
    for slot in buffer.slots.values():
        decay[slot.start : slot.stop] = 0.0 if slot.group else 0.1
    optimizer = AdamW(buffer, CONFIG)
    for step in range(1, 6):
        fill(buffer, gradients(step))
        grad = buffer.main_grad.clone()
        optimizer.step([(1e-3, 0.1), (1e-3, 0.0)])
        master = master * (1 - 1e-3 * decay)
        exp_avg = 0.9 * exp_avg + 0.1 * grad
        exp_avg_sq = 0.95 * exp_avg_sq + 0.05 * grad * grad
        corrected = (exp_avg_sq / (1 - 0.95**step)).sqrt() + 1e-8
        master = master - 1e-3 * (exp_avg / (1 - 0.9**step)) / corrected
        torch.testing.assert_close(optimizer.state()["master"], master, rtol=1e-5, atol=1e-7)
        assert torch.equal(buffer.data, optimizer.state()["master"].to(torch.bfloat16))
    # it knows more than bf16 can hold
    assert not torch.equal(optimizer.state()["master"], buffer.data.float())


def test_steps_below_bf16_resolution_add_up():
    buffer = make_buffer(torch.bfloat16)
    buffer.data.fill_(1.0)
    optimizer = AdamW(buffer, CONFIG)
    for _ in range(40):
        buffer.main_grad.fill_(1.0)
        optimizer.step([(2e-4, 0.0)] * 2)  # 1 - 2e-4 rounds to 1 in bf16
    torch.testing.assert_close(
        optimizer.master, torch.full_like(optimizer.master, 1 - 40 * 2e-4), rtol=1e-5, atol=0
    )
    assert torch.equal(buffer.data, torch.full_like(buffer.data, 0.9921875))


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_clipping_equals_torch(scale):
    buffer = make_buffer()
    parameters = {name: buffer.parameter(name).clone() for name in SHAPES}
    ours, theirs = AdamW(buffer, replace(CONFIG, clip_grad=1.0)), torch_adamw(parameters)
    for step in range(3):
        fill(buffer, gradients(step, scale))
        for name, grad in gradients(step, scale).items():
            parameters[name].grad = grad
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item()
        theirs.step()
        result = ours.step(RATES)
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        for name in SHAPES:
            # it counts clipped, and stays
            assert torch.equal(buffer.grad(name), gradients(step, scale)[name])
            torch.testing.assert_close(
                buffer.parameter(name), parameters[name], rtol=1e-5, atol=1e-7
            )


def test_norm_of_many_values_is_exact():
    entry = BufferEntry("w", (3_000_001,), 0)
    buffer = ParameterBuffer([[entry]], torch.float32, "cpu")
    buffer.grad("w").fill_(0.1)
    exact = math.sqrt(3_000_001) * float(torch.tensor(0.1))
    assert AdamW(buffer, CONFIG).grad_norm() == pytest.approx(exact, rel=1e-7)


def test_uncounted_parameters_are_not_in_the_norm():
    buffer = make_buffer(uncounted=("a.bias", "b.weight"))
    buffer.main_grad.fill_(9.0)
    buffer.main_grad.zero_()
    for name in SHAPES:
        buffer.grad(name).fill_(2.0)
    assert AdamW(buffer, CONFIG).grad_norm() == pytest.approx(
        2 * math.sqrt(17 * 31 + 3 + 1), rel=1e-7
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    buffer = make_buffer(torch.bfloat16)
    optimizer = AdamW(buffer, replace(CONFIG, clip_grad=1.0))
    fill(buffer, gradients(0))
    optimizer.step(RATES)
    before = {kind: flat.clone() for kind, flat in optimizer.state().items()} | {
        "data": buffer.data.clone()
    }
    fill(buffer, gradients(1))
    buffer.grad("b.norm")[1] = bad
    result = optimizer.step(RATES)
    assert result.skipped and not math.isfinite(result.grad_norm)
    assert optimizer.steps == 1
    for kind, flat in (optimizer.state() | {"data": buffer.data}).items():
        assert torch.equal(flat, before[kind]), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bitwise(dtype):
    buffer = make_buffer(dtype)
    straight = AdamW(buffer, CONFIG)
    for step in range(2):
        fill(buffer, gradients(step))
        straight.step(RATES)
    copy = make_buffer(dtype)
    copy.data.copy_(buffer.data)
    restored = AdamW(copy, CONFIG)
    for kind, flat in restored.state().items():
        flat.copy_(straight.state()[kind])
    restored.steps = straight.steps
    for optimizer in (straight, restored):
        fill(optimizer.buffer, gradients(7))
        optimizer.step(RATES)
    assert torch.equal(copy.data, buffer.data)
    for kind in straight.state():
        assert torch.equal(restored.state()[kind], straight.state()[kind])


def test_refresh_master_takes_loaded_parameters():
    buffer = make_buffer(torch.bfloat16)
    optimizer = AdamW(buffer, CONFIG)
    buffer.data.fill_(3.0)
    optimizer.refresh_master()
    for name, slot in buffer.slots.items():
        assert torch.equal(
            buffer.view(optimizer.state()["master"], name), torch.full(slot.shape, 3.0)
        )
    assert set(optimizer.state()) == {"exp_avg", "exp_avg_sq", "master"}
    assert set(AdamW(make_buffer(), CONFIG).state()) == {"exp_avg", "exp_avg_sq"}


def test_a_rank_without_parameters_steps():
    optimizer = AdamW(ParameterBuffer([[]], torch.float32, "cpu"), CONFIG)
    assert optimizer.step(RATES).grad_norm == 0.0


def sharded_norm(rank, world_size):
    """Every rank holds a quarter of `w` and a copy of `norm`, which rank 0 alone counts; then rank
    2 meets an inf.
    """
    entries = [BufferEntry("w", (100,), 0), BufferEntry("norm", (7,), 1, counted=rank == 0)]
    buffer = ParameterBuffer([entries], torch.float32, "cpu")
    buffer.data.fill_(1.0)
    optimizer = AdamW(buffer, replace(CONFIG, clip_grad=1.0), dist.group.WORLD)
    buffer.grad("w").fill_(rank + 1)
    buffer.grad("norm").fill_(10)
    first = optimizer.step(RATES)
    moments = [buffer.view(optimizer.exp_avg, name)[0].item() for name in ("w", "norm")]
    before = buffer.data.clone()
    buffer.grad("w").fill_(math.inf if rank == 2 else 1.0)
    second = optimizer.step(RATES)
    return first, moments, second, torch.equal(buffer.data, before), optimizer.steps


def test_norm_over_ranks_counts_each_parameter_once_and_skips_alike():
    norm = math.sqrt(100 * (1 + 4 + 9 + 16) + 7 * 100)
    for rank, (first, moments, second, untouched, steps) in enumerate(run_ranks(sharded_norm, 4)):
        assert first.grad_norm == pytest.approx(norm, rel=1e-7) and not first.skipped
        # of clipped gradients
        assert moments == pytest.approx([0.1 * (rank + 1) / norm, 0.1 * 10 / norm], rel=1e-6)
        assert second.skipped and second.grad_norm == math.inf and untouched and steps == 1


def test_the_layout_of_the_buffer_does_not_change_a_bit():
    entries = [BufferEntry(f"w{i}", (1077 * i + 3,), i % 2) for i in range(1, 8)]
    finals = []
    for groups in ([entries], [[entry] for entry in reversed(entries)]):
        buffer = ParameterBuffer(groups, torch.float32, "cpu")
        optimizer = AdamW(buffer, CONFIG)
        for step in range(3):
            for number, entry in enumerate(entries):
                generator = torch.Generator().manual_seed(100 * step + number)
                buffer.grad(entry.name).copy_(torch.randn(entry.shape, generator=generator))
            optimizer.step(RATES)
        finals.append({entry.name: buffer.parameter(entry.name) for entry in entries})
    for name, final in finals[0].items():
        assert torch.equal(final, finals[1][name]) and final.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_take_no_part(dtype):
    """They keep values and moments, and count steps of their own; the norm is that of the
    others.
    """
    buffer = make_buffer(dtype)
    ours = AdamW(buffer, replace(CONFIG, clip_grad=1.0))
    named = {name: torch.nn.Parameter(buffer.parameter(name).float().clone()) for name in SHAPES}
    theirs = torch_adamw(named)
    frozen = ((), ("a.bias", "b.weight"), ("b.weight", "b.norm"), ("a.weight",), ())
    for step, names in enumerate(frozen):
        grads = gradients(step)
        fill(buffer, grads)
        for name, grad in grads.items():
            named[name].grad = None if name in names else grad
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        theirs.step()
        ours.freeze(names)
        assert ours.step(RATES).grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for name, parameter in named.items():
            torch.testing.assert_close(
                buffer.view(ours.master, name), parameter.detach(), rtol=2e-6, atol=2e-7
            )
    assert ours.missed == {"a.bias": 1, "b.weight": 2, "b.norm": 1, "a.weight": 1}
