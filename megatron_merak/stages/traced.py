"""A traced model: the capture of its first batch, and captures of batches with other shapes or
branches.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError, TraceError
from ..graph.capture.capture import accepts_num_items, capture, lengths_of
from ..graph.capture.captured import Captured, Origin
from ..graph.capture.lengths import Axes, Lengths
from ..graph.capture.outputs import LossFunction
from ..graph.ir.nodes import is_op
from ..graph.ir.operators import attends_causally
from ..graph.lowering.documents import POSITIONS
from ..parallel.agree import broadcast_json, gather_json, together
from ..parallel.ranks import Members
from .documents import documents_of, same_graph, without
from .guard import check_weights, unguard, unguarded
from .precision import DTYPES, cast_of, check_operands
from .same_model import check_same_graph, check_same_model

Batch = Mapping[str, Any]
MASK = "attention_mask"


def batch_size(batch: Batch) -> tuple[int, int]:
    """The number of samples of a batch, and the length of its longest sequence of tokens (0 if it
    has none).
    """
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0]
    length = max(
        (value.shape[1] for value in tensors if value.dim() > 1 and not value.is_floating_point()),
        default=0,
    )
    return tensors[0].shape[0], length


def shapes_of(batch: Batch) -> tuple[tuple[str, tuple[int, ...], object], ...]:
    """What a capture depends on in a batch: shapes and dtypes of tensors, and values that are not
    tensors.
    """
    entries = [(name, value) for name, value in sorted(batch.items()) if value is not None]
    return tuple(
        (name, tuple(value.shape), value.dtype)
        if isinstance(value, Tensor)
        else (name, (), repr(value))
        for name, value in entries
    )


def without_mask(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != MASK}


def without_full_mask(batch: Batch) -> Batch:
    """The batch without an attention mask of ones, which collators add and which makes attention
    slower.
    """
    mask = batch.get(MASK)
    full = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())
    return without_mask(batch) if full else batch


def _masks_nothing(captured: Captured) -> bool:
    """Whether a capture without an attention mask computes the same as one with a mask of ones.

    It may not if, without a mask, the model makes its own from the token ids, or branches on
    values.
    """
    tokens = [
        n for n in captured.module.graph.find_nodes(op="placeholder") if n.target == "input_ids"
    ]
    only_embedded = all(is_op(user, "embedding") for node in tokens for user in node.users)
    return only_embedded and not captured.guards


@dataclass(frozen=True)
class OwnLoss:
    """A loss that is captured with the model and replaces the loss of the model's forward.

    compute:    computes it; see ``capture``.
    counts:     whether it takes ``num_items_in_batch``, as an entry of the batch.
    adds_up:    whether the losses of micro-batches are shares of the step's loss, and add up to it;
                None: if the batch has ``num_items_in_batch``.
    sees_batch: whether it may read any entry of the batch, so that none is left out.
    reports:    names of what it computes besides the loss and training returns.
    """

    compute: LossFunction
    counts: bool = False
    adds_up: bool | None = None
    sees_batch: bool = True
    reports: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """The outputs of training."""
        return ("loss", *self.reports)


def _without_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[None, Any]:
    return None, model.forward(**batch)


class Traced:
    """A model, captured with its first batch.

    model:    any module, with or without memory for its weights; it is not changed.
    example:  the first micro-batch.
    dtype:    of parameters and activations, except for the fp32 part of a bf16 or fp16 model.
    autocast: whether fp32 adapters of such a model compute in ``dtype``, and all of it may where it
              fails to run with parts of different dtypes.
    ranks:    the ranks of the job. Raises unless all have the same model and capture. None: nothing
              is compared.
    loss:     replaces the model's own.

    ``captured``:  the capture of ``example``.
    ``batch``:     ``example`` as it runs, see ``prepared``.
    ``example``:   its shapes, see ``shapes_of``.
    ``size``:      its number of samples, and its length in tokens.
    ``is_causal``: whether no token attends to later ones when there is no attention mask.
    ``unread``:    entries that are left out since the model does not read them.
    ``positions``: int64 [b, s], of the tokens of the first rank's example, on all ranks. Only on
                   CPUs, which attend to the documents of packed rows one by one; else None.

    Collective over ``ranks``. Raises TraceError, ConfigError, PlanError.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Batch,
        dtype: str = "float32",
        autocast: bool = False,
        ranks: Members | None = None,
        loss: OwnLoss | None = None,
    ):
        self.model = model
        self.dtype = dtype
        self._loss = loss
        self._trains = {name: p.requires_grad for name, p in model.named_parameters()}
        self.accepts_num_items = accepts_num_items(model) if loss is None else loss.counts
        self._shared: dict[str, Tensor] = {}
        self._cast = cast_of(model, DTYPES[dtype], autocast)
        if ranks is not None:
            with together(ranks.control, "cpu"):
                if ranks.rank == 0:
                    check_weights(model)
            unguard(model)  # on every rank: the first rank's weights are used
            check_same_model(model, ranks)
        try:
            self.captured = self._first(example)
        except TraceError:
            if isinstance(self._cast, torch.dtype) or not autocast:
                raise
            self._cast = DTYPES[dtype]
            captured = self._first(example)
            note = f"The model does not run with the dtypes of its weights: all compute in {dtype}."
            self.captured = replace(captured, notes=(*captured.notes, note))
        self.batch = self.prepared(example)
        self.example = shapes_of(self.batch)
        self.size = batch_size(example)
        self._check_dtypes()
        if ranks is not None:
            self._check_case(ranks)
        self.positions = (
            None if ranks is None or ranks.device.type != "cpu" else self._positions(ranks)
        )

    def _positions(self, ranks: Members) -> Tensor | None:
        """The positions of the first rank's example: all ranks plan with the same."""
        own = self.batch.get(POSITIONS)
        own_values = own.tolist() if isinstance(own, Tensor) and own.dim() == 2 else None
        values = broadcast_json(own_values, ranks.control, "cpu")
        return None if values is None else torch.tensor(values)

    def _first(self, example: Batch) -> Captured:
        """Capture the first batch, and decide which entries are left out of all batches."""
        self.unread: tuple[str, ...] = ()
        boundaries = documents_of(example)
        if not boundaries:
            return self._with_or_without_mask(example)
        captured = self._with_or_without_mask(example)
        try:
            bare = self.capture(
                without(self.prepared(example), boundaries), training=True, outputs=self.trained
            )
        except TraceError:
            return captured
        if not same_graph(captured, bare):
            return captured
        self.unread = boundaries
        return replace(bare, notes=captured.notes)

    def _with_or_without_mask(self, example: Batch) -> Captured:
        """Capture the first batch, and decide whether attention masks of ones are left out of all
        batches.
        """
        self.drops_full_mask = self.is_causal = False
        if self._loss is not None and self._loss.sees_batch:
            return self.capture(example, training=True, outputs=self.trained)
        bare = without_mask(example)
        try:
            maskless = self.capture(bare, training=True, outputs=self.trained)
        except TraceError:
            if len(bare) == len(example):
                raise
            maskless = None
        self.drops_full_mask = maskless is not None and _masks_nothing(maskless)
        self.is_causal = False
        if maskless is not None and self.drops_full_mask:
            self.is_causal = attends_causally(maskless.module.graph)
        if maskless is not None and len(self.prepared(example)) == len(bare):
            return maskless
        return self.capture(example, training=True, outputs=self.trained)

    def prepared(self, batch: Batch) -> Batch:
        """The batch as it is captured and run."""
        batch = without(batch, self.unread)
        return without_full_mask(batch) if self.drops_full_mask else batch

    def adds_up(self, batch: Batch) -> bool:
        """Whether the loss of a step is the sum of the losses of batches like this one; else it is
        their mean.
        """
        adds_up = None if self._loss is None else self._loss.adds_up
        return "num_items_in_batch" in batch if adds_up is None else adds_up

    @property
    def trained(self) -> tuple[str, ...]:
        """The outputs of training."""
        return ("loss",) if self._loss is None else self._loss.trained

    def capture(
        self,
        batch: Batch,
        training: bool,
        outputs: Sequence[str],
        compute: LossFunction | None = None,
    ) -> Captured:
        """Capture a prepared batch.

        outputs: see ``CapturedModel.evaluate``.
        compute: computes the outputs; None: the model and its loss do.

        Raises TraceError.
        """
        with unguarded(self.model), self._as_first():
            captured = capture(self.model, batch, **self._options(training, outputs, compute))
        if training and not captured.shapes:  # a graph without parameters cannot be cut
            reason = "it reads no parameter of the model"
            raise TraceError(
                "loss", "(of this batch)", reason, "Compute it from the model's outputs"
            )
        check_operands(captured)
        self._share(captured)
        return captured

    @contextmanager
    def _as_first(self) -> Iterator[None]:
        """Let the parameters train that did when the model was first captured: a callback may have
        frozen some since.

        All captures compute the same gradients.
        """
        own = dict(self.model.named_parameters())
        changed = {
            name: p.requires_grad
            for name, p in own.items()
            if p.requires_grad != self._trains.get(name)
        }
        try:
            for name in changed:
                own[name].requires_grad = self._trains.get(name, changed[name])
            yield
        finally:
            for name, trains in changed.items():
                own[name].requires_grad = trains

    def _options(
        self, training: bool, outputs: Sequence[str], compute: LossFunction | None
    ) -> dict[str, Any]:
        if compute is None and self._loss is not None:
            compute = self._loss.compute if "loss" in outputs else _without_loss
        return {"training": training, "dtype": self._cast, "outputs": outputs, "compute": compute}

    def lengths(
        self,
        batch: Batch,
        training: bool,
        outputs: Sequence[str],
        compute: LossFunction | None,
        axes: Axes,
        like: Origin,
        length: int,
    ) -> Lengths | None:
        """The lengths for which a capture computes the same; see ``lengths_of``."""
        with unguarded(self.model), self._as_first():
            return lengths_of(
                self.model,
                batch,
                axes,
                like,
                length=length,
                **self._options(training, outputs, compute),
            )

    def share_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let all captures, past and future, read and update these tensors instead of the buffers
        of these names.
        """
        self._shared = dict(buffers)
        self._share(self.captured)

    def _share(self, captured: Captured) -> None:
        for name in captured.buffers:
            if name in self._shared:
                path, _, key = name.rpartition(".")
                setattr(captured.module.get_submodule(path), key, self._shared[name].detach())

    def _check_dtypes(self) -> None:
        for name, dtype in self.captured.dtypes.items():
            if name in self.captured.trainable and dtype not in DTYPES.values():
                reason = (
                    f"its dtype is {str(dtype).removeprefix('torch.')}, and weights train "
                    f"in {' or '.join(DTYPES)}"
                )
                raise TraceError("parameter", name, reason, "Cast the model, or freeze it")

    def _check_case(self, ranks: Members) -> None:
        """Raise PlanError if ranks have captured different branches, ConfigError if they have
        different graphs.
        """
        guards = self.captured.guards
        graph = self.captured.module.graph
        case = (
            hashlib.sha256(f"{graph}{guards.module.graph}".encode()).hexdigest() if guards else ""
        )
        cases = gather_json(case, ranks.control, "cpu")
        if len(dict.fromkeys(cases)) > 1:
            line = guards.lines[0] if guards else "the model"
            reason = f"{line} branches on its values, and they differ between ranks"
            raise PlanError(
                "example batch", f"(rank {ranks.rank})", reason, "Pass the same batch on every rank"
            )
        check_same_graph(self.captured, self.example, ranks)
