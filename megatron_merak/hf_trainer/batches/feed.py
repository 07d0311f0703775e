"""From datasets to the input of a step: this replica's micro-batches, and the number of targets in
all of them.
"""

import atexit
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers.trainer_utils import has_length

from ...errors import ConfigError, DataError, MerakError
from ...parallel.agree import gather_json, raise_together, together
from ...parallel.mesh import Mesh
from ...stages.blueprint import shapes_of
from ...stages.captured import CapturedModel
from ..arguments.merak_arguments import MerakArguments
from .columns import UsedColumns
from .leaner import Leaner, in_one_row, without_masks
from .model_facts import ModelFacts
from .neutral import TRAINING, NeutralPadding
from .order import Batch, Loading, epoch_order, samples_of
from .packed import check_documents
from .same_batches import differ_here, different
from .samplers import Drawn, EpochSampler, LengthOrder, length_of
from .workers import end_workers, loading_context, outlast_signals


@dataclass(frozen=True)
class Feed:
    """Makes batches.

    collator:  makes a batch of samples.
    tokenizer: names the samples' main entry, for grouping by length.
    """

    args: MerakArguments
    mesh: Mesh
    facts: ModelFacts
    neutral: NeutralPadding
    collator: Callable[[list], Mapping[str, Any]]
    tokenizer: object = None
    begun: dict = dataclasses.field(default_factory=dict)  # of Loading
    rows: Leaner = dataclasses.field(default_factory=in_one_row)
    masks: Leaner = dataclasses.field(default_factory=without_masks)

    def training(self, dataset: Dataset | None, sampler: Sampler | None) -> Loading:
        """Return how this replica's training batches are loaded. Raises ConfigError and DataError.

        sampler: of the samples of epochs; None: the dataset's order; a stream has none.
        """
        args = self.args
        if dataset is None:
            raise ConfigError(
                "train_dataset", None, "training needs one", "Give MerakTrainer a train_dataset"
            )
        return self._loading(dataset, sampler, args.per_device_train_batch_size, self._seed)

    def evaluation(self, dataset: Dataset, sampler: Sampler | None) -> Loading:
        """Return how this replica's batches of an evaluation are loaded. sampler: see
        ``training``.
        """
        return self._loading(dataset, sampler, self.args.per_device_eval_batch_size, self.args.seed)

    def _loading(
        self, dataset: Dataset, sampler: Sampler | None, batch_size: int, seed: int
    ) -> Loading:
        loading = Loading(
            dataset,
            self._collate(),
            batch_size,
            replica=self.mesh.dp_rank,
            replicas=self.mesh.grid.dp,
            seed=seed,
            drop_last=self.args.dataloader_drop_last,
            options=self._options(),
            begun=self.begun,
        )
        if loading.streamed or sampler is None:
            return loading
        order = (
            sampler.order
            if isinstance(sampler, EpochSampler)
            else Drawn(sampler, self._seed, self.mesh.control)
        )
        if (samples := length_of(sampler)) is None:
            raise DataError(
                "sampler", type(sampler).__name__, "it has no length", "Give it __len__"
            )
        return dataclasses.replace(loading, order=order, samples=samples)

    @property
    def _seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _collate(self) -> Callable[[list], Mapping[str, Any]]:
        if not self.args.remove_unused_columns:
            return self.collator
        return UsedColumns(self.collator, self.facts.used_columns)

    def _options(self) -> dict[str, Any]:
        args = self.args
        workers = self.args.dataloader_num_workers
        pinned = args.dataloader_pin_memory and self.mesh.device.type == "cuda"
        options: dict[str, Any] = {"num_workers": workers, "pin_memory": pinned}
        if workers:
            options["worker_init_fn"] = outlast_signals
            atexit.unregister(end_workers)  # once, however many loaders there are
            atexit.register(end_workers)
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["multiprocessing_context"] = loading_context(
                args.dataloader_multiprocessing_context
            )
        return options

    def training_sampler(self, dataset: Dataset | None) -> EpochSampler | None:
        """Return the order of training samples by ``train_sampling_strategy``; None for a stream.
        Raises DataError.
        """
        args = self.args
        seed = self._seed
        if dataset is None or isinstance(dataset, IterableDataset):
            return None
        if not has_length(dataset):
            remedy = "Give the dataset __len__, or make it an IterableDataset"
            raise DataError("train_dataset", type(dataset).__name__, "it has no length", remedy)
        samples = len(dataset)
        strategy = args.train_sampling_strategy
        if strategy == "sequential":
            return EpochSampler(samples, lambda epoch: None)
        if strategy == "random":
            return EpochSampler(samples, lambda epoch: epoch_order(samples, seed, epoch))
        lengths = self._lengths(dataset)
        group = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * self.mesh.grid.dp
        )
        return EpochSampler(samples, LengthOrder(lengths, seed, group))

    def evaluation_sampler(self, dataset: Dataset | None) -> EpochSampler | None:
        """Return the order of an evaluation's samples: by length if training's is, else None, the
        dataset's.
        """
        if self.args.train_sampling_strategy != "group_by_length" or not has_length(dataset):
            return None
        lengths = self._lengths(dataset)
        group = self.args.per_device_eval_batch_size
        seed = self._seed
        return EpochSampler(len(dataset), LengthOrder(lengths, seed, group))

    def _lengths(self, dataset: Any) -> list[int]:
        """Return the length of every sample: from its column of lengths, or of its tokens."""
        name = self.args.length_column_name
        first = dataset[0]
        if name in first:
            return [int(dataset[index][name]) for index in range(len(dataset))]
        tokens = getattr(self.tokenizer, "model_input_names", [self.facts.main_input])[0]
        if tokens not in first:
            remedy = f"Give samples a column {name!r}, or choose another train_sampling_strategy"
            raise DataError(
                "train_dataset",
                f"(columns {', '.join(first)})",
                f"samples have no {tokens!r}",
                remedy,
            )
        return [len(dataset[index][tokens]) for index in range(len(dataset))]

    def example(
        self, train: Dataset | None, evaluation: Dataset | Mapping | None, epoch: int = 0
    ) -> Batch:
        """Return the first batch of all, the same on every rank and after every resumption.
        Collective.

        A stream is not iterated twice for it: the batch is the first one of ``epoch``, which
        continues after it.
        """
        if train is None and evaluation is None:
            raise ConfigError(
                "train_dataset",
                None,
                "without a batch the model cannot be captured",
                "Give a dataset",
            )
        if train is None:
            first: Any = (
                next(iter(evaluation.values())) if isinstance(evaluation, Mapping) else evaluation
            )
            loading = self.evaluation(first, None)
        else:
            loading = self.training(train, self.training_sampler(train))
        if loading.streamed:
            with together(self.mesh.control, "cpu"):
                batch = loading.first(epoch)
        else:
            batch = loading.first(0)
        self._check_alike(batch, None if loading.streamed else samples_of(loading.dataset))
        return batch

    def _check_alike(self, batch: Batch, length: int | None) -> None:
        """Raise DataError on every rank if ranks of one replica have different samples, or any
        ranks batches of different shapes or numbers.
        """
        own_digests = [str((length, shapes_of(batch))), _digest(batch)]
        digests = gather_json(own_digests, self.mesh.control, "cpu")
        values_of: dict[int, str] = {}
        for rank, (shapes, values) in enumerate(digests):
            replica = self.mesh.grid.coordinates(rank)[2]
            if shapes != digests[0][0] or values != values_of.setdefault(replica, values):
                reason = "its length or its first batch differs from that of lower ranks"
                remedy = (
                    "Build the same dataset on every rank: seed random choices and sort "
                    "unordered sources"
                )
                raise DataError("dataset", f"(on rank {rank})", reason, remedy)

    def prepare(
        self, batches: Sequence[Batch], count_items: bool, engine: CapturedModel | None = None
    ) -> tuple[list[Batch], int, int]:
        """Return a step's micro-batches, maybe with more padding or without masks, and counts over
        all replicas. Collective.

        count_items: whether each batch gets ``num_items_in_batch``, [] fp32: the targets of the
                     whole step.
        engine:      shows which changes of batches are neutral; None: batches stay as they are.

        The counts are elements of the main input and, with ``include_num_input_tokens_seen``,
        tokens among these.
        """
        facts = self.facts
        pad_id = self.neutral.padding.pad_id
        seen = self.args.include_num_input_tokens_seen
        items = [facts.items(batch) for batch in batches] if count_items else [None]
        targets = [int(item) for item in items if item is not None]
        known = len(targets) == len(items)
        changed, open_, failure = self._propose(batches, engine, known)
        counts = self._over_replicas(
            sum(targets) if known else 0,
            sum([facts.tokens(batch, pad_id, "all") for batch in batches]),
            sum([facts.tokens(batch, pad_id, seen) for batch in batches]),
            int(open_),
            int(failure is not None),
            int(engine is not None and differ_here(batches, self.mesh)),
        )
        if counts[5]:
            raise different()
        if counts[4]:
            raise_together(failure, self.mesh.control, "cpu")
        counted = {"num_items_in_batch": torch.tensor(float(counts[0]))} if known else {}
        if counts[3] and engine is not None:
            changed = self._settled(
                [{**engine.read(batch), **counted} for batch in batches], engine
            )
        return [batch | counted for batch in changed], counts[1], counts[2]

    def _changes(self, engine: CapturedModel | None) -> list[tuple[Callable, Callable]]:
        """Return, for each kind of change to training batches, how it is proposed and settled, in
        order.
        """
        rows, masks = (
            (partial(leaner.propose, engine=engine), partial(leaner.settle, engine))
            for leaner in (self.rows, self.masks)
        )
        padding = (
            partial(self.neutral.propose, purpose=TRAINING),
            partial(self.neutral.settle, engine, purpose=TRAINING),
        )
        return [rows, padding, masks]

    def _propose(
        self, batches: Sequence[Batch], engine: CapturedModel | None, counted: bool
    ) -> tuple[list[Batch], bool, MerakError | None]:
        """Return the batches with every change, and whether one of these has to be settled first.

        counted: whether they will get ``num_items_in_batch``.
        """
        changed = list(batches)
        open_ = False
        try:
            check_documents(batches, self.facts.flash)
            if engine is not None:
                changed = [{**engine.read(batch)} for batch in batches]
                for propose, _ in self._changes(engine):
                    changed, place = propose(changed)
                    open_ |= place is not None
                count = {"num_items_in_batch": torch.tensor(1.0)} if counted else {}
                engine.refuse_outside([batch | count for batch in changed], True)
        except MerakError as error:
            return list(batches), False, error
        return changed, open_, None

    def _settled(self, batches: list[Batch], engine: CapturedModel) -> list[Batch]:
        """Settle the changes of this step, and return its micro-batches as they run. Collective.

        A replica with nothing to settle takes part in the others' trials.
        """
        for propose, settle in self._changes(engine):
            changed, place = propose(batches)
            while self._over_replicas(int(place is not None))[0]:
                place = place or 0
                if not settle(batches[place], changed[place]):
                    return batches
                changed, place = propose(batches)
            batches = changed
        return batches

    def _over_replicas(self, *counts: int) -> list[int]:
        """Return the sums over all replicas."""
        if self.mesh.dp is None:
            return list(counts)
        summed = torch.tensor(counts, device=self.mesh.device)
        dist.all_reduce(summed, group=self.mesh.dp)
        return summed.tolist()


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(batch.items()):
        plain = (
            value.detach().cpu().contiguous().flatten().view(torch.uint8)
            if isinstance(value, Tensor)
            else None
        )
        digest.update(f"{name} {value!r}".encode() if plain is None else plain.numpy().tobytes())
    return digest.hexdigest()
