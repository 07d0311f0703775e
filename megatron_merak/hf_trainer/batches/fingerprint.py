"""The fingerprint of a dataset, compared when a run resumes: its length and the values of a few
samples.
"""

import hashlib
import os
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from ...counting import named_ranks
from ...errors import DataError
from ...parallel.agree import gather_json, together
from ...stages.randomness import private_randomness
from .apart import apart
from .order import samples_of

SAMPLES = 8  # looked at, the first and the last among them


def fingerprint(dataset: Dataset) -> dict:
    """Return {"length": samples, "samples": digest}; None for what a stream does not have, or what
    is random each time.

    Samples that draw from the global generators draw with a seed; the generators' states are
    restored.
    """
    if isinstance(dataset, IterableDataset):
        return {"length": None, "samples": None}
    length = samples_of(dataset)
    dataset = apart(dataset)
    places = (
        sorted({round(k * (length - 1) / (SAMPLES - 1)) for k in range(SAMPLES)}) if length else []
    )
    first = _digest(dataset, places)
    second = _digest(dataset, places)
    return {"length": length, "samples": first if first == second else None}


def agreed(dataset: Dataset, group: dist.ProcessGroup | None, name: str = "train_dataset") -> dict:
    """Return the fingerprint of a dataset that all ranks have alike, as in transformers: each takes
    its own samples.

    Of a stream only that it is one is compared: what it yields is compared batch by batch.

    group: all ranks; collective over it.
    name:  of the dataset, for the user.

    Raises DataError on every rank.
    """
    with together(group, "cpu"):
        own = fingerprint(dataset)
    everywhere = gather_json(own, group, "cpu")
    remedy = "Give every rank the same dataset, whole: ranks share its samples"
    for key, what in (("length", "length"), ("samples", "digest of samples")):
        values = [each[key] for each in everywhere]
        if key == "samples":  # None is random each time
            known = next((value for value in values if value is not None), None)
            values = [known if value is None else value for value in values]
        if other := next((value for value in values if value != values[0]), None):
            ranks = named_ranks([rank for rank, value in enumerate(values) if value == other])
            reason = (
                f"{ranks} {'has' if values.count(other) == 1 else 'have'} it, and rank 0 "
                f"has {values[0]}"
            )
            raise DataError(f"{name}, {what}", other, reason, remedy)
    return everywhere[0]


def difference(saved: Mapping, present: Mapping) -> str | None:
    """Return a sentence on how two datasets differ; None if they do not, as far as both
    are known.
    """
    if saved["length"] != present["length"]:
        there, here = (value["length"] or "an unknown number of" for value in (saved, present))
        return f"the checkpoint's run had {there} samples, and there are {here} now"
    if (
        None not in (saved["samples"], present["samples"])
        and saved["samples"] != present["samples"]
    ):
        return "its samples are not those of the checkpoint's run, or in another order"
    return None


def _digest(dataset: Dataset, places: list[int]) -> str | None:
    digest = hashlib.sha256()
    fetch = getattr(dataset, "__getitems__", None)
    with private_randomness(0):
        samples = fetch(places) if fetch else [dataset[place] for place in places]
        for sample in samples:
            _add(digest, sample)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", value: object) -> None:
    """Add a value to the digest; of an object whose representation may change between runs,
    nothing.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(
            flat.view(torch.uint8).numpy().tobytes() if flat.layout == torch.strided else b""
        )
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
        # each host has its own folders
        digest.update(f"{os.path.basename(value)!r};".encode(errors="surrogatepass"))
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(f"{value!r};".encode(errors="surrogatepass"))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(digest, str(key))
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for each in value:
            _add(digest, each)
    # a PIL image
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):
        digest.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    else:
        digest.update(type(value).__name__.encode())
