"""What is different in the world while a model is traced: gradients that stop, the causal mask, layer drop, noise."""

import io
import linecache
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx import Graph

from megatron_merak.graph.capture.guards import upstream
from megatron_merak.graph.ir.aliases import mutation_deps

aten = torch.ops.aten


@contextmanager
def quiet() -> Iterator[None]:
    """A failing export prints its partial graph, a succeeding one its doubts; neither is news to the user."""
    exporter = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), mock.patch.object(exporter, "disabled", True):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def stopped() -> Iterator[None]:
    """Show in a graph where eager code stops gradients: in ``torch.inference_mode``, behind ``torch.autograd.grad``."""
    grad = torch.autograd.grad

    def enter(mode: torch.inference_mode) -> None:
        mode._inference_mode_context = torch.set_grad_enabled(torch.is_grad_enabled() and not mode.mode)
        mode._inference_mode_context.__enter__()

    def stopping(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        made = grad(outputs, inputs, *args, **kwargs)
        create = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        return made if create else tuple(x if x is None else x.detach() for x in made)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.inference_mode, "__enter__", enter))
        patches.enter_context(mock.patch.object(torch.autograd, "grad", stopping))
        yield


@contextmanager
def native() -> Iterator[None]:
    """Let transformers compute as in training where it knows that it is traced, and torch check no distributions.

    A model that takes another branch for export to other runtimes takes that for training; one that also asks whether
    it is being compiled means the two together, and is left alone. Masks made by functions of positions are made by
    broadcasting, as most are anyway, since a graph cannot hold ``vmap``. A count with ``minlength`` has that many bins.
    """
    from transformers import masking_utils

    def broadcast(mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*positions: Tensor) -> Tensor:
            axes = [[None] * i + [slice(None)] + [None] * (len(positions) - 1 - i) for i in range(len(positions))]
            mask = mask_function(*(p[tuple(axis)] for p, axis in zip(positions, axes, strict=True)))
            return mask.expand([p.numel() for p in positions])

        return made

    asking = [m for name, m in sorted(sys.modules.items()) if name.startswith("transformers.models.")]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        patches.enter_context(mock.patch.object(nn.Module, "_apply", _apply_if_it_changes(nn.Module._apply)))
        patches.enter_context(mock.patch.object(torch, "bincount", _of_minlength_bins(torch.bincount)))
        patches.enter_context(mock.patch.object(Tensor, "bincount", _of_minlength_bins(Tensor.bincount)))
        if hasattr(masking_utils, "_vmap_expansion_sdpa"):
            patches.enter_context(mock.patch.object(masking_utils, "_vmap_expansion_sdpa", broadcast))
        if hasattr(masking_utils, "TransformGetItemToIndex"):
            patches.enter_context(mock.patch.object(masking_utils, "TransformGetItemToIndex", nullcontext))
        for module in asking:
            if "is_torchdynamo_exporting" in vars(module) and "is_torchdynamo_compiling" not in vars(module):
                patches.enter_context(mock.patch.object(module, "is_torchdynamo_exporting", lambda: False))
        yield


def _apply_if_it_changes(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``module.to(dtype)`` leaves what is of that dtype: fake parameters cannot be replaced even by equal ones."""

    def applied(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            pairs = [(x, fn(x)) for x in (*module.parameters(recurse), *module.buffers(recurse))]
        same = all(x.dtype == y.dtype and x.device == y.device for x, y in pairs)
        return module if same else apply(module, fn, recurse)

    return applied


def _of_minlength_bins(bincount: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """How many bins there are is then no value of a tensor. One beyond them is an error of the scatter, no wrong count.

    Mixture-of-experts losses count the tokens of each expert this way, in releases of transformers before 5.23.
    """

    def counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if weights is not None or not minlength:
            return bincount(input, weights, minlength)
        return input.new_zeros(minlength, dtype=torch.long).scatter_add(0, input.long(), torch.ones_like(input).long())

    return counted


@contextmanager
def is_causal() -> Iterator[None]:
    """Keep ``is_causal`` of attention instead of a materialised [batch, 1, length, length] mask.

    transformers builds the mask while tracing since it cannot look for packed sequences in the positions. Here it does
    not look; the positions leave a mark in the graph, for ``positions_from_batch``.
    """
    from transformers import masking_utils

    def find_packed_sequence_indices(position_ids: Tensor) -> None:
        aten._assert_tensor_metadata(position_ids, dtype=position_ids.dtype)  # the exporter's own name a layout too

    with ExitStack() as patches:
        for name, value in (
            ("find_packed_sequence_indices", find_packed_sequence_indices),
            ("is_tracing", lambda tensor=None: False),
            ("is_torchdynamo_exporting", lambda: False),
        ):
            if hasattr(masking_utils, name):
                patches.enter_context(mock.patch.object(masking_utils, name, value))
        yield


def positions_from_batch(graph: Graph) -> bool:
    """Whether positions that ``is_causal`` did not look at depend on values of the batch, so may be packed."""
    marks = graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    after = mutation_deps(graph)
    above = [upstream(mark, after) for mark in marks if "layout" not in mark.kwargs]
    return any(node.op == "placeholder" for seen in above for node in seen)


@contextmanager
def no_layer_drop() -> Iterator[None]:
    """A scalar random number, drawn by a line of code that speaks of dropping, is 1: no layer is ever dropped."""

    def fixed(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            shape = () if draw in spans else (args[0] if args and isinstance(args[0], list | tuple) else args)
            scalar = tuple(shape) in ((), (1,)) and "size" not in kwargs
            return 1.0 if scalar and "drop" in line else draw(*args, **kwargs)

        return drawn

    spans = (random.uniform, numpy.random.uniform)
    places = (torch, "rand"), (random, "random"), (random, "uniform")
    places += (numpy.random, "random"), (numpy.random, "rand"), (numpy.random, "uniform")
    with ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(mock.patch.object(owner, name, fixed(getattr(owner, name))))
        yield
