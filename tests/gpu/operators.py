"""torch.ops.merak on a device, called as the comparisons of tests/native call the launchers."""

import torch

ops = torch.ops.merak
EPS = 1e-5


def to(device, *tensors):
    """Tensors on the device, with their strides and their alignment."""

    def move(tensor):
        if tensor is None:
            return None
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
        return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return [move(tensor) for tensor in tensors]


def back(*tensors):
    return tuple(None if tensor is None else tensor.cpu() for tensor in tensors)


def norm_forward(device, of):
    x, residual, weight, bias = to(device, of.x, of.residual, of.weight, of.bias)
    if residual is None:
        found = (
            ops.rms_norm(x, weight, EPS) if bias is None else ops.layer_norm(x, weight, bias, EPS)
        )
        y, total, (*mean, rstd) = found[0], x, found[1:]
    elif bias is None:
        y, total, *mean, rstd = ops.add_rms_norm(x, residual, weight, EPS)
    else:
        y, total, *mean, rstd = ops.add_layer_norm(x, residual, weight, bias, EPS)
    return back(y, total, mean[0] if mean else None, rstd)


def norm_backward(device, of, total, mean, rstd):
    grad, more, total, weight, mean, rstd = to(
        device, of.grad, of.grad_sum, total, of.weight, mean, rstd
    )
    statistics = (rstd,) if mean is None else (mean, rstd)
    name = "layer_norm_backward" if mean is not None else "rms_norm_backward"
    if of.residual is None:
        found = getattr(ops, name)(grad, total, weight, *statistics)
    else:
        found = getattr(ops, f"add_{name}")(grad, more, total, weight, *statistics)
    return back(*found, *(() if mean is not None else (None,)))


def gated(device, kind, gate, up, grad):
    gate, up, grad = to(device, gate, up, grad)
    return back(ops.gated(gate, up, kind), *ops.gated_backward(grad, gate, up, kind))


def gated_merged(device, kind, gate, up, grad):
    both, grad = to(device, torch.cat((gate, up), -1), grad)
    return back(
        ops.gated_merged(both, kind), *ops.gated_merged_backward(grad, both, kind).chunk(2, -1)
    )


def biased(device, kind, x, bias, grad):
    x, bias, grad = to(device, x, bias, grad)
    grad_x, grad_bias = ops.bias_gelu_backward(grad, x, bias, kind)
    return back(ops.bias_gelu(x, bias, kind), grad_x, None if bias is None else grad_bias)


def bias_dropout_add(device, x, bias, residual, p, seed, grad):
    of_seed = None if seed is None else torch.tensor([seed], dtype=torch.int64)
    x, bias, residual, of_seed, grad = to(device, x, bias, residual, of_seed, grad)
    grad_x, grad_bias = ops.bias_dropout_add_backward(grad, p, of_seed, bias is not None)
    y = ops.bias_dropout_add(x, bias, residual, p, of_seed)
    return back(y, grad_x, None if bias is None else grad_bias)


def rotary(device, x, cos, sin, interleaved=False, inverse=False):
    return back(ops.rotary(*to(device, x, cos, sin), interleaved, inverse))[0]


def rotary_in_place(device, x, cos, sin, interleaved=False, inverse=False):
    """Of heads between others, which stay."""
    x, cos, sin = to(device, x, cos, sin)
    fused = torch.cat((x, x, x), 2)
    heads = fused[:, :, x.shape[2] : -x.shape[2]]
    ops.rotary_(heads, heads, cos, sin, interleaved, inverse)
    assert all(
        torch.equal(part, x) for part in (fused[:, :, : x.shape[2]], fused[:, :, -x.shape[2] :])
    )
    return back(heads)[0]
