"""The console line that tools read, and the records behind it."""

import io
import json
import os
import sys
from dataclasses import replace
from datetime import datetime

import pytest

from megatron_merak.config import CheckpointConfig, Config, LoggingConfig, ModelConfig, TrainConfig
from megatron_merak.errors import ConfigError
from megatron_merak.stages.step_report import StepReport
from megatron_merak.training.console import (
    WIDTH,
    Interval,
    Progress,
    Throughput,
    console_line,
    fitted,
    print_fitted,
    short_line,
)
from megatron_merak.training.outputs import check_outputs
from megatron_merak.training.pictures import draw_curve
from megatron_merak.training.report import Report

WORK = Throughput(tokens=128, flops=5 * 10**11, ranks=2, peak=10**13)
INTERVAL = Interval(
    Progress(20, 100, 160, 8),
    0.5,
    1e-3,
    4.25,
    1.0625,
    skipped=2,
    samples_per_second=16.0,
    zeros=7,
    nan=1,
    loss_scale=32768.0,
)
MODEL = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
NOW = datetime(2026, 1, 2, 3, 4, 5, 678)


def test_the_line_has_megatrons_fields_in_megatrons_order():
    assert console_line(INTERVAL, WORK, True, NOW) == (
        " [2026-01-02 03:04:05.000678] iteration       20/     100 | consumed samples:          160 |"
        " elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 4.0 |"
        " learning rate: 1.000000E-03 |"
        " global batch size:     8 | lm loss: 4.250000E+00 | loss scale: 32768.0 | grad norm: 1.062 | num zeros: 7 |"
        " number of skipped iterations:   2 | number of nan iterations:   1 |"
        " tokens/s: 2048 | MFU: 40.0 % | ETA: 0:00:40 |"
    )


def test_the_short_line_has_the_same_facts():
    assert short_line(INTERVAL, WORK, False) == (
        "  20/100 | loss 4.2500 | scale 32,768 | skipped 2 | nan 1 | 500.0 ms | 2,048 tokens/s | MFU 40.0 % | "
        "ETA 0:00:40"
    )
    plain = replace(INTERVAL, skipped=0, nan=0, zeros=None, loss_scale=1.0)
    assert short_line(plain, replace(WORK, peak=None), False) == (
        "  20/100 | loss 4.2500 | lr 1.00e-03 | norm 1.062 | 500.0 ms | 2,048 tokens/s | 4000.0 GFLOP/s/rank | "
        "ETA 0:00:40"
    )
    assert short_line(plain, replace(WORK, clock="modelled on laptop"), False).endswith(
        "| MFU 40.0 % | modelled"
    )


def test_the_short_line_fits_whatever_it_says():
    worst = Interval(
        Progress(1_234_567, 9_000_000, 10**12, 10**6),
        seconds=1_234.5,
        learning_rate=1.234567e-10,
        loss=1.5e30,
        grad_norm=1.5e30,
        skipped=1_000,
        samples_per_second=9e2,
        zeros=10**15,
        nan=1_000,
        loss_scale=2.0**127,
        staleness=1e6,
    )
    for clock in ("", "modelled on dgx-h100"):
        line = short_line(worst, replace(WORK, clock=clock), True)
        assert len(line) <= WIDTH and "nan 1,000" in line and "1,234,567/9,000,000" in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("asked", "out", "short"),
    [
        ("auto", io.StringIO, False),
        ("auto", Terminal, True),
        ("megatron", Terminal, False),
        ("short", io.StringIO, True),
    ],
)
def test_who_reads_decides_the_form_of_the_line(asked, out, short):
    screen = out()
    report = Report(LoggingConfig(log_interval=1, log_format=asked), WORK, screen)
    report.step(Progress(1, 4, 8, 8), 0.5, StepReport(3.0, 1.0, 1e-3, False))
    assert ("consumed samples" in screen.getvalue()) != short
    assert short == (len(screen.getvalue()) <= WIDTH + 1)


def test_long_lines_are_broken_on_a_terminal_only():
    text = "  --flag " + "word " * 40
    assert (
        all(len(line) <= WIDTH for line in fitted(text).split("\n"))
        and fitted("a\n\n  b") == "a\n\n  b"
    )
    assert fitted(text).split("\n")[1].startswith("    word")
    for out, lines in ((io.StringIO(), 1), (Terminal(), 2)):
        Report(LoggingConfig(), WORK, out).print(text)
        assert len(out.getvalue().splitlines()) == lines


def test_files_are_named_when_they_are_complete(tmp_path):
    out = io.StringIO()
    Report(LoggingConfig(metrics=str(tmp_path / "m.jsonl")), WORK, out).close()
    assert out.getvalue() == f"wrote {tmp_path / 'm.jsonl'}\n"


def test_without_a_known_peak_it_tells_the_rate():
    work = Throughput(128, 5 * 10**8, 2, None)
    assert "GFLOP/s per rank: 4.0 |" in console_line(INTERVAL, work, False, NOW)
    assert "MFU" not in console_line(INTERVAL, work, False, NOW)


