"""fp8 linear layers written again, plainly: a model of transformers whose layers have them is what a
captured one must equal.
"""

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn


def quantised(x, dtype):
    """Values in fp8, widened, and what they are to be multiplied with."""
    amax = x.abs().max().float()
    scale = torch.finfo(dtype).max / amax if amax > 0 else torch.tensor(1.0)
    return (x.float() * scale).to(dtype).float(), 1 / scale


def in_blocks(x, rows, columns, dtype):
    """What the values of each block are rounded to, with a scale that is a power of two."""
    out = torch.empty(x.shape)
    for top in range(0, len(x), rows):
        for left in range(0, x.shape[1], columns):
            block = x[top : top + rows, left : left + columns].float()
            amax = block.abs().max()
            scale = 2.0 ** torch.floor(torch.log2(torch.finfo(dtype).max / amax))
            if amax == 0:
                scale = torch.tensor(1.0)
            rounded = (block * scale).to(dtype).float() / scale
            out[top : top + rows, left : left + columns] = rounded
    return out


def product(a, b, kinds, recipe, weight):
    """a @ b.T. weight: whether b is one."""
    if recipe == "tensorwise":
        (one, by), (two, times) = (
            quantised(x, kind) for x, kind in zip((a, b), kinds, strict=True)
        )
        return (one @ two.t()) * (by * times)
    one = in_blocks(a, 1, 128, kinds[0])
    two = in_blocks(b, 128 if weight else 1, 128, kinds[1])
    return one @ two.t()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, form, recipe):
        ctx.save_for_backward(x, weight)
        ctx.how = torch.float8_e5m2 if form == "hybrid" else E4M3, recipe
        rows = x.reshape(-1, x.shape[-1])
        out = product(rows, weight, (E4M3, E4M3), recipe, True)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_gradient, recipe = ctx.how
        rows = x.reshape(-1, x.shape[-1])
        grads = grad.reshape(-1, grad.shape[-1])
        into = product(grads, weight.t(), (of_gradient, E4M3), recipe, True)
        weights = product(grads.t(), rows.t(), (of_gradient, E4M3), recipe, False)
        return into.to(x.dtype).view(x.shape), weights.to(weight.dtype), None, None


class Layer(nn.Module):
    """Takes the place of a linear layer, whose parameters it has."""

    def __init__(self, linear, form, recipe):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.how = form, recipe
        self.transposed = not isinstance(linear, nn.Linear)

    def forward(self, x):
        weight = self.weight.t() if self.transposed else self.weight
        out = Product.apply(x, weight, *self.how)
        return out if self.bias is None else out + self.bias


def with_fp8(model, form, recipe, but=()):
    """The model, with linear layers of fp8 in its lists of layers. but: those that stay."""
    for name, module in list(model.named_modules()):
        in_list = any(step.isdigit() for step in name.split("."))
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and in_list and not any(each in name for each in but):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Layer(module, form, recipe))
    return model
