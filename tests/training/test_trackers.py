"""A run's numbers in TensorBoard, Weights & Biases, MLflow and OpenTelemetry, read back by their
own libraries.
"""

import dataclasses
import gzip
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_merak.config import LoggingConfig
from megatron_merak.errors import ConfigError
from megatron_merak.training.trackers import chosen
from megatron_merak.training.trackers.tracker import Tracker

ROOT = Path(__file__).parents[2]
RUN = """-m megatron_merak pretrain --mock-data --vocab-size 50 --num-layers 1 --hidden-size 8
--num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 0.01
--eval-interval 2 --eval-iters 1 --save-interval 2"""


@pytest.fixture
def collector():
    """An endpoint of OTLP over HTTP: (address, requests)."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            requests.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()


def environment(place, **given):
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "OTEL"))
    }
    return own | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file://{place}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        **given,
    }


def expected(metrics):
    """{(kind/name, iteration): value} of a --metrics file."""
    found = {}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        kind, iteration = record.pop("kind"), record.pop("iteration")
        found |= {(f"{kind}/{name}", iteration): float(value) for name, value in record.items()}
    return found


def of_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        (tag, scalar.step): scalar.value
        for tag in events.Tags()["scalars"]
        for scalar in events.Scalars(tag)
    }


def records(file):
    """The messages of a .wandb file: LevelDB's log format behind seven bytes of its own."""
    data = file.read_bytes()
    at = 7
    parts = []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block has no room for a header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            break
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def of_wandb(directory):
    """The rows and the settings of the run that is kept in a directory."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/wandb/offline-run-*/*.wandb")
    found = {}
    settings = {}
    for data in records(file):
        record = Record()
        record.ParseFromString(data)
        items = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        step = items.get("_step")
        found |= {(name, step): float(value) for name, value in items.items() if "/" in name}
        for update in record.run.config.update:
            settings["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
    return found, settings


def of_mlflow(place):
    """The metrics and the parameters of the run in a directory, as its files have them."""
    (run,) = (path.parent for path in place.glob("mlruns/*/*/params"))
    found = {}
    for file in (path for path in run.glob("metrics/**/*") if path.is_file()):
        for line in file.read_text().splitlines():
            _, value, step = line.split()[:3]
            found[str(file.relative_to(run / "metrics")), int(step)] = float(value)
    return found, {path.name: path.read_text() for path in run.glob("params/*")}


def of_collector(requests):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []
    for path, body in requests:
        assert path == "/v1/traces"
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        for resource in message.resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    return spans


def attribute(span, name):
    (value,) = (each.value for each in span.attributes if each.key == name)
    return getattr(value, value.WhichOneof("value"))


@pytest.mark.long
def test_each_tracker_has_the_numbers_of_the_run(tmp_path, collector):
    address, requests = collector
    words = [
        "--metrics",
        f"{tmp_path}/metrics.jsonl",
        "--tensorboard-dir",
        f"{tmp_path}/board",
        "--wandb-project",
        "merak",
        "--wandb-exp-name",
        "first",
        "--save",
        f"{tmp_path}/saved",
        "--load",
        f"{tmp_path}/saved",
        "--report-to",
        "mlflow",
        "opentelemetry",
    ]
    done = subprocess.run(
        [sys.executable, *RUN.split(), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=address),
    )
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path}/board" in done.stdout
    assert "wrote MLflow run" in done.stdout
    values = expected(tmp_path / "metrics.jsonl")
    assert {iteration for _, iteration in values} == {1, 2, 3, 4}
    board = of_tensorboard(tmp_path / "board")
    assert board == pytest.approx(values, rel=1e-6) and len(values) > 20
    rows, settings = of_wandb(tmp_path / "saved")
    assert rows == pytest.approx(values)
    assert settings["num_layers"] == 1 and settings["lr"] == 0.01
    metrics, parameters = of_mlflow(tmp_path)
    assert metrics == pytest.approx(values)
    assert parameters["num_layers"] == "1"
    spans = of_collector(requests)
    (run,) = (span for span in spans if span.name == "merak.run")
    names = [span.name for span in spans if span.parent_span_id == run.span_id]
    assert sorted(names) == [*["merak.evaluate"] * 3, *["merak.save"] * 2, *["merak.step"] * 4]
    for span in spans:
        if span.name == "merak.step":
            iteration = attribute(span, "merak.iteration")
            assert attribute(span, "merak.loss") == values["train/loss", iteration]
            seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            assert seconds == pytest.approx(values["train/seconds", iteration], abs=1e-6)


@pytest.mark.long
def test_a_server_that_is_not_there_ends_the_run_soon(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *RUN.split(), "--save", str(tmp_path), "--report-to", "mlflow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(tmp_path) | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    )
    assert done.returncode == 1
    assert "--report-to mlflow: " in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith("Set it up, or leave it out.")
    assert time.monotonic() - began < 60


class Breaking(Tracker):
    name = "Breaking"

    def __init__(self):
        self.calls = []

    def note(self, kind, iteration, values):
        self.calls.append(iteration)
        if iteration == 2:
            raise RuntimeError("the server\nis gone")


def test_a_tracker_that_fails_does_not_end_the_run():
    said = []
    tracker = Breaking()
    lasting = chosen.Lasting(tracker, said.append)
    for iteration in (1, 2, 3):
        lasting.note("train", iteration, {"loss": 1.0})
    lasting.span("step", 3, 0.1, {})
    lasting.close()
    assert tracker.calls == [1, 2]
    assert said == ["Breaking failed (the server is gone): Breaking has nothing after iteration 2"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"wandb_exp_name": "first"},
            "--wandb-exp-name first: has no effect without --wandb-project. Add --wandb-project, or "
            "leave it out.",
        ),
        (
            {"report_to": ("wandb",)},
            "--report-to wandb: there is no API key of Weights & Biases. Call wandb login, set "
            "WANDB_API_KEY, or keep the run here by WANDB_MODE=offline.",
        ),
    ],
)
def test_mistakes_are_told_first(fields, told, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError) as error:
        chosen.check_trackers(LoggingConfig(**fields))
    assert str(error.value) == told


@pytest.mark.parametrize("name", chosen.LIBRARIES)
def test_a_library_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setattr(chosen, "is_installed", lambda library: False)
    fields = {"tensorboard_dir": "runs"} if name == "tensorboard" else {"report_to": (name,)}
    with pytest.raises(
        ConfigError, match=r"is not installed. Install it: pip install -e '.\[tracking"
    ):
        chosen.check_trackers(LoggingConfig(**fields))


def test_every_choice_has_a_library():
    (row,) = (row for row in dataclasses.fields(LoggingConfig) if row.name == "report_to")
    assert chosen.LIBRARIES.keys() == {*row.metadata["choices"]}


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="--report-to neptune: is not one of the choices"):
        LoggingConfig(report_to=("neptune",))
