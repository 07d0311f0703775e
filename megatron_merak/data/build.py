"""From the flags of a run to its tokenizer, its three data sets and their loaders."""

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..config import HFDataConfig, RunConfig
from ..errors import DataError
from . import tokenizer as tokenizers
from .blend import BlendedDataset, normalized, parse_blend, samples_per_dataset
from .chat_dataset import ChatDataset
from .gpt_dataset import GPTDataset
from .gpt_index import SPLITS, split_bounds
from .indexed_dataset import IndexedDataset
from .mock import MockIndexedDataset
from .prefixes import check_dataset
from .source_part import GPTDatasetConfig, TokenSource
from .sources import source_of
from .stream import Stream
from .stream_build import check_streams, stream_of, valid_stream_of
from .tokenizer import NullTokenizer, Tokenizer, details_of

logger = logging.getLogger(__name__)
Samples = GPTDataset | ChatDataset
Dataset = Samples | BlendedDataset | Stream


class Datasets(NamedTuple):
    """One data set per part of the data; None if the run needs no sample of it or it has
    weight 0.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer. Raises `DataError`.

    Generated data without --tokenizer-type has --vocab-size ids; the last one ends a document.
    """
    data = config.data
    vocab_size = config.model.vocab_size
    if _is_generated(config) and vocab_size is not None:
        return NullTokenizer(vocab_size - 1)
    return tokenizers.build_tokenizer(
        data.tokenizer, data.tokenizer_model, vocab_size, details_of(data)
    )


def check_tokenizer(config: RunConfig) -> None:
    """Check that the files of the tokenizer are there, before they are read. Raises `DataError`."""
    data = config.data
    tokenizers.tokenizer_paths(data.tokenizer, data.tokenizer_model, details_of(data))


def _is_generated(config: RunConfig) -> bool:
    return config.data.mock_data and config.data.tokenizer is None


