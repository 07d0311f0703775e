"""Training from raw text: equal steps wherever a run is cut, for any number of ranks."""

import json
import signal
import subprocess
import sys
import time

import pytest

from megatron_merak.checkpoint.directory import Iterations, read_manifest
from tests.ranks import RankFailure, run_ranks
from tests.training.jobs import RUN, SHAPE, job

STREAM = "--tokenizer-type NullTokenizer --train-iters 12 --stream-shuffle-window 16"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for shard in range(3):
        lines = []
        for number in range(40):
            ids = [str((shard * 7 + number * 3 + at) % 60) for at in range(1 + number % 23)]
            lines.append(json.dumps({"text": " ".join(ids)}) + "\n")
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return folder


def flags(text, more: str) -> str:
    return f"{STREAM} --stream-path {text} {more}"


def losses(path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def several(rank: int, world: int, *given: str) -> list[str]:
    """Run jobs one after the other."""
    return [job(rank, world, each) for each in given]


def position(save, iteration: int) -> dict:
    return read_manifest(Iterations(save).locate(iteration))[1].meta["stream"]


def test_a_run_that_is_cut_goes_on_with_the_same_losses(text, tmp_path):
    whole = tmp_path / "whole"
    save = tmp_path / "saved"
    parts = [tmp_path / "0", tmp_path / "1"]
    resumed = f"--load {save} --save {save} --num-workers 2 --async-save"
    run_ranks(
        several,
        2,
        flags(text, f"--metrics {whole} --save {tmp_path / 'other'}"),
        flags(text, f"--metrics {parts[0]} --save {save} --exit-interval 5"),
        flags(text, f"--metrics {parts[1]} {resumed}"),
    )
    assert losses(parts[0]) + losses(parts[1]) == losses(whole)
    # the place does not depend on how often a run was cut
    assert position(save, 12) == position(tmp_path / "other", 12)
    assert position(save, 12)["samples"] == 48


def test_another_number_of_ranks_reads_the_same_samples(text, tmp_path):
    save = tmp_path / "saved"
    one = tmp_path / "one"
    two = tmp_path / "two"
    run_ranks(several, 1, flags(text, f"--save {save} --save-interval 5 --metrics {one}"))
    then = f"--load {save} --ckpt-step 5 --save {tmp_path / 'two-saved'} --metrics {two}"
    run_ranks(several, 2, flags(text, then))
    # sums over replicas are rounded otherwise; other samples differ by tenths
    assert losses(two) == pytest.approx(losses(one)[5:], abs=1e-5)
    assert position(tmp_path / "two-saved", 12) == position(save, 12)


def test_broken_documents_end_the_run_on_all_ranks_or_are_left_out(text, tmp_path):
    lines = (text / "0.jsonl").read_text().splitlines(keepends=True)
    lines[20] = '{"text": "1 2\n'
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(lines))
    given = flags(bad, "--stream-shuffle-window 1")
    with pytest.raises(RankFailure, match=f"--stream-path {bad}:21: .*not JSON.*skip-bad"):
        run_ranks(several, 2, given)
    skipped, whole = tmp_path / "skipped", tmp_path / "whole"
    good = tmp_path / "good.jsonl"
    good.write_text("".join(lines[:20] + lines[21:]))
    one = "--stream-lanes 1 --stream-shuffle-window 1 --metrics"
    run_ranks(
        several,
        1,
        flags(bad, f"{one} {skipped} --stream-skip-bad"),
        flags(good, f"{one} {whole}"),
    )
    assert losses(skipped) == losses(whole)


@pytest.mark.long
def test_another_place_or_other_data_is_refused(text, tmp_path):
    save = tmp_path / "saved"
    run_ranks(several, 1, flags(text, f"--save {save} --exit-interval 2"))
    refused = {
        "--stream-lanes 8": "--stream-lanes 8: the checkpoint's run has 4",
        "--stream-shuffle-window 8": "documents shuffled together 8, and then 16",
    }
    for more, told in refused.items():
        with pytest.raises(RankFailure, match=told):
            run_ranks(several, 1, flags(text, f"--load {save} {more}"))
    other = tmp_path / "other.jsonl"
    other.write_text((text / "0.jsonl").read_text())
    with pytest.raises(RankFailure, match="the checkpoint's run read other data"):
        run_ranks(several, 1, flags(other, f"--load {save}"))
    anew, fresh = tmp_path / "anew", tmp_path / "fresh"
    run_ranks(
        several,
        1,
        flags(other, f"--load {save} --override-dataset --metrics {anew} --save {fresh}"),
    )
    assert len(losses(anew)) == 10 and position(fresh, 12)["begin"] == 8


@pytest.mark.long
def test_validation_on_streams_and_on_indexed_data(text, tmp_path):
    given = f"--valid-stream-path {text} --eval-iters 3 --eval-interval 6"
    (told,) = run_ranks(several, 1, flags(text, given))[0]
    values = [line for line in told.splitlines() if "validation loss" in line]
    assert len(values) == 2


def command(given: str) -> list[str]:
    return [sys.executable, "pretrain_gpt.py", *SHAPE.split(), *RUN.split(), *given.split()]


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "--save-increment-interval 1"])
def test_a_run_that_is_killed_goes_on_with_the_same_losses(text, tmp_path, more):
    whole = tmp_path / "whole"
    save = tmp_path / "saved"
    metrics = tmp_path / "metrics"
    length = flags(text, "--train-iters 60")
    given = command(
        f"{length} --metrics {metrics} --save {save} --load {save} --save-interval 7 --async-save "
        f"--save-retain-interval 21 {more}"
    )
    subprocess.run(command(f"{length} --metrics {whole}"), check=True, capture_output=True)
    for lines in (9, 25, 41):
        with subprocess.Popen(given, stdout=subprocess.DEVNULL) as process:
            while not (metrics.exists() and len(metrics.read_text().splitlines()) >= lines):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
    subprocess.run(given, check=True, capture_output=True)
    found: dict[int, set[float]] = {}
    for line in metrics.read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values["iteration"], set()).add(values["loss"])
    expected = [{loss} for loss in losses(whole)]
    assert [losses for _, losses in sorted(found.items())][-len(expected) :] == expected
