"""Settings of training from raw text, and what they cannot stand beside."""

import dataclasses

from ..errors import ConfigError
from .parallel import ParallelConfig
from .sections import DataConfig
from .settings import Section, flag_name, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig(Section):
    """Raw text, tokenized while a run trains on it."""

    stream_path: tuple[str, ...] = setting((), ours=True)
    """Train from these files and directories of raw text, of the kinds that merak-preprocess reads,
    instead of --data-path; or WEIGHT PATH pairs to blend."""
    valid_stream_path: tuple[str, ...] = setting((), ours=True)
    """Validation data in the form of --stream-path; every evaluation reads its beginning."""
    stream_json_key: str = setting("text", ours=True)
    """Key, or column, of the texts."""
    stream_split: str | None = setting(None, ours=True)
    """Split of saved DatasetDicts (unset: they have one only)."""
    stream_shuffle_window: int = setting(4096, least=1, most=1 << 24, ours=True)
    """Documents of --stream-path that are shuffled together, anew in every epoch, as is the order of
    files; 1: everything is read in the order in which it is given."""
    stream_lanes: int | None = setting(None, least=1, most=1 << 20, ours=True)
    """Rows of text from which samples come in turn; ranks divide them (unset: --global-batch-size
    when the run begins)."""
    stream_skip_bad: bool = setting(False, ours=True)
    """Leave out documents that cannot be read, which otherwise end the run."""


def check_streams(streams: StreamConfig, data: DataConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for settings of streams that have no meaning, and for what they contradict."""
    given = {
        "--stream-path": streams.stream_path,
        "--valid-stream-path": streams.valid_stream_path,
    }
    if not any(given.values()):
        _check_unused(streams)
        return
    flag = next(name for name, paths in given.items() if paths)
    others = {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        "--mock-data": data.mock_data,
    }
    if streams.stream_path:
        others["--train-data-path"] = data.train_data_path
    if streams.valid_stream_path:
        others["--valid-data-path"] = data.valid_data_path
    clash = next((name for name, value in others.items() if value), None)
    if clash is not None:
        raise ConfigError(flag, "(given)", f"contradicts {clash}", "Give one source of data")
    if data.split != type(data).split:
        reason = "streams are not divided into parts"
        remedy = "Leave it out, and give --valid-stream-path or --valid-data-path"
        raise ConfigError("--split", repr(data.split), reason, remedy)
    if parallel.data_parallel_strategy != "allreduce":
        reason = "its workers share no position in streams"
        remedy = "Use --data-path, or --data-parallel-strategy allreduce"
        strategy = parallel.data_parallel_strategy
        raise ConfigError("--data-parallel-strategy", strategy, reason, remedy)
    if getattr(data, "sft", False):
        reason = "conversations are packed whole, which needs the lengths of all of them"
        remedy = "Write them with merak-preprocess --chat, and give --data-path"
        raise ConfigError(flag, "(given)", reason, remedy)
    _check_indexed(streams, data)


def _has_indexed(data: DataConfig) -> bool:
    return any((data.train_data_path, data.valid_data_path, data.test_data_path))


def _check_unused(streams: StreamConfig) -> None:
    for field in dataclasses.fields(streams):
        value = getattr(streams, field.name)
        if value != field.default:
            reason = "has no effect without --stream-path"
            raise ConfigError(flag_name(field.name), value, reason, "Give it, or leave this out")


def _check_indexed(streams: StreamConfig, data: DataConfig) -> None:
    """Raise ConfigError for settings of indexed datasets where there is none."""
    if _has_indexed(data):
        return
    for name in ("data_cache_path", "no_mmap_bin_files", "mid_level_dataset_surplus"):
        value = getattr(data, name)
        if value != getattr(type(data), name):
            reason = "is about indexed datasets, and there are streams only"
            raise ConfigError(flag_name(name), value, reason, "Leave it out")