def vocabulary(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return the number of token ids before padding: --vocab-size if larger than the tokenizer's.

    Raises `DataError` if it is smaller.
    """
    size = config.model.vocab_size
    # The vocabulary of a NullTokenizer is --vocab-size and the end of a document.
    if size is None or isinstance(tokenizer, NullTokenizer):
        return tokenizer.vocab_size
    if size < tokenizer.vocab_size:
        reason = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}"
        raise DataError(
            "--vocab-size", size, reason, f"Leave it out, or give at least {tokenizer.vocab_size}"
        )
    return size


def samples_wanted(config: RunConfig, replicas: int) -> tuple[int, int, int]:
    """Return the samples of the train, valid and test parts that the run may need, over all
    replicas of the model.

    There is one evaluation of --eval-iters global batches per --eval-interval and one at the end,
    and one test.
    """
    train = config.train
    batches = config.batches_over(replicas)
    batch = batches.largest
    evaluations = 1
    iterations = config.iterations(batches)
    if train.eval_interval is not None:
        evaluations += iterations // train.eval_interval
    per_evaluation = train.eval_iters * batch
    return train.train_samples or iterations * batch, evaluations * per_evaluation, per_evaluation


def check_files(config: RunConfig) -> None:
    """Check that the files of a run's data are there: `build_datasets` may come minutes later.
    Raises `DataError`.
    """
    check_streams(config)
    # whether a part is needed at all does not depend on the replicas
    for part, samples in enumerate(samples_wanted(config, replicas=1)):
        source = source_of(config.data, part)
        wanted = samples and source.words
        prefixes = parse_blend(source.flag, source.words)[0] if wanted else []
        for prefix in prefixes:
            check_dataset(prefix, source.flag)


def build_datasets(config: RunConfig, tokenizer: Tokenizer, replicas: int) -> Datasets:
    """Return the run's data sets, equal on every rank, for a number of replicas of the model.

    Needs no communication: the first process of a host builds indices, and the others map them.
    Raises `DataError` for data that is missing, damaged, empty or too small.
    """
    pad = tokenizer.pad
    shared = GPTDatasetConfig(
        sequence_length=config.model.seq_length,
        random_seed=config.train.seed,
        vocab_size=vocabulary(config, tokenizer),
        pad=-1 if pad is None else pad,
        masked_eod=tokenizer.eod if config.data.eod_mask_loss else None,
    )
    builder = DatasetBuilder(config, tokenizer, shared)
    wanted = samples_wanted(config, replicas)
    train, valid, test = (builder.build(part, samples) for part, samples in enumerate(wanted))
    if wanted[0]:
        train = stream_of(config, tokenizer, shared, replicas) or train
    if wanted[1]:
        valid = valid_stream_of(config, tokenizer, shared, replicas) or valid
    return Datasets(train, valid, test)


class DatasetBuilder:
    """Builds the parts of one run's data, opening every file once."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, shared: GPTDatasetConfig):
        self.config = config
        self.data = config.data
        self.shared = shared
        self._mock = (
            MockIndexedDataset(tokenizer.vocab_size, tokenizer.eod)
            if config.data.mock_data
            else None
        )
        self._sources: dict[str, IndexedDataset] = {}
        packs = isinstance(self.data, HFDataConfig) and self.data.sft
        self._kind = ChatDataset if packs else GPTDataset

    def build(self, part: int, samples: int) -> Dataset | None:
        """Return the part `SPLITS[part]` with at least `samples` samples."""
        if samples == 0:
            return None
        if self._mock is not None:
            return self._single(self._mock, part, samples)
        source = source_of(self.data, part)
        if not source.words:
            return None
        prefixes, weights = parse_blend(source.flag, source.words)
        if len(prefixes) == 1 and (weights is None or self.data.by_part):
            return self._single(self._source(prefixes[0]), part, samples)
        files = [self._source(prefix) for prefix in prefixes]
        return self._blend(source.flag, files, weights, part, samples)

    def _source(self, prefix: str) -> IndexedDataset:
        if prefix not in self._sources:
            self._sources[prefix] = IndexedDataset(prefix, mmap=not self.data.no_mmap_bin_files)
        return self._sources[prefix]

    def _single(self, source: TokenSource, part: int, samples: int | None) -> Samples | None:
        bounds = self._bounds(source, part)
        if bounds is None:
            return None
        cache = self.data.data_cache_path or f"{source.prefix}/cache/{self._kind.__name__}_indices"
        path_to_cache = None if self._mock is not None else Path(cache)
        config = dataclasses.replace(self.shared, path_to_cache=path_to_cache)
        return self._kind(source, bounds, samples, SPLITS[part], config=config)

    def _bounds(self, source: TokenSource, part: int) -> tuple[int, int] | None:
        """Return the part's range of sequences.

        An evaluation that was not requested by --eval-interval is left out, with a warning, if the
        data is too small for it.
        """
        if self.data.by_part:
            return 0, len(source)
        bounds = split_bounds(self.data.split_weights, len(source))[part]
        optional = SPLITS[part] == "test" or (
            SPLITS[part] == "valid" and self.config.train.eval_interval is None
        )
        if bounds is not None and bounds[0] == bounds[1] and optional:
            logger.warning(
                "no %s data: --split %s leaves none of the %d sequences of %s",
                SPLITS[part],
                self.data.split,
                len(source),
                source.prefix,
            )
            return None
        return bounds

    def _blend(
        self,
        flag: str,
        sources: Sequence[TokenSource],
        weights: Sequence[float] | None,
        part: int,
        samples: int,
    ) -> BlendedDataset | None:
        cache = None if self.data.data_cache_path is None else Path(self.data.data_cache_path)
        if weights is not None:
            shares = normalized(weights)
            sizes = samples_per_dataset(shares, samples, self.data.mid_level_dataset_surplus)
            datasets = self._each(sources, part, sizes)
            if not any(datasets):
                return None
            complete = self._complete(flag, sources, datasets, part)
            return BlendedDataset(
                complete, shares, sum(samples_per_dataset(shares, samples)), cache
            )
        once = self._each(sources, part, [None] * len(sources))
        present = [dataset for dataset in once if dataset is not None]
        if not present:
            return None
        sizes = [len(dataset) for dataset in present]
        if sum(sizes) < samples:
            reason = (
                f"without weights they are read once, {sum(sizes)} {SPLITS[part]} samples, "
                f"but {samples} are needed"
            )
            raise DataError(
                flag, f"of {len(sources)} prefixes", reason, "Give weights, to read them repeatedly"
            )
        return BlendedDataset(present, sizes, samples, cache)

    def _each(
        self, sources: Sequence[TokenSource], part: int, sizes: Sequence[int | None]
    ) -> list[Samples | None]:
        """Return the part of each source, made by --num-dataset-builder-threads threads."""

        def made(source: TokenSource, size: int | None) -> Samples | None:
            return self._single(source, part, size)

        with ThreadPoolExecutor(self.data.num_dataset_builder_threads) as pool:
            return list(pool.map(made, sources, sizes))

    def _complete(
        self,
        flag: str,
        sources: Sequence[TokenSource],
        datasets: Sequence[Samples | None],
        part: int,
    ) -> list[Samples]:
        """Return ``datasets``. Raises DataError if one has no data of that part."""
        complete = []
        for source, dataset in zip(sources, datasets, strict=True):
            if dataset is None:
                reason = f"it has no {SPLITS[part]} data, while others of the blend do"
                raise DataError(
                    flag, source.prefix, reason, "Give a larger dataset, or leave it out"
                )
            complete.append(dataset)
        return complete
