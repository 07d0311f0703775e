"""The training data of a job that reads streams: opened where a checkpoint says, and told of in the
next one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..data.stream import RankRows, Stream, StreamSamples
from ..data.stream_position import Position, merged
from ..errors import CheckpointError
from ..parallel.agree import gather_json, together

META = "stream"  # where a checkpoint has the position


class Streamed:
    """How far a job has read its streams.

    lanes: that --stream-lanes asks for; None: those of the checkpoint, if there is one.
    """

    def __init__(self, stream: Stream, lanes: int | None):
        self._stream = stream
        self._lanes = lanes
        self._position = stream.beginning()
        self._samples: StreamSamples | None = None

    def open(self, rows: RankRows, consumed: int, group: dist.ProcessGroup | None) -> StreamSamples:
        """Return the samples of this rank from where the job is. Collective. Raises DataError.

        consumed: samples of the run; its last steps may come from increments.
        """
        with together(group, "cpu"):
            self._samples = self._stream.open(rows, self._position, consumed)
        assert self._samples is not None, "else an error was raised"
        return self._samples

    def meta(self, consumed: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Return where all ranks are, for a checkpoint. Collective. Raises CheckpointError if they do
        not agree.

        consumed: samples of the run.
        """
        if self._samples is None:
            return self._position.to_json()
        own = self._samples.position(consumed).to_json()
        return merged(
            gather_json(own, group, "cpu"), f"(iteration of {consumed} samples)"
        ).to_json()

    def check(self, meta: Mapping[str, Any], root: str | Path) -> None:
        """Raise CheckpointError if the streams cannot go on where a checkpoint is.

        meta: of the checkpoint.
        root: for errors.
        """
        saved = self._read(meta, root)
        if saved is not None and self._lanes not in (None, saved.lanes):
            raise CheckpointError(
                "--stream-lanes",
                self._lanes,
                f"the checkpoint's run has {saved.lanes}",
                f"Give --stream-lanes {saved.lanes}, or leave it out",
            )

    def restore(self, meta: Mapping[str, Any], root: str | Path, consumed: int, same: bool) -> None:
        """Go on where a checkpoint is, before `open`.

        consumed: samples of the run.
        same:     whether it read the same streams; else they begin now.
        """
        saved = self._read(meta, root) if same else None
        self._position = self._stream.beginning(consumed) if saved is None else saved

    def _read(self, meta: Mapping[str, Any], root: str | Path) -> Position | None:
        values = meta.get(META)
        if values is None:
            return None
        try:
            return Position.from_json(values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"its place in the streams cannot be read ({error})"
            remedy = "Load another iteration with --ckpt-step"
            raise CheckpointError("checkpoint", root, reason, remedy) from error
