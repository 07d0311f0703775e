"""Patches that are active while a model is traced: gradient stops, the causal mask, layer drop,
warnings.
"""

import io
import linecache
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx import Graph

from megatron_merak.graph.capture.guards import value_dependencies
from megatron_merak.graph.capture.overriding import overriding
from megatron_merak.graph.ir.aliases import mutation_deps

aten = torch.ops.aten


@contextmanager
def silenced() -> Iterator[None]:
    """Silence the exporter, which prints the partial graph of a failed attempt and warnings of a
    successful one.
    """
    exporter = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with (
        warnings.catch_warnings(),
        redirect_stderr(io.StringIO()),
        overriding(exporter, "disabled", True),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def explicit_gradient_stops() -> Iterator[None]:
    """Record in the graph where eager code stops gradients: in ``inference_mode`` and after
    ``autograd.grad``.
    """
    grad = torch.autograd.grad

    def enter(mode: Any) -> None:  # a torch.inference_mode
        mode._inference_mode_context = torch.set_grad_enabled(
            torch.is_grad_enabled() and not mode.mode
        )
        mode._inference_mode_context.__enter__()

    def detached_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        grads = grad(outputs, inputs, *args, **kwargs)
        create = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        return grads if create else tuple(x if x is None else x.detach() for x in grads)

    with ExitStack() as patches:
        patches.enter_context(overriding(torch.inference_mode, "__enter__", enter))
        patches.enter_context(overriding(torch.autograd, "grad", detached_grad))
        yield


@contextmanager
def eager_branches() -> Iterator[None]:
    """Make transformers and torch take the branches of eager training although they are traced.

    - A model with a special branch for export takes the one for training, except where it also
      checks for compilation.
    - Masks from functions of positions are computed by broadcasting, since a graph cannot contain
      ``vmap``.
    - ``bincount`` with ``minlength`` returns exactly that many bins.
    - ``module.to(dtype)`` that changes nothing is skipped, and distributions do not validate their
      arguments.
    """
    masks = _masks_of_transformers()

    def by_broadcasting(mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def broadcast_mask(*positions: Tensor) -> Tensor:
            axes = [
                [None] * i + [slice(None)] + [None] * (len(positions) - 1 - i)
                for i in range(len(positions))
            ]
            mask = mask_function(*(p[tuple(axis)] for p, axis in zip(positions, axes, strict=True)))
            return mask.expand([p.numel() for p in positions])

        return broadcast_mask

    names = sorted(name for name in sys.modules if name.startswith("transformers.models."))
    modelling_modules = [sys.modules[name] for name in names]
    with ExitStack() as patches:
        patches.enter_context(overriding(Distribution, "_validate_args", False))
        patches.enter_context(overriding(nn.Module, "_apply", _skip_no_op_apply(nn.Module._apply)))
        patches.enter_context(overriding(torch, "bincount", _fixed_bins(torch.bincount)))
        patches.enter_context(overriding(Tensor, "bincount", _fixed_bins(Tensor.bincount)))
        if hasattr(masks, "_vmap_expansion_sdpa"):
            patches.enter_context(overriding(masks, "_vmap_expansion_sdpa", by_broadcasting))
        if hasattr(masks, "TransformGetItemToIndex"):
            patches.enter_context(overriding(masks, "TransformGetItemToIndex", nullcontext))
        for module in modelling_modules:
            if "is_torchdynamo_exporting" in vars(
                module
            ) and "is_torchdynamo_compiling" not in vars(module):
                patches.enter_context(overriding(module, "is_torchdynamo_exporting", lambda: False))
        yield


@contextmanager
def adapted_parameters() -> Iterator[None]:
    """Let an adapter of peft for a parameter (``target_parameters``) put the adapted weight in front
    of it. As peft does it, by a parametrization, the parameter becomes a buffer that changes.
    """
    layers = sys.modules.get("peft.tuners.lora.layer")
    wrapper = getattr(layers, "ParamWrapper", None)
    if wrapper is None:
        yield
        return

    @contextmanager
    def activated(adapter: Any, active: list[str]) -> Iterator[None]:
        own = [name for name in active if name in adapter.lora_A]
        if not own:
            yield
            return
        base = adapter.get_base_layer()
        weight = adapter.get_param()
        if len(own) == 1 and adapter.num_experts > 1 and hasattr(adapter, "get_delta_factors"):
            left, right, scale = adapter.get_delta_factors(own[0])
            weight = torch.baddbmm(weight, left, right, alpha=scale)
        else:
            weight = weight + sum(adapter.get_delta_weight(name) for name in own)
        vars(base)[adapter.parameter_name] = weight
        try:
            yield
        finally:
            del vars(base)[adapter.parameter_name]

    with overriding(wrapper, "_activate_lora", activated):
        yield


def _masks_of_transformers() -> ModuleType | None:
    """Return transformers' code for masks; None where no model of it can be traced."""
    if "transformers.modeling_utils" not in sys.modules:
        return None  # it would take a second to load
    from transformers import masking_utils

    return masking_utils


def _skip_no_op_apply(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Skip ``module.to(dtype)`` where it changes nothing: fake parameters cannot be replaced, even
    by equal ones.
    """

    def applied(
        module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        with torch.no_grad():
            pairs = [(x, fn(x)) for x in (*module.parameters(recurse), *module.buffers(recurse))]
        same = all(x.dtype == y.dtype and x.device == y.device for x, y in pairs)
        return module if same else apply(module, fn, recurse)

    return applied


def _fixed_bins(bincount: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the number of bins ``minlength``, so that it does not depend on values; a larger value
    is an error.

    MoE losses count the tokens of each expert this way, in releases of transformers before 5.23.
    """

    def with_fixed_bins(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if weights is not None or not minlength:
            return bincount(input, weights, minlength)
        return input.new_zeros(minlength, dtype=torch.long).scatter_add(
            0, input.long(), torch.ones_like(input).long()
        )

    return with_fixed_bins


@contextmanager
def is_causal() -> Iterator[None]:
    """Keep ``is_causal`` of attention instead of a materialised [batch, 1, length, length] mask.

    transformers builds the mask while tracing, since it cannot search the positions for packed
    sequences. Here it does not search; instead the positions are marked in the graph for
    ``positions_from_batch``.
    """
    masks = _masks_of_transformers()

    def find_packed_sequence_indices(position_ids: Tensor) -> None:
        # those of the exporter pass a layout too
        aten._assert_tensor_metadata(position_ids, dtype=position_ids.dtype)

    with ExitStack() as patches:
        for name, value in (
            ("find_packed_sequence_indices", find_packed_sequence_indices),
            ("is_tracing", lambda tensor=None: False),
            ("is_torchdynamo_exporting", lambda: False),
        ):
            if hasattr(masks, name):
                patches.enter_context(overriding(masks, name, value))
        yield


def positions_from_batch(graph: Graph) -> bool:
    """Whether positions that ``is_causal`` did not search depend on the batch, and so may be of
    packed sequences.
    """
    marks = graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)
    after = mutation_deps(graph)
    dependencies = [
        value_dependencies(mark, after) for mark in marks if "layout" not in mark.kwargs
    ]
    return any(node.op == "placeholder" for nodes in dependencies for node in nodes)


@contextmanager
def no_layer_drop() -> Iterator[None]:
    """Never drop a layer: a scalar random number drawn in a line of code that contains
    "drop" is 1.
    """

    def without_drop(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            shape = (
                ()
                if draw in uniforms
                else (args[0] if args and isinstance(args[0], list | tuple) else args)
            )
            scalar = tuple(shape) in ((), (1,)) and "size" not in kwargs
            return 1.0 if scalar and "drop" in line else draw(*args, **kwargs)

        return drawn

    uniforms = (random.uniform, numpy.random.uniform)
    functions = (
        (torch, "rand"),
        (random, "random"),
        (random, "uniform"),
        (numpy.random, "random"),
        (numpy.random, "rand"),
        (numpy.random, "uniform"),
    )
    with ExitStack() as patches:
        for owner, name in functions:
            patches.enter_context(overriding(owner, name, without_drop(getattr(owner, name))))
        yield
