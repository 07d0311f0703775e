"""Several indexed datasets as one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DataError
from .indexed_dataset import IndexedDataset, IndexedDatasetWriter, data_path, index_path
from .prefixes import check_dataset


def dataset_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of datasets; a directory stands for those in it, sorted by name. Raises
    `DataError` for one without any, or with half of one.
    """
    return [prefix for each in inputs for prefix in _prefixes(each)]


def _prefixes(path: str) -> Iterator[str]:
    # a dataset that was trained on has a directory of its name, with the cache of its indices
    if not Path(path).is_dir() or index_path(path).is_file():
        yield path
        return
    files = [file for file in Path(path).iterdir() if file.suffix in (".bin", ".idx")]
    prefixes = sorted({str(file.with_suffix("")) for file in files if file.is_file()})
    if not prefixes:
        raise DataError("--input", path, "it has no .bin and .idx files", "Give prefixes of some")
    for prefix in prefixes:
        for file in (data_path(prefix), index_path(prefix)):
            if not file.is_file():
                raise DataError("--input", file, "it is missing", "Give prefixes of whole datasets")
    yield from prefixes


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Write the documents of several datasets as one, in their order, with the bytes that
    megatron-core's IndexedDatasetBuilder.add_index gives; return it. Raises `DataError`.
    """
    output = data_path(output_prefix).resolve()
    for prefix in prefixes:
        check_dataset(prefix, "--input")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    for dataset in datasets:
        if data_path(dataset.prefix).resolve() == output:
            remedy = "Give another --output-prefix"
            raise DataError("--output-prefix", output_prefix, "it is one of the inputs", remedy)
        if dataset.sequence_modes is not None:
            remedy = "Merge datasets of text"
            raise DataError("--input", dataset.prefix, "it has modes of several media", remedy)
    with IndexedDatasetWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
    return IndexedDataset(output_prefix)
