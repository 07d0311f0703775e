"""Everything that writes what a later run reads, apart from checkpoints (tests/checkpoint,
tests/hf_trainer): a door writes a new value over an old one, is killed anywhere, and has to leave
one of the two, or say that there is none."""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_merak.checkpoint import store
from megatron_merak.checkpoint.begun import is_begun
from megatron_merak.checkpoint.hf import save_hf
from megatron_merak.checkpoint.stored import StoredSource, chosen
from megatron_merak.cli import convert
from megatron_merak.data.index_cache import cached_arrays
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_merak.errors import DataError
from megatron_merak.parameter_server.layout import PieceLayout
from megatron_merak.parameter_server.piece import ServedPiece
from megatron_merak.parameter_server.snapshot import read_snapshot, snapshot_path, write_snapshot
from tests.checkpoint.hf_models import build, content, model_class, shards


class Door:
    """One way to write.

    repeats: whether a value that was not written before a kill is written again, to the same place,
             and must be there.
    """

    repeats = False

    def __init__(self, root: Path):
        self.root = root

    def write(self, value: int) -> None:
        raise NotImplementedError

    def read(self) -> int | None:
        """The value that is there, in full; None: none, told by an error that says so."""
        raise NotImplementedError


class SaveModel(Door):
    """`save_model` of a model in several files, over another one of the same kind."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.model = build("llama")

    def write(self, value: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
        save_hf(self.root / "model", self.model, shards(self.model), max_shard_size="30KB")

    def read(self) -> int | None:
        model, told = model_class("llama").from_pretrained(
            self.root / "model", output_loading_info=True
        )
        assert not told["missing_keys"] and not told["unexpected_keys"], told
        values = {
            value
            for tensor in model.parameters()
            for value in (tensor.min().item(), tensor.max().item())
        }
        assert len(values) == 1, f"torn: {values}"
        return int(values.pop())


class Convert(Door):
    """`merak-convert` to a checkpoint, killed, and started again with the same command, which may be
    refused where the killed one was complete.
    """

    repeats = True
    flags: tuple[str, ...] = ()

    def __init__(self, root: Path):
        super().__init__(root)
        self.source = root / "source"
        model = build("llama")
        model.save_pretrained(self.source)
        self.wanted = content(self.source)

    def target(self, value: int) -> Path:
        return self.root / f"converted-{value}"

    def write(self, value: int) -> None:
        shutil.rmtree(self.target(value - 2), ignore_errors=True)
        told = io.StringIO()
        words = [str(self.source), str(self.target(value)), *self.flags]
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            status = convert.main(words)
        assert status == 0 or "it is not empty" in told.getvalue(), told.getvalue()
        assert not is_begun(self.target(value))
        self.last = value

    def read(self) -> int | None:
        source = StoredSource(chosen(self.target(self.last), None))
        assert {name for name in source.names()} == set(self.wanted)
        assert all(torch.equal(source.read(name), tensor) for name, tensor in self.wanted.items())
        return self.last


class ConvertBack(Convert):
    """`merak-convert` from a checkpoint to a HuggingFace directory."""

    def __init__(self, root: Path):
        super().__init__(root)
        theirs = self.source
        self.source = root / "pretrained"
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main([str(theirs), str(self.source)]) == 0

    def read(self) -> int | None:
        model = model_class("llama").from_pretrained(self.target(self.last))
        assert all(
            torch.equal(tensor, self.wanted[name]) for name, tensor in model.state_dict().items()
        )
        return self.last


class ConvertToMegatron(Convert):
    """`merak-convert` from a HuggingFace directory to Megatron-LM's checkpoint, read by converting
    it once more.
    """

    flags = ("--to", "megatron")

    def read(self) -> int | None:
        back = self.root / "back"
        shutil.rmtree(back, ignore_errors=True)
        words = [str(self.target(self.last)), str(back), "--config", str(self.source)]
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main([*words, "--allow-pickle", "--to", "hf"]) == 0
        held = content(back)
        assert held.keys() == self.wanted.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in self.wanted.items())
        return self.last


class ConvertToRankFiles(ConvertToMegatron):
    """`merak-convert` from a HuggingFace directory to Megatron-LM's files for each of two ranks."""

    flags = ("--to", "megatron-legacy", "--target-tensor-parallel-size", "2")


