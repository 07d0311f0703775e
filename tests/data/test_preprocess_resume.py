"""A preprocessing run that was killed goes on, and its output has the bytes of an undisturbed one."""

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_merak.data import preprocess_progress
from megatron_merak.data.documents import Reached
from megatron_merak.data.preprocess import EncoderConfig, preprocess
from megatron_merak.data.preprocess_progress import Ahead, PreprocessProgress, duration
from megatron_merak.data.unfinished import Written
from megatron_merak.errors import DataError
from tests.checkpoint.kills import DISK, fork, kill_before_call

CALLS = DISK | {"truncate", "seek", "flock"}
CONFIG = EncoderConfig("NullTokenizer", None, 70000, ("text", "other"), append_eod=True)
ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = [f"{key}_document.{kind}" for key in CONFIG.json_keys for kind in ("bin", "idx")]


def write_inputs(root: Path) -> list[Path]:
    """Files of several chunks each, with empty documents."""
    lines = [
        json.dumps({"text": f"{n} {n % 7}" * (n % 5 > 0), "other": str(n % 69999)}) + "\n"
        for n in range(7000)
    ]
    (root / "in").mkdir()
    (root / "in" / "a.jsonl").write_text("".join(lines[:3000]))
    (root / "in" / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[3000:]).encode(), 1))
    (root / "in" / "c.jsonl").write_text("".join(lines[:1500]))
    return [root / "in"]


def output(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}_{suffix}").read_bytes() for suffix in SUFFIXES]


def run(inputs, prefix, config=CONFIG, **settings):
    return preprocess(inputs, str(prefix), config, seal_every=0, **settings)


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def kill_everywhere(root: Path, stride: int) -> int:
    inputs = write_inputs(root)
    counts = run(inputs, root / "whole")
    expected = output(root / "whole")
    kills = 0
    done = False
    while not done:

        def work(report, number=kills * stride):
            kill_before_call(number, CALLS)
            run(inputs, root / "out")

        done, _ = fork(work)
        assert run(inputs, root / "out") == counts
        assert output(root / "out") == expected and left(root) == []
        if not (kills % 3):
            for suffix in SUFFIXES:  # now and then, nothing is there before
                (root / f"out_{suffix}").unlink()
        kills += not done
    return kills


