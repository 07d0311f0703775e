"""The identity of a run's data, stored with a checkpoint and compared when the run resumes."""

import hashlib
from collections.abc import Mapping

import numpy as np

from .blend import BlendedDataset
from .build import Dataset, Datasets, Samples
from .stream import Stream

_PREFIX = 1 << 12  # entries of an index that are hashed for its order
# samples whose values are hashed: the first ones, and some of all
_FIRST = 4
_SPREAD = 12


def identity(datasets: Datasets) -> dict[str, dict | None]:
    """Return the identity of each part, JSON-safe; None for a part without data. Reads a few MiB of
    each data set.
    """
    return {
        part: None if dataset is None else _identity(dataset)
        for part, dataset in datasets._asdict().items()
    }


def sample_digests(datasets: Datasets) -> dict[str, list[str] | None]:
    """Return digests of the values of some samples of each part, the first and the last among them;
    None without data.

    They are the same wherever the files have the same content.
    """
    return {
        part: None if dataset is None else _digests(dataset)
        for part, dataset in datasets._asdict().items()
    }


def _digests(dataset: Dataset) -> list[str]:
    if isinstance(dataset, Stream):
        return []  # its identity has the beginning of files
    last = len(dataset) - 1
    places = [
        *range(min(_FIRST, len(dataset))),
        *(round(k * last / (_SPREAD - 1)) for k in range(_SPREAD)),
    ]
    digests = []
    for place in sorted({*places}):
        digest = hashlib.sha256()
        for name, value in sorted(dataset[place].items()):
            digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
        digests.append(f"{place}: {digest.hexdigest()[:16]}")
    return digests


def _identity(dataset: Dataset) -> dict:
    """Return the identity of one data set.

    sources: of tokens.
    samples: how they are cut.
    order:   digest of their order.
    """
    if isinstance(dataset, Stream):
        return dict(dataset.identity)
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    indices = [
        index
        for part in parts
        for index in (part.document_index, part.sample_index, part.shuffle_index)
    ]
    weights = None
    if isinstance(dataset, BlendedDataset):
        indices += [dataset.dataset_index, dataset.dataset_sample_index]
        weights = dataset.weights
    order = hashlib.sha256()
    for index in indices:
        order.update(np.ascontiguousarray(index[:_PREFIX]).astype("<i8").tobytes())
    return {
        "sources": [_source(part) for part in parts],
        "samples": {
            "weights": weights,
            "sequence length": parts[0].config.sequence_length,
            "seed": parts[0].config.random_seed,
            "end-of-document id left out of the loss": parts[0].config.masked_eod,
        },
        "order": order.hexdigest()[:32],
    }


def _source(part: Samples) -> dict:
    return {
        "prefix": part.source.prefix,
        "fingerprint": part.source.fingerprint(),
        "sequences": list(part.bounds),
    }


def difference(now: Mapping | None, saved: Mapping | None) -> str:
    """Return how one part of a run's data differs from the saved one, whatever the names of its
    files; "" if it does not.

    The order of samples is not compared.
    """
    if now is None or saved is None:
        return (
            "" if now is saved else f"there is {'none' if now is None else 'some'} now, unlike then"
        )
    before = saved["sources"]
    after = now["sources"]
    if len(before) != len(after):
        return f"{len(after)} data sets, and then {len(before)}"
    for one, other in zip(after, before, strict=True):
        for key in ("fingerprint", "sequences"):
            if one[key] != other[key]:
                return (
                    f"{key} {one[key]} of {one['prefix']}, and then {other[key]} of "
                    f"{other['prefix']}"
                )
    for key, value in now["samples"].items():
        if value != (then := saved["samples"].get(key)):
            return f"{key} {value}, and then {then}"
    return ""
