"""A model as its batches show it: the capture of the first one, and those of other shapes and cases that follow it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError, TraceError
from ..graph.capture.capture import accepts_num_items, capture, lengths_of
from ..graph.capture.captured import Captured, Origin
from ..graph.capture.lengths import Axes, Lengths
from ..graph.capture.outputs import LossFunction
from ..graph.ir.nodes import attends_causally, is_op
from ..graph.lowering.documents import POSITIONS
from ..parallel.agree import broadcast_json, gather_json, together
from ..parallel.mesh import Mesh
from .documents import documents_of, same_work, without
from .guard import check_weights, unguard, unguarded
from .precision import DTYPES, cast_of, check_operands
from .same_model import check_same_graph, check_same_model

Batch = Mapping[str, Any]
MASK = "attention_mask"


def batch_size(batch: Batch) -> tuple[int, int]:
    """Samples of a batch, and the length of its longest sequence of tokens (0 where there is none)."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0]
    length = max((value.shape[1] for value in tensors if value.dim() > 1 and not value.is_floating_point()), default=0)
    return tensors[0].shape[0], length


def shapes_of(batch: Batch) -> tuple[tuple[str, tuple[int, ...], object], ...]:
    """What of a batch a capture depends on: shapes and dtypes of its tensors, and values that are no tensors."""
    entries = [(name, value) for name, value in sorted(batch.items()) if value is not None]
    return tuple(
        (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, (), repr(value))
        for name, value in entries
    )


def without_mask(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != MASK}


def without_full_mask(batch: Batch) -> Batch:
    """The batch without an attention mask that masks nothing: collators add one, and attention is faster without."""
    mask = batch.get(MASK)
    full = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())
    return without_mask(batch) if full else batch


def _masks_nothing(captured: Captured) -> bool:
    """Whether a capture without an attention mask is that of one that masks nothing, too: the model may make a mask of
    its own from the token ids then, or decide by values."""
    tokens = [n for n in captured.module.graph.find_nodes(op="placeholder") if n.target == "input_ids"]
    looked_up = all(is_op(user, "embedding") for node in tokens for user in node.users)
    return looked_up and not captured.guards


