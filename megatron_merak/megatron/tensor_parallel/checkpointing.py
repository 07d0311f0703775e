"""Functions that are computed again in the backward, with the random numbers of the forward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..streams import CudaRNGStatesTracker
from .random import get_cuda_rng_tracker
from .utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks


@dataclass(frozen=True)
class _Streams:
    """The states of all random streams: the CPU's, the device's, and the named ones."""

    host: Tensor
    device: Tensor
    named: dict[str, Tensor]

    @classmethod
    def now(cls) -> "_Streams":
        tracker = get_cuda_rng_tracker()
        return cls(torch.get_rng_state(), tracker.generator.get_state(), tracker.get_states())

    def set(self, tracker: CudaRNGStatesTracker) -> None:
        torch.set_rng_state(self.host)
        tracker.generator.set_state(self.device)
        tracker.set_states(self.named)

    @contextmanager
    def drawn_again(self) -> Iterator[None]:
        """Draw from these states, and then go on where the streams were."""
        tracker = get_cuda_rng_tracker()
        before = _Streams.now()
        self.set(tracker)
        try:
            yield
        finally:
            before.set(tracker)


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _again(run: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Run a function on inputs of their own; return these and its outputs."""
    leaves = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    ]
    with torch.enable_grad():
        return leaves, _tuple(run(*leaves))


def _backward(outputs: Sequence[Any], grads: Sequence[Any]) -> None:
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if isinstance(output, Tensor) and output.requires_grad
    ]
    torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _gradients(leaves: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return tuple(x.grad if isinstance(x, Tensor) else None for x in leaves)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, distribute, *inputs):
        ctx.run = run
        ctx.streams = _Streams.now()
        with torch.no_grad():
            outputs = run(*inputs)
        kept = list(inputs)
        ctx.shape = None
        if distribute:
            ctx.shape = inputs[0].shape
            ctx.wants_gradient = inputs[0].requires_grad
            kept[0] = split_tensor_into_1d_equal_chunks(inputs[0].contiguous(), new_buffer=True)
        ctx.save_for_backward(*(x for x in kept if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in kept]
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if other is None else other[0] for other in ctx.others]
        if ctx.shape is not None:
            whole = gather_split_1d_tensor(inputs[0]).view(ctx.shape)
            inputs[0] = whole.requires_grad_(ctx.wants_gradient)
        with ctx.streams.drawn_again():
            leaves, outputs = _again(ctx.run, inputs)
        _backward(outputs, grads)
        return None, None, *_gradients(leaves)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call a function, and again in the backward, instead of keeping what its gradient needs.

    distribute_saved_activations: whether each tensor-parallel rank keeps its part of the first
                                  argument only; all have the same one.
    """
    return _Checkpoint.apply(function, distribute_saved_activations, *args)


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, owner, *inputs):
        with torch.no_grad():
            outputs = run(*inputs)
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
        owner.ctx = ctx
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        assert ctx.outputs is not None, "the outputs were not computed again before their gradient"
        _backward(ctx.outputs, grads)
        gradients = _gradients(ctx.leaves)
        ctx.outputs = None
        ctx.leaves = None
        return None, None, *gradients


class CheckpointWithoutOutput:
    """A function whose outputs, too, are not kept: they are computed again when the gradient of
    what was made of them is there. What follows must keep the outputs themselves, not copies.

        saved = CheckpointWithoutOutput()
        y = saved.checkpoint(norm, x)
        z = linear(y)
        saved.discard_output_and_register_recompute(z)

    fp8: not here: raises ConfigError.
    """

    def __init__(self, fp8: object = False):
        if fp8:
            raise ConfigError("fp8", fp8, "there is no fp8 here", "Leave it out")
        self.ctx: Any = None
        self._run: Callable[..., Any] | None = None
        self._streams: _Streams | None = None
        self._outputs: tuple[Any, ...] = ()

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Call the function."""
        self._run = run_function
        self._streams = _Streams.now()
        outputs = _WithoutOutput.apply(run_function, self, *args)
        self._outputs = _tuple(outputs)
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs, until the gradient of ``hook_tensor`` is there."""
        for output in self._outputs:
            output.untyped_storage().resize_(0)
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(self._recompute)

    def _recompute(self, _grad: Tensor) -> None:
        if self.ctx is None:
            return
        assert self._run is not None and self._streams is not None
        tensors = iter(self.ctx.saved_tensors)
        inputs = [next(tensors) if other is None else other[0] for other in self.ctx.others]
        with self._streams.drawn_again():
            leaves, outputs = _again(self._run, inputs)
        for freed, computed in zip(self._outputs, outputs, strict=True):
            storage = computed.untyped_storage()
            freed.untyped_storage().resize_(storage.size())
            freed.untyped_storage().copy_(storage)
        self.ctx.outputs = outputs
        self.ctx.leaves = leaves
        self.ctx = None
        self._outputs = ()
