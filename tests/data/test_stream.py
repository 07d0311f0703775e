"""Streams against a simulation of their rule, and from any place on."""

import io
import json
import tarfile
from itertools import islice

import numpy as np
import pytest
import torch

from megatron_merak.config import Config, DataConfig, ModelConfig, StreamConfig, TrainConfig
from megatron_merak.data.blend import blending_indices
from megatron_merak.data.build import build_datasets, build_tokenizer
from megatron_merak.data.documents import Reached, input_files, read_documents
from megatron_merak.data.gpt_dataset import GPTDataset
from megatron_merak.data.source_part import GPTDatasetConfig
from megatron_merak.data.stream import RankRows, StreamSamples
from megatron_merak.data.stream_position import Position, merged
from megatron_merak.errors import DataError
from tests.data.test_inputs import KINDS, ROWS

SOME = ROWS[:600]
LENGTH = 16
WINDOW = 32
LANES = 6
VOCABULARY = 10_000


def write_tar(path):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for number, row in enumerate(SOME):
            name = f"part/{number:05d}"
            members = {"jpg": b"x" * (number % 700), "txt": row["text"].encode()}
            if number % 3 == 0:
                members = {"json": json.dumps(row).encode()}
            for kind, data in members.items():
                member = tarfile.TarInfo(f"{name}.{kind}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


ALL = KINDS | {"in.tar": write_tar, "in.tar.gz": write_tar}


def stream_of(*paths, window=WINDOW, **more):
    config = Config(
        model=ModelConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            seq_length=LENGTH,
            vocab_size=VOCABULARY - 1,
        ),
        train=TrainConfig(micro_batch_size=1, train_iters=1, eval_iters=0),
        data=DataConfig(tokenizer_type="NullTokenizer", eod_mask_loss=True),
        streams=StreamConfig(
            stream_path=[str(path) for path in paths],
            stream_shuffle_window=window,
            stream_lanes=LANES,
            stream_split="train",
            **more,
        ),
    )
    return build_datasets(config, build_tokenizer(config), 1).train


def simulated(files, window, seed=1234):
    """Tokens of each lane, by the rule as it is written down; endless."""
    loads = [0] * LANES
    lanes = [[] for _ in range(LANES)]
    epoch = 0
    while True:
        order = list(range(len(files)))
        if window > 1:
            order = np.random.RandomState([seed, epoch]).permutation(len(files))
        documents = [raw for at in order for raw in read_documents(files[at])]
        for number, begin in enumerate(range(0, len(documents), window)):
            group = documents[begin : begin + window]
            if window > 1:
                draw = np.random.RandomState([seed, epoch, number])
                group = [group[at] for at in draw.permutation(len(group))]
            for raw in group:
                lane = loads.index(min(loads))
                loads[lane] += len(raw.data) + 1
                text = raw.data.decode()
                text = json.loads(text)["text"] if text.startswith("{") else text
                ids = [*map(int, text.split())]
                lanes[lane] += [*ids, VOCABULARY - 1] if ids else []
        epoch += 1
        yield lanes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("stream")
    for name, write in ALL.items():
        (root / name).mkdir()
        write(root / name / name)
    (root / "lines").mkdir()
    draw = np.random.RandomState(0)
    for shard in range(4):
        rows = [{"text": " ".join(map(str, range(k)))} for k in draw.randint(0, 60, 150)]
        (root / "lines" / f"{shard}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return root


def read(samples: StreamSamples, first: int, count: int) -> list[torch.Tensor]:
    found = []
    for index in range(first, first + count):
        item = samples[index]
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])
        found.append(torch.cat([item["tokens"], item["labels"][-1:]]))
    return found


ALONE = RankRows(LANES, 0, 1)


@pytest.mark.parametrize("window", [1, WINDOW])
def test_samples_follow_the_rule(folder, window):
    """Over three epochs."""
    stream = stream_of(folder / "lines", window=window)
    files = input_files(folder / "lines")
    lanes = [np.array(lane) for lane in next(islice(simulated(files, window), 2, None))]
    rounds = min(len(lane) for lane in lanes) // LENGTH - 1
    assert rounds > 400
    found = read(stream.open(ALONE, stream.beginning()), 0, rounds * LANES)
    for index, sample in enumerate(found):
        turn, lane = divmod(index, LANES)
        expected = lanes[lane][turn * LENGTH : (turn + 1) * LENGTH + 1]
        assert sample.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("in.jsonl", "in.tar") else pytest.mark.long)
        for name in ALL
    ],
)
def test_each_kind_goes_on_from_any_place_on_any_rank(folder, name):
    stream = stream_of(folder / name)
    whole = read(stream.open(ALONE, stream.beginning()), 0, 230)
    position = stream.beginning()
    done = 0
    # sizes of steps, of ranks and of micro-batches; some do not divide the lanes
    for step, ranks, size in ((6, 2, 3), (12, 3, 2), (8, 4, 2), (4, 2, 2), (6, 1, 2)):
        rows = [RankRows(size, rank, ranks) for rank in range(ranks)]
        each = [stream.open(own, position) for own in rows]
        for _ in range(6):
            for start in range(done, done + step, size):
                rank = (start - done) // size % ranks
                for index in range(start, start + size):
                    item = each[rank][index]
                    sample = torch.cat([item["tokens"], item["labels"][-1:]])
                    assert torch.equal(sample, whole[index]), index
            done += step
        # some had read on, as a thread does
        each[0][done]
        parts = json.loads(json.dumps([own.position(done).to_json() for own in each]))
        position = merged(parts, "there")
        assert position.samples == done and len(position.starts) == LANES
    assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position


