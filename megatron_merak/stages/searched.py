"""A captured model, as a search of its plan needs it.

It is captured with micro-batches of one sample and of two. What a unit needs for more follows from
both: the part that grows with the samples, and the part that does not. Of layers that are alike three are
measured. The plan that is run is made of a capture of its own micro-batch, with all layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

from ..cluster import Cluster
from ..config.checks import check_context_parallel, check_experts
from ..graph.capture.captured import Captured
from ..graph.ir.nodes import op_name
from ..graph.kept_state import StateOf
from ..graph.partition.cut import Chain
from ..graph.partition.shorten import Shortened, shorten
from ..graph.sharding.experts import GROUPED
from ..plan import TensorSharding, Unit
from ..planner.request import Request
from ..planner.search.choice import Layer
from .blueprint import frozen_bytes, measured
from .traced import Traced

# What a micro-batch needs of a unit; its other fields are of weights.
_GROWING = (
    "flops",
    "saved_bytes",
    "recomputed_bytes",
    "output_bytes",
    "transient_bytes",
    "passed_bytes",
    "reduced_bytes",
    "exchanged_bytes",
    "ring_bytes",
    "inner_sent",
    "outer_sent",
    "routed_bytes",
    "regathered_bytes",
    "bare_bytes",
    "meanwhile_flops",
    "meanwhile_bytes",
    "weight_bytes",
    "unread_bytes",
    "attention_flops",
    "more_flops",
    "unneeded_flops",
    "repeated_flops",
    "fp8_flops",
)


PinsOf = Callable[[Traced, int], Mapping[str, TensorSharding]]


class CapturedChain:
    """The chains of a captured model; a ``planner.search.Model``.

    trace:    returns the model, captured with a micro-batch of so many samples.
    request:  how it is cut and sharded; degrees are not read.
    state_of: see ``stages.blueprint.make_blueprint``.
    pins_of:  returns how some tensors are sharded over so many tensor-parallel ranks, as ``shard``
              has it; None: nothing is said of any.
    """

    def __init__(
        self,
        trace: Callable[[int], Traced],
        request: Request,
        cluster: Cluster,
        state_of: StateOf | None = None,
        pins_of: PinsOf | None = None,
    ):
        self._pins_of = pins_of
        self._trace = trace
        self._request = request
        self._cluster = cluster
        self._state_of = state_of
        self._measured: dict[tuple[Layer, int, bool, bool], tuple[Unit, ...]] = {}
        self._shortened: dict[int, Shortened | None] = {}  # by samples

    @cached_property
    def _one(self) -> Traced:
        return self._trace(1)

    @cached_property
    def _two(self) -> Traced:
        return self._trace(2)

    @cached_property
    def frozen_bytes(self) -> float:
        return frozen_bytes(self._one)

    shares_sequences = True

    @cached_property
    def has_experts(self) -> bool:
        return any(op_name(node) in GROUPED for node in self._one.captured.module.graph.nodes)

    def units(
        self, layer: Layer, micro_batch_size: int, sequence_parallel: bool, selective: bool
    ) -> tuple[Unit, ...]:
        one = self._units(layer, 1, sequence_parallel, selective)
        if micro_batch_size == 1:
            return one
        two = self._units(layer, 2, sequence_parallel, selective)
        if micro_batch_size == 2:
            return two
        return tuple(
            _grown(first, second, micro_batch_size) for first, second in zip(one, two, strict=True)
        )

    def _units(self, layer: Layer, samples: int, along: bool, selective: bool) -> tuple[Unit, ...]:
        key = (layer, samples, along, selective)
        if key not in self._measured:
            parallel = replace(
                self._request.parallel,
                **layer.settings(),
                pipeline_model_parallel_size=1,
                sequence_parallel=along,
                recompute_granularity="selective" if selective else None,
            )
            check_context_parallel(parallel)
            check_experts(parallel, layer.cp * layer.expert_copies)
            traced = self._one if samples == 1 else self._two
            request = replace(self._request, parallel=parallel)
            pins = None if self._pins_of is None else self._pins_of(traced, layer.tp)
            self._measured[key] = self._units_of(traced, samples, request, pins)
        return self._measured[key]

    def _units_of(
        self,
        traced: Traced,
        samples: int,
        request: Request,
        pins: Mapping[str, TensorSharding] | None,
    ) -> tuple[Unit, ...]:
        """Return the units of a capture, for which three of the layers that are alike are measured.

        The first time these are compared with all layers; a model where they differ is measured as a
        whole.
        """

        def measured_of(captured: Captured | None) -> tuple[Chain, tuple[Unit, ...]]:
            chain, _, units = measured(
                traced,
                request,
                self._cluster,
                state_of=self._state_of,
                pins=pins,
                captured=captured,
            )
            return chain, units

        known = self._shortened.get(samples)
        if known is not None:
            units = known.lengthened(measured_of(known.captured)[1])
            assert units is not None, "it is cut as it was when it was compared"
            return units
        chain, whole = measured_of(None)
        # rules and pins may name one of several layers, and some layers may not be in fp8
        by_layer = pins is not None or request.rules or request.fp8 is not None
        if samples not in self._shortened:
            short = None if by_layer else shorten(traced.captured, chain, self._kept_of(traced))
            if short and short.lengthened(measured_of(short.captured)[1]) != whole:
                short = None
            self._shortened[samples] = short
        return whole

    def _kept_of(self, traced: Traced) -> Callable[[str], float | None]:
        """Return what the optimizer keeps of a parameter, by its name."""
        state_of = self._state_of
        if state_of is None:
            return lambda name: None
        return lambda name: state_of(name, traced.captured.shapes[name])


def _grown(one: Unit, two: Unit, samples: int) -> Unit:
    """Return a unit for a micro-batch of ``samples``, given it for one sample and for two."""
    changes: dict[str, Any] = {
        name: _line(getattr(one, name), getattr(two, name), samples) for name in _GROWING
    }
    # the most of several lines, of which a steeper one may come later; all begin near zero
    line = _line(one.running_bytes, two.running_bytes, samples)
    steeper = (-(-each * samples // 2) for each in two.running_bytes)
    changes["running_bytes"] = tuple(map(max, line, steeper))
    rows = zip(one.products, two.products, strict=True)
    changes["products"] = tuple(
        (_line(first[0], second[0], samples), *first[1:]) for first, second in rows
    )
    assert set(changes) <= {row.name for row in fields(Unit)}
    return replace(two, **changes)


def _line(one: Any, two: Any, samples: int) -> Any:
    """Return the number, or numbers, that follow from those of one sample and of two."""
    if isinstance(one, tuple):
        return tuple(_line(*pair, samples) for pair in zip(one, two, strict=True))
    return max(0, one + (two - one) * (samples - 1))