@pytest.mark.parametrize(
    ("stride", "fewest"),
    [(41, 5), pytest.param(1, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_killed_before_any_call_it_ends_with_the_same_bytes(
    tmp_path, stride, fewest, record_property
):
    kills = kill_everywhere(tmp_path, stride)
    record_property("kills", kills)
    assert kills >= fewest, kills


def test_killed_again_and_again_it_gets_on(tmp_path, record_property):
    inputs = write_inputs(tmp_path)
    run(inputs, tmp_path / "whole")
    kills = 0
    done = False
    while not done:

        def work(report):
            # enough calls to open what is there and to seal a chunk or two
            kill_before_call(70, CALLS)
            run(inputs, tmp_path / "out")

        done, _ = fork(work)
        kills += not done
        assert kills < 50, "it makes no progress"
    record_property("kills", kills)
    assert output(tmp_path / "out") == output(tmp_path / "whole") and left(tmp_path) == []
    assert kills > 2


@pytest.mark.long
def test_a_command_that_is_killed_with_its_workers_goes_on(tmp_path, record_property):
    inputs = write_inputs(tmp_path)
    preprocess(inputs, str(tmp_path / "whole"), CONFIG)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from megatron_merak.data.preprocess import EncoderConfig, preprocess\n"
        "if __name__ == '__main__':\n"
        "    config = EncoderConfig('NullTokenizer', None, 70000, ('text', 'other'), append_eod=True)\n"
        "    preprocess([Path(sys.argv[1])], sys.argv[2], config, 2, seal_every=0)\n"
    )
    (tmp_path / "start.py").write_text(code)
    command = [sys.executable, str(tmp_path / "start.py"), str(inputs[0]), str(tmp_path / "out")]
    kills = 0
    sealed = tmp_path / ".out.unfinished" / "progress.json"
    while True:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        before = sealed.read_bytes() if sealed.exists() else b""
        while process.poll() is None and kills < 3:
            time.sleep(0.001)
            if sealed.exists() and sealed.read_bytes() != before:
                process.send_signal(signal.SIGKILL)
                break
        said = process.communicate()[1]
        if process.returncode == 0:
            break
        kills += 1
    record_property("kills", kills)
    assert output(tmp_path / "out") == output(tmp_path / "whole")
    assert kills and "going on after the " in said


@pytest.fixture
def stopped(tmp_path):
    """A run that was killed behind its second seal: its inputs, and the documents it has."""
    inputs = write_inputs(tmp_path)

    def work(report):
        kill_before_call(150, CALLS)
        run(inputs, tmp_path / "out")

    done, _ = fork(work)
    assert not done
    seal = json.loads((tmp_path / ".out.unfinished" / "progress.json").read_text())
    assert seal["progress"]["documents"] >= 2048 and not seal["progress"]["is_written"]
    return inputs, seal["progress"]["documents"]


def test_only_what_is_not_sealed_is_read_again(tmp_path, stopped, capsys):
    inputs, documents = stopped
    run(inputs, tmp_path / "out")
    said = capsys.readouterr().err
    assert f"going on after the {documents:,} documents of an earlier start" in said


def test_another_command_is_refused_by_name_or_begins_anew(tmp_path, stopped):
    inputs, _ = stopped
    refused = (
        (inputs, replace(CONFIG, append_eod=False), "flags .append_eod: True, now False."),
        (inputs, replace(CONFIG, vocab_size=99999), "flags .vocab_size: 70000, now 99999."),
        ([inputs[0] / "a.jsonl"], CONFIG, "a run with other inputs"),
        ([inputs[0] / "c.jsonl", *inputs], CONFIG, "a run with other order of inputs"),
    )
    for paths, config, told in refused:
        with pytest.raises(
            DataError, match=f"--output-prefix .*{told}.*has not ended.*--overwrite"
        ):
            run(paths, tmp_path / "out", config)
    (inputs[0] / "c.jsonl").write_text('{"text": "1", "other": "2"}\n')
    with pytest.raises(DataError, match="a run with other inputs"):
        run(inputs, tmp_path / "out")
    assert run(inputs, tmp_path / "out", overwrite=True)["documents"] == 7001
    assert left(tmp_path) == []


def test_another_tokenizer_file_is_refused(tmp_path):
    from megatron_merak.data.train_tokenizer import train_byte_bpe

    inputs = write_inputs(tmp_path)
    path = tmp_path / "tokenizer.json"
    train_byte_bpe(["some text", "more text"], 300, path)
    config = EncoderConfig("HuggingFaceTokenizer", str(path), None, ("text",), append_eod=True)

    def killed(report):
        kill_before_call(150, CALLS)
        run(inputs, tmp_path / "out", config)

    done, _ = fork(killed)
    assert not done and left(tmp_path) == [".out.unfinished"]
    train_byte_bpe(["another text"], 280, path)
    with pytest.raises(DataError, match="a run with other tokenizer"):
        run(inputs, tmp_path / "out", config)


def test_what_damages_the_seal_is_told(tmp_path, stopped):
    inputs, _ = stopped
    seal = tmp_path / ".out.unfinished" / "progress.json"
    content = seal.read_bytes()
    os.truncate(tmp_path / ".out.unfinished" / "0.bin", 5)
    with pytest.raises(DataError, match="0.bin has 5 bytes, and .* were sealed. Give --overwrite"):
        run(inputs, tmp_path / "out")
    seal.write_bytes(content[:-9])
    with pytest.raises(DataError, match="progress.json of an earlier run cannot be read"):
        run(inputs, tmp_path / "out")
    run(inputs, tmp_path / "out", overwrite=True)
    assert left(tmp_path) == []


def test_two_runs_do_not_write_the_same_files(tmp_path):
    inputs = write_inputs(tmp_path)
    (tmp_path / ".out.unfinished").mkdir()
    with open(tmp_path / ".out.unfinished" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process writes these files"):
            run(inputs, tmp_path / "out", overwrite=True)
    run(inputs, tmp_path / "out")


def test_a_log_gets_a_line_now_and_then_with_what_is_left(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(preprocess_progress.time, "monotonic", lambda: now[0])
    for name, size in (("a", 600), ("b", 400)):
        (tmp_path / name).write_bytes(b"x" * size)
    progress = Written(place=Reached(0, 1, 100), documents=1, read=1_000_000)
    shown = PreprocessProgress("preprocess", progress, Ahead([tmp_path / "a", tmp_path / "b"]))
    for seconds, place, documents, read in (
        (1, Reached(0, 2, 200), 2, 2_000_000),
        (30, Reached(0, 4, 400), 4, 61_000_000),
        (59, Reached(0, 5, 500), 5, 70_000_000),
        (60, Reached(1, 3, 100), 9, 121_000_000),
    ):
        now[0] = float(seconds)
        progress.place = place
        progress.documents = documents
        progress.read = read
        shown.update()
    shown.done()
    assert capsys.readouterr().err.splitlines() == [
        "preprocess: 4 documents, 61.0 MB, 2.0 MB/s, 40.0%, 1 min 0 s left",
        "preprocess: 9 documents, 121.0 MB, 2.0 MB/s, 70.0%, 30 s left",
        "preprocess: 9 documents, 121.0 MB, 2.0 MB/s",
    ]
    assert duration(7384) == "2 h 3 min" and duration(59.4) == "59 s"


def test_without_files_there_is_no_percentage(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(preprocess_progress.time, "monotonic", lambda: now[0])
    shown = PreprocessProgress("preprocess", Written(documents=3, read=5_000_000), Ahead([]))
    now[0] = 31.0
    shown.update()
    assert capsys.readouterr().err == "preprocess: 3 documents, 5.0 MB, 0.0 MB/s\n"


@pytest.mark.long
def test_ctrl_c_ends_it_with_a_line_and_the_same_command_goes_on(tmp_path):
    lines = "".join(json.dumps({"text": f"{n} " * 400}) + "\n" for n in range(15000))
    (tmp_path / "in.jsonl").write_text(lines)
    command = [sys.executable, "-m", "megatron_merak", "preprocess", "--input"]
    command += [str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out")]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--workers", "2"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.unfinished" / "0.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in said, said
    assert "stopped; the same command goes on from what is sealed" in said
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "15,000 documents, 6,000,000 tokens" in done.stdout
    assert left(tmp_path) == []