def test_ranks_tokenize_only_documents_of_their_own_lanes(folder, monkeypatch):
    stream = stream_of(folder / "in.jsonl")
    tokenized = []
    plain = type(stream).tokens

    def counting(self, raw):
        tokenized[-1].add(raw.place)
        return plain(self, raw)

    monkeypatch.setattr(type(stream), "tokens", counting)
    for rank in range(2):
        tokenized.append(set())
        samples = stream.open(RankRows(3, rank, 2), stream.beginning())
        for turn in range(50):
            read(samples, turn * 6 + rank * 3, 3)
    assert tokenized[0] and tokenized[1] and not tokenized[0] & tokenized[1]


def test_weights_blend_each_step_and_each_lane(folder):
    first, second = folder / "in.jsonl", folder / "lines"
    stream = stream_of("2", first, "1", second)
    parts = [stream_of(path) for path in (first, second)]
    each = [part.open(ALONE, part.beginning()) for part in parts]
    found = read(stream.open(ALONE, stream.beginning()), 0, 300)
    order, _ = blending_indices([2 / 3, 1 / 3], 60)
    taken = {(source, lane): 0 for source in range(2) for lane in range(LANES)}
    for index, sample in enumerate(found):
        turn, lane = divmod(index, LANES)
        source = int(order[turn + lane])
        place = taken[source, lane] * LANES + lane
        taken[source, lane] += 1
        assert torch.equal(sample, read(each[source], place, 1)[0])
    for lane in range(LANES):
        assert abs(taken[0, lane] - 2 * taken[1, lane]) <= 2


def test_one_lane_has_the_samples_of_a_gpt_data_set(folder):
    """The same tokens, masks and overlaps as of the same documents, indexed."""
    stream = stream_of(folder / "in.jsonl", window=1)
    texts = [
        np.array([*map(int, row["text"].split()), VOCABULARY - 1], dtype=np.int32) for row in ROWS
    ]

    class Indexed:
        prefix = "rows"
        sequence_lengths = np.array([len(text) for text in texts], dtype=np.int32)

        def __len__(self):
            return len(texts)

        def get(self, index, offset=0, length=None):
            return texts[index][offset : None if length is None else offset + length]

        def fingerprint(self):
            return ""

    indexed = GPTDataset(
        Indexed(),
        (0, len(texts)),
        None,
        "train",
        GPTDatasetConfig(LENGTH, 1234, VOCABULARY, masked_eod=VOCABULARY - 1),
    )
    # in the order of the documents
    indexed.document_index = np.arange(len(texts), dtype=np.int32)
    indexed.shuffle_index = np.arange(len(indexed))
    position = stream.beginning()
    one = Position(
        0, 0, 1, [w._replace(loads=(0,)) for w in position.windows], {0: position.starts[0]}
    )
    samples = stream.open(RankRows(1, 0, 1), one)
    same = 0
    for index in range(200):
        ours, theirs = samples[index], indexed[index]
        assert ours.keys() == theirs.keys()
        same += all(torch.equal(ours[key], theirs[key]) for key in ours)
    # its documents have equal lengths, so that their order does not move the cuts
    assert same == 200


def test_files_without_documents_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    stream = stream_of(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="empty.jsonl: it is the first of 1 that have no documents"):
        stream.open(ALONE, stream.beginning())[0]


@pytest.mark.parametrize("name", ["in.tar", "in.tar.gz"])
def test_shards_are_read_on_and_damage_is_named(folder, tmp_path, name):
    file = folder / name / name
    rows = [*read_documents(file)]
    texts = [json.loads(raw.data)["text"] if raw.is_json else raw.data.decode() for raw in rows]
    assert texts == [row["text"] for row in SOME]
    for done in (1, 2, 300, 599, 600):
        assert [*read_documents(file, start=rows[done - 1].after)] == rows[done:]
    whole = file.read_bytes()
    cut = tmp_path / name
    cut.write_bytes(whole[: len(whole) // 2 // 512 * 512])
    with pytest.raises(DataError, match=f"{name}: reading failed after sample [1-9]"):
        [*read_documents(cut)]
    assert Reached(0, 1) < rows[1].after