@dataclass(frozen=True)
class OwnLoss:
    """A loss that is captured with the model, in place of that of its forward.

    compute: computes it, as of ``capture``. counts: it takes ``num_items_in_batch``, as an entry of the batch. adds_up:
    losses of micro-batches are shares of the step's and add up; None: those that count its items do. sees_batch: it may
    read any entry, so that none is left out. reports: what else training hands out of what it computes, by name.
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

    model: any module, with weights or without; it is not changed. example: the first micro-batch. dtype: of parameters
    and activations, but for the fp32 part of a bf16 or fp16 model. autocast: a model that does not run with parts of
    different dtypes computes in ``dtype`` alone. mesh: the job's ranks, which must have been given the same model and
    captured the same; None: nothing is compared. loss: in place of the model's own. Collective over these ranks. Raises
    TraceError, ConfigError, PlanError.

    ``captured``: of the example. ``batch``: that as it runs. ``example``: its shapes. ``size``: its samples and its
    length in tokens. ``is_causal``: without an attention mask no token looks at later ones. ``unread``: entries that
    are left out, since the model does not read them. ``positions``: int64 [b, s] of the example's tokens, the same on
    all ranks, where they run on CPUs, which attend to the documents of packed rows one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Batch,
        dtype: str = "float32",
        autocast: bool = False,
        mesh: Mesh | None = None,
        loss: OwnLoss | None = None,
    ):
        self.model, self.dtype, self._loss = model, dtype, loss
        self.accepts_num_items = accepts_num_items(model) if loss is None else loss.counts
        self._shared: dict[str, Tensor] = {}
        self._cast = cast_of(model, DTYPES[dtype])
        if mesh is not None:
            with together(mesh.control, "cpu"):
                if mesh.rank == 0:
                    check_weights(model)
            unguard(model)  # the first rank's weights are everybody's
            check_same_model(model, mesh)
        try:
            self.captured = self._first(example)
        except TraceError:
            if self._cast is not None or not autocast:
                raise
            self._cast = DTYPES[dtype]
            captured = self._first(example)
            note = f"The model does not run with the dtypes of its weights: all compute in {dtype}."
            self.captured = replace(captured, notes=(*captured.notes, note))
        self.batch = self.prepared(example)
        self.example, self.size = shapes_of(self.batch), batch_size(example)
        self._check_dtypes()
        if mesh is not None:
            self._check_case(mesh)
        self.positions = None if mesh is None or mesh.device.type != "cpu" else self._positions(mesh)

    def _positions(self, mesh: Mesh) -> Tensor | None:
        """Those of the first rank's example; all ranks plan by them."""
        found = self.batch.get(POSITIONS)
        told = found.tolist() if isinstance(found, Tensor) and found.dim() == 2 else None
        values = broadcast_json(told, mesh.control, "cpu")
        return None if values is None else torch.tensor(values)

    def _first(self, example: Batch) -> Captured:
        """The capture of the first batch; decides which entries are left out."""
        self.unread: tuple[str, ...] = ()
        named = documents_of(example)
        if not named:
            return self._with_or_without_mask(example)
        captured = self._with_or_without_mask(example)
        try:
            bare = self.capture(without(self.prepared(example), named), training=True, outputs=self.trained)
        except TraceError:
            return captured
        if not same_work(captured, bare):
            return captured
        self.unread = named
        return replace(bare, notes=captured.notes)

    def _with_or_without_mask(self, example: Batch) -> Captured:
        """The capture of the first batch; decides whether a mask that masks nothing is left out."""
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
        self.is_causal = self.drops_full_mask and attends_causally(maskless.module.graph)
        if len(self.prepared(example)) == len(bare):
            return maskless
        return self.capture(example, training=True, outputs=self.trained)

    def prepared(self, batch: Batch) -> Batch:
        """The batch as it is captured and run."""
        batch = without(batch, self.unread)
        return without_full_mask(batch) if self.drops_full_mask else batch

    def adds_up(self, batch: Batch) -> bool:
        """Whether losses of batches like this one are shares of their step's loss, which else is their mean."""
        told = None if self._loss is None else self._loss.adds_up
        return "num_items_in_batch" in batch if told is None else told

    @property
    def trained(self) -> tuple[str, ...]:
        """The outputs of training."""
        return ("loss",) if self._loss is None else self._loss.trained

    def capture(
        self, batch: Batch, training: bool, outputs: Sequence[str], compute: LossFunction | None = None
    ) -> Captured:
        """The graph of a prepared batch. outputs: as of ``CapturedTrainer.evaluate``. compute: computes them, in place
        of the model and its loss. Raises TraceError."""
        how = self._how(training, outputs, compute)
        with unguarded(self.model):
            captured = capture(self.model, batch, **how)
        check_operands(captured)
        self._share(captured)
        return captured

    def _how(self, training: bool, outputs: Sequence[str], compute: LossFunction | None) -> dict[str, Any]:
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
        """For which lengths a capture does the same; see ``lengths_of``."""
        with unguarded(self.model):
            return lengths_of(self.model, batch, axes, like, length, **self._how(training, outputs, compute))

    def share_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let every capture, those made already included, read and change these tensors, by the buffers' names."""
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
                reason = f"its dtype is {str(dtype).removeprefix('torch.')}, and weights train in {' or '.join(DTYPES)}"
                raise TraceError("parameter", name, reason, "Cast the model, or freeze it")

    def _check_case(self, mesh: Mesh) -> None:
        """A model that decides by values of its batch was captured for the same case on every rank, or PlanError."""
        guards, graph = self.captured.guards, self.captured.module.graph
        case = hashlib.sha256(f"{graph}{guards.module.graph}".encode()).hexdigest() if guards else ""
        cases = gather_json(case, mesh.control, "cpu")
        if len(dict.fromkeys(cases)) > 1:
            line = guards.lines[0] if guards else "the model"
            reason = f"{line} branches on its values, and they differ between ranks"
            raise PlanError("example batch", f"(rank {mesh.rank})", reason, "Pass the same batch on every rank")
        check_same_graph(self.captured, self.example, mesh)