class ConvertToStore(ConvertToMegatron):
    """`merak-convert` from a HuggingFace directory to torch.distributed.checkpoint."""

    flags = ("--to", "dcp")


class Snapshot(Door):
    """A parameter server's snapshot."""

    LAYOUT = PieceLayout(
        300, "float32", ((0, 300, 0),), ((0, 300),), (), (0.9, 0.99), 1e-8, 1, True, 0
    )

    def write(self, value: int) -> None:
        piece = ServedPiece(self.LAYOUT)
        for tensor in piece.state.values():
            tensor.fill_(value)
        piece.version = value
        write_snapshot(snapshot_path(self.root, 1, 0), piece, {0: value}, "this job")

    def read(self) -> int | None:
        piece, sequences = read_snapshot(snapshot_path(self.root, 1, 0), self.LAYOUT, "this job")
        assert all((tensor == piece.version).all() for tensor in piece.state.values()), "torn"
        assert sequences == {0: piece.version}
        return piece.version


class IndexCache(Door):
    """The arrays of a data set's order."""

    repeats = True

    def arrays(self, value: int, build: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        return cached_arrays(self.root, "Kind", {"value": value}, ["first", "second"], build)

    def write(self, value: int) -> None:
        self.last = value
        self.arrays(value, lambda: [np.full(100, value), np.full((3, 3), value)])

    def read(self) -> int | None:
        def never() -> list[np.ndarray]:
            raise AssertionError("it is there")

        first, second = self.arrays(self.last, never)
        assert (first == self.last).all() and (second == self.last).all() and len(first) == 100
        return self.last


class Preprocess(Door):
    """The files of a tokenized data set."""

    def write(self, value: int) -> None:
        with IndexedDatasetWriter(self.root / "data", np.int32) as writer:
            for length in range(1, 5):
                writer.add_document([value] * length)

    def read(self) -> int | None:
        try:
            data = IndexedDataset(self.root / "data")
        except DataError:
            return None
        tokens = np.concatenate([data[number] for number in range(len(data))])
        assert len(data) == 4 and len(tokens) == 10 and len(set(tokens.tolist())) == 1, "torn"
        return int(tokens[0])


class Checkpoint(Door):
    """Checkpoints of both commands, of Engine, and inside those of MerakTrainer, saved and
    pruned.
    """

    def write(self, value: int) -> None:
        kinds = ("model", "exp_avg")
        shards_ = {
            kind: [store.Shard("w", (30, 4), None, (), torch.full((30, 4), 1.0 * value))]
            for kind in kinds
        }
        store.save(self.root, value + 1, shards_, {"value": value}, None, "cpu")
        store.prune(self.root, 1 << 20)

    def read(self) -> int | None:
        shards_ = {
            kind: [store.Shard("w", (30, 4), None, (), torch.zeros(30, 4))]
            for kind in ("model", "exp_avg")
        }
        value = store.load(self.root, shards_, None, "cpu")["value"]
        assert all((parts[0].tensor == value).all() for parts in shards_.values()), "torn"
        return value


DOORS: dict[str, type[Door]] = {
    "checkpoint": Checkpoint,
    "save_model": SaveModel,
    "merak-convert": Convert,
    "merak-convert back": ConvertBack,
    "merak-convert to megatron": ConvertToMegatron,
    "merak-convert to megatron-legacy": ConvertToRankFiles,
    "merak-convert to dcp": ConvertToStore,
    "parameter server": Snapshot,
    "index cache": IndexCache,
    "merak-preprocess": Preprocess,
}