def test_modelled_times_say_so_wherever_they_are_shown(tmp_path):
    work = Throughput(128, 5 * 10**11, 2, 10**13, "modelled on laptop")
    line = console_line(INTERVAL, work, True, NOW)
    assert "elapsed time per iteration (ms): 500.000 (modelled on laptop) |" in line
    assert "throughput per GPU (TFLOP/s/GPU): 4.0 (modelled on laptop) |" in line
    assert "tokens/s: 2048 (modelled on laptop) | MFU: 40.0 % (modelled on laptop) |" in line
    assert "ETA" not in line, "how long it takes here is another matter"
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    report = Report(LoggingConfig(log_interval=1, metrics=str(path)), work, out)
    report.step(Progress(1, 4, 8, 8), 0.5, StepReport(3.0, 1.0, 1e-3, False))
    report.close()
    row = json.loads(path.read_text())
    assert row["modelled_seconds"] == 0.5 and "seconds" not in row


def test_losses_are_means_over_good_steps_and_records_keep_all(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    report = Report(LoggingConfig(log_interval=2, metrics=str(path)), WORK, out)
    for iteration, loss, skipped in (
        (1, 3.0, False),
        (2, 1000.0, True),
        (3, 2.0, False),
        (4, 4.0, False),
    ):
        report.step(
            Progress(iteration, 4, 8 * iteration, 8), 0.5, StepReport(loss, 1.0, 1e-3, skipped)
        )
    report.note("valid", 4, loss=2.5)
    report.close()
    lines = [line for line in out.getvalue().splitlines() if "consumed samples" in line]
    assert "lm loss: 3.000000E+00" in lines[0] and "skipped iterations:   1" in lines[0]
    assert "lm loss: 3.000000E+00" in lines[1] and "skipped iterations:   0" in lines[1]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kind"], row["iteration"], row["loss"]) for row in rows] == [
        ("train", 1, 3.0), ("train", 2, 1000.0), ("train", 3, 2.0), ("train", 4, 4.0), ("valid", 4, 2.5)
    ]  # fmt: skip
    draw_curve(rows, tmp_path / "curve.png", {"unigram entropy": 3.5})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_skipped_step_is_told_when_it_happens():
    out = io.StringIO()
    report = Report(LoggingConfig(log_interval=10), WORK, out)
    report.step(Progress(3, 10, 24, 8), 0.5, StepReport(2.0, float("nan"), 1e-3, True))
    assert out.getvalue() == " iteration 3: the gradient norm is nan, the step was skipped\n"


@pytest.mark.parametrize("flag", ["metrics", "timeline", "curve", "tensorboard_dir", "run_dir"])
def test_places_that_cannot_be_written_are_told(tmp_path, flag):
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "x")
    config = Config(
        model=MODEL, train=TrainConfig(micro_batch_size=1), logging=LoggingConfig(**{flag: place})
    )
    with pytest.raises(
        ConfigError, match=f"--{flag.replace('_', '-')} {place}: it cannot be written"
    ):
        check_outputs(config, reports=True)
    check_outputs(config, reports=False)


def test_a_directory_is_no_file_and_checkpoints_are_checked_on_every_rank(tmp_path):
    train = TrainConfig(micro_batch_size=1)
    with pytest.raises(ConfigError, match="--curve .* it is a directory"):
        check_outputs(
            Config(model=MODEL, train=train, logging=LoggingConfig(curve=str(tmp_path))),
            reports=True,
        )
    (tmp_path / "file").touch()
    for save in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--save"):
            check_outputs(
                Config(model=MODEL, train=train, checkpoint=CheckpointConfig(save=str(save))),
                reports=False,
            )
    check_outputs(
        Config(model=MODEL, train=train, checkpoint=CheckpointConfig(save=str(tmp_path / "new"))),
        False,
    )
    assert list((tmp_path / "new").iterdir()) == []


def test_steps_of_different_sizes_count_by_their_samples():
    out = io.StringIO()
    report = Report(LoggingConfig(log_interval=2), WORK, out)
    for iteration, samples, seconds in ((1, 2, 0.5), (2, 10, 1.5)):
        report.step(
            Progress(iteration, 2, 2 + 10 * (iteration - 1), samples),
            seconds,
            StepReport(1.0, 1.0, 1e-3, False),
        )
    (line,) = out.getvalue().splitlines()
    assert (
        "global batch size:    10 |" in line
        and "tokens/s: 768 |" in line
        and "iteration (ms): 1000.0 |" in line
    )


def test_a_run_outlives_the_reader_of_its_output(monkeypatch, capsys):
    """As where `tee`, or the terminal of a job in the background, ends before it."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as lost:
        monkeypatch.setattr(sys, "stdout", lost)
        print_fitted("a plan")
        Report(LoggingConfig(), WORK).print("a line")
    told = capsys.readouterr().err
    assert told == "standard output is lost (Broken pipe): the run goes on without it\na plan\n"


def test_a_run_outlives_the_readers_of_both_streams(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as lost, open(os.dup(writer), "w") as other:
        monkeypatch.setattr(sys, "stdout", lost)
        monkeypatch.setattr(sys, "stderr", other)
        print_fitted("a plan")
        print_fitted("a plan")
