"""Evaluation and prediction: every sample once, in the dataset's order, whatever the layout.

Batch k goes to replica k mod R, several at a time so that a pipeline is filled. Losses and
predictions are put back into the order of batches, so metrics, including the loss, equal those of
transformers in one process. (In several processes, transformers counts the samples that fill the
last batches twice, and weights batches by their targets.)
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from ...errors import ConfigError, DataError, MerakError
from ...graph.capture.outputs import nested
from ...parallel.agree import broadcast_json, gather_json, together
from ...stages.blueprint import ModelTask
from .exchange import from_rank
from .model_facts import ModelFacts
from .neutral import NeutralPadding
from .order import Batch, Division, Loading
from .packed import check_documents
from .same_batches import check_everywhere

PAD = -100


@dataclass
class EvaluationBatches:
    """This replica's batches in rounds; ``len`` is the number of batches of the longest replica,
    for progress bars.
    """

    loading: Loading
    round_size: int

    @property
    def total(self) -> int | None:
        if self.loading.streamed:
            return None
        return Division(
            self.loading.count, self.loading.batch_size, 1, self.loading.drop_last
        ).batches

    def samples(self, number: int) -> int | None:
        """Return the samples of batch ``number``, which a collator may pack into fewer rows; None
        for a stream.
        """
        loading = self.loading
        return (
            None
            if loading.streamed
            else len(Division(loading.count, loading.batch_size).rows(number))
        )

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("a stream has no length")
        return -(-self.total // self.loading.replicas)

    @property
    def dataset(self) -> object:
        return self.loading.dataset

    def rounds(self) -> Iterator[tuple[int, int, list[Batch]]]:
        """Yield (first batch, number of batches over all replicas, this replica's batches) of each
        round.
        """
        loading = self.loading
        step = self.round_size * self.loading.replicas
        if isinstance(loading.dataset, IterableDataset):
            stream = replace(loading, replica=0, replicas=1).epoch(0)
            first = 0
            while chunk := list(islice(stream, step)):
                yield first, len(chunk), chunk[loading.replica :: loading.replicas]
                first += len(chunk)
            return
        assert self.total is not None, "only streams have no total"
        own_batches = loading.some(range(loading.replica, self.total, loading.replicas))
        for first in range(0, self.total, step):
            count = min(step, self.total - first)
            yield (
                first,
                count,
                list(islice(own_batches, len(range(loading.replica, count, loading.replicas)))),
            )


@dataclass(frozen=True)
class ReportedOutputs:
    """Outputs that are no predictions.

    name: of the outputs.
    take: called with a batch as it was loaded, as it ran, and its outputs.
    """

    name: str
    take: Callable[[Batch, Batch, Mapping[str, Tensor]], None]

    def has(self, output: str) -> bool:
        return output.partition(".")[0] == self.name


@dataclass(frozen=True)
class Round:
    """Batches that run together.

    first:    number of the first one.
    count:    how many they are over all replicas.
    batches:  this replica's, as they were loaded.
    plain:    the same, as the model takes them.
    names:    of the outputs to compute.
    has_loss: whether the batches have labels.
    """

    first: int
    count: int
    batches: list[Batch]
    plain: list[Batch]
    names: tuple[str, ...]
    has_loss: bool


@dataclass
class Evaluation:
    """One evaluation. ``run`` is collective over all ranks.

    engine:      a CapturedModel.
    loss_only:   whether predictions are not needed.
    everyone:    whether all ranks keep predictions; else the first does.
    after_batch: called once per batch, for progress.
    report:      takes outputs that are no predictions.
    """

    batches: EvaluationBatches
    engine: Any
    facts: ModelFacts
    neutral: NeutralPadding
    args: Any
    loss_only: bool
    everyone: bool
    after_batch: Callable[[], None]
    preprocess: Callable | None = None
    report: ReportedOutputs | None = None
    losses: list[tuple[int, float | None, int]] = field(default_factory=list)
    samples: int = 0

    def run(self, compute_metrics: Callable | None, prefix: str) -> EvalLoopOutput:
        concatenate = self.args.eval_do_concat_batches
        containers = {
            name: EvalLoopContainer(concatenate, PAD)
            for name in ("predictions", "labels", "inputs")
        }
        replicas = self.batches.loading.replicas
        for round_ in self._rounds():
            outputs = self._forward(round_)
            for place in range(0 if self.loss_only else round_.count):
                result = self._collected(place, round_, outputs)
                for name, container in containers.items():
                    if result[name] is not None and (self.everyone or self.rank == 0):
                        container.add(result[name])
            for _ in range(-(-round_.count // replicas)):
                self.after_batch()
        losses, samples = self._losses()
        arrays = {name: container.get_arrays() for name, container in containers.items()}
        metrics = self._metrics(compute_metrics, arrays, losses, prefix)
        return EvalLoopOutput(arrays["predictions"], arrays["labels"], metrics, samples)

    def _collected(self, place: int, round_: Round, outputs: list[dict]) -> dict:
        """Return on every rank the outputs of a round's batch at index ``place``. Collective.

        outputs: of `_forward`, on the rank that has them.
        """
        replica = place % self.batches.loading.replicas
        row = place // self.batches.loading.replicas
        owner = self.engine.output_rank(replica)
        return from_rank(owner, outputs[row] if self.rank == owner else None, self.control)  # type: ignore[return-value]

    def _rounds(self) -> Iterator[Round]:
        """Yield the rounds, after checking that ranks of a replica have the same batches, with
        numbers that have rows in the model's tables. Collective.
        """
        for first, count, batches in chain(self.batches.rounds(), [(0, 0, [])]):
            round_ = self._round(first, count, batches)
            check_everywhere(batches, count, self.neutral.mesh, self._outside(round_))
            if self.facts.flash:
                with together(self.control, "cpu"):
                    check_documents(batches, True)
            if count:
                yield round_

    @property
    def rank(self) -> int:
        return self.neutral.mesh.rank

    @property
    def control(self) -> dist.ProcessGroup | None:
        return self.neutral.mesh.control

    def _forward(self, round_: Round) -> list[dict]:
        """Return the outputs of this replica's batches of a round; an empty list on ranks without
        them.
        """
        names = round_.names
        batches = round_.batches
        padded = self._padded(round_.plain, names)
        outputs = self.engine.evaluate(padded, names)
        if outputs is None:
            return []
        loading = self.batches.loading
        results = []
        for row, (batch, full, output) in enumerate(
            zip(round_.plain, padded, outputs, strict=True)
        ):
            number = round_.first + loading.replica + row * loading.replicas
            rows = self.batches.samples(number) or find_batch_size(batches[row]) or 1
            if self.rank == self.engine.output_rank(loading.replica):
                self.losses.append(
                    (number, float(output["loss"]) if round_.has_loss else None, rows)
                )
                if self.report is not None:
                    self.report.take(batches[row], full, output)
            if not self.loss_only:
                returned = {
                    name: x
                    for name, x in output.items()
                    if not (self.report and self.report.has(name))
                }
                cropped = {
                    name: self.neutral.crop(name, x, batch, full, names)
                    for name, x in returned.items()
                }
                results.append(self._result(batches[row], cropped))
        return results

    def _round(self, first: int, count: int, batches: list[Batch]) -> Round:
        has_loss = bool(batches) and self.facts.has_loss(batches[0])
        names = (("loss",) if has_loss else ()) + (() if self.loss_only else self.facts.predictions)
        names = (names or ("loss",)) + (() if self.report is None else (self.report.name,))
        plain = [self._counted(self.engine.read(batch), has_loss) for batch in batches]
        return Round(first, count, batches, plain=plain, names=names, has_loss=has_loss)

    def _outside(self, round_: Round) -> MerakError | None:
        """Return the error for a number of a batch that has no row in what it is looked up in; None
        if all have.
        """
        try:
            # Padded: else every length would be captured by itself.
            padded, _ = self.neutral.propose(round_.plain, round_.names)
            self.engine.refuse_outside(padded, False, ModelTask(None, round_.names))
        except DataError as error:
            return error
        return None

    def _counted(self, batch: Batch, has_loss: bool) -> Batch:
        items = self.facts.items(batch) if has_loss and self.engine.accepts_num_items else None
        return batch | ({} if items is None else {"num_items_in_batch": items.float()})

    def _padded(self, plain: list[Batch], names: tuple[str, ...]) -> list[Batch]:
        """Return the batches of a round, padded as far as a trial showed that to be neutral.
        Collective.
        """
        padded, unsettled = self.neutral.propose(plain, names)
        while self.neutral.anywhere(unsettled is not None):
            place = unsettled or 0
            own = plain[place] if plain else None
            changed = padded[place] if plain else None
            self.neutral.settle(self.engine, own, changed, names)
            padded, unsettled = self.neutral.propose(plain, names)
        return padded

    def _result(self, batch: Batch, output: Mapping) -> dict:
        labels = self.facts.labels(batch)
        predictions = tuple(
            nested({name: _on_host(x) for name, x in output.items() if name != "loss"}).values()
        )
        predictions = predictions[0] if len(predictions) == 1 else predictions
        if self.preprocess is not None:
            predictions = self.preprocess(predictions, labels)
        inputs = batch[self.facts.main_input] if "inputs" in self.args.include_for_metrics else None
        return {"predictions": predictions, "labels": labels, "inputs": inputs}

    def _losses(self) -> tuple[np.ndarray | None, int]:
        """Return for each sample the loss of its batch, [samples] fp32, or None without labels; and
        the number of samples.
        """
        entries = sorted(
            entry for rank in gather_json(self.losses, self.control, "cpu") for entry in rank
        )
        samples = sum(rows for _, _, rows in entries)
        if not entries or entries[0][1] is None:
            return None, samples
        losses = np.array([loss for _, loss, _ in entries], dtype=np.float32)
        return np.repeat(losses, [rows for _, _, rows in entries]), samples

    def _metrics(
        self, compute: Callable | None, arrays: dict, losses: np.ndarray | None, prefix: str
    ) -> dict:
        metrics: dict = {}
        known = arrays["predictions"] is not None and arrays["labels"] is not None
        with together(self.control, "cpu"):
            if compute is not None and not self.loss_only and self.rank == 0 and known:
                wanted = self.args.include_for_metrics
                prediction = EvalPrediction(
                    arrays["predictions"],
                    arrays["labels"],
                    losses=losses if "loss" in wanted else None,
                    inputs=arrays["inputs"] if "inputs" in wanted else None,
                )
                metrics = plain_metrics(denumpify_detensorize(compute(prediction)))
        metrics = dict(broadcast_json(metrics, self.control, "cpu"))
        if losses is not None:
            finite = np.isfinite(losses)
            use = losses[finite] if self.args.logging_nan_inf_filter and finite.any() else losses
            metrics[f"{prefix}_loss"] = use.mean().item()
        named = {key: value for key, value in metrics.items() if key.startswith(f"{prefix}_")}
        return named | {
            f"{prefix}_{key}": value for key, value in metrics.items() if key not in named
        }


def _on_host(x: Tensor) -> Tensor:
    """Return a tensor on the host; fp16 becomes fp32, as in transformers, which converts bf16
    later.
    """
    x = x.detach().cpu()
    return x.float() if x.dtype == torch.float16 else x


def plain_metrics(metrics: object) -> dict:
    """Return the result of compute_metrics, if it can be logged and stored. Raises ConfigError."""
    remedy = "Return a dictionary of numbers with distinct names"
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            "compute_metrics", type(metrics).__name__, "it returned no dictionary", remedy
        )
    for name, value in metrics.items():
        try:
            known = isinstance(name, str) and json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            known = False
        # nan is not equal to itself
        if not known and not (isinstance(value, float) and isinstance(name, str)):
            reason = f"its {name!r} is a {type(value).__name__}, which cannot be logged or saved"
            raise ConfigError("compute_metrics", repr(value)[:60], reason, remedy)
    return dict(metrics)
