"""Times the steps of a run that calls it at the end of each, tells what they were worth, and
profiles one more.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from gpu_rows import SHAPES, Row, peak, tiny
from gpu_trace import breakdown

WARM_UPS = 2
PACKAGES = ("torch", "transformers", "accelerate", "peft", "triton")
QUERIED = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def card(device: torch.device) -> dict:
    """The device and its clocks, now."""
    found = {"name": device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader"]
        try:
            told = subprocess.run(
                command, capture_output=True, text=True, timeout=10
            ).stdout.splitlines()
        except subprocess.TimeoutExpired:
            told = []
        values = told[0].split(", ") if told else []
        found |= dict(zip(QUERIED.split(","), values, strict=False))
    return found


def write(path: Path, found: dict) -> None:
    """Write JSON so that a run that is killed leaves the file that was there, or the whole
    new one.
    """
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def versions() -> dict[str, str]:
    """Of those PACKAGES that are installed, of Python, and of CUDA and cuDNN."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found


def environment() -> dict[str, str]:
    """The variables that change what torch and this library do."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PYTORCH_", "TORCH_", "MERAK_"))
    }


class Stopwatch:
    """Writes ``into`` when ``measured`` steps behind the warm-ups are over, and again with the
    profile of the next.

    steps: how many the run has to take. began: when the process did, as time.time tells it.
    """

    def __init__(
        self, row: Row, device: torch.device, sequence: int, measured: int, into: Path, began: float
    ):
        self.row = row
        self.device = device
        self.sequence = sequence
        self.into = into
        self.began = began
        self.measured = measured
        self.steps = WARM_UPS + measured + 1
        self.ends: list[float] = []
        self.spent: list[float] = []
        self.losses: list[float] = []
        self.startup = 0.0
        self.notes: dict[str, str] = {}
        self.found: dict = {}
        self._profiler: torch.profiler.profile | None = None

    def loss(self, value: float) -> None:
        self.losses.append(value)

    def step(self) -> None:
        """A step is over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ends.append(time.perf_counter())
        self.spent.append(time.process_time())
        if len(self.ends) == 1:
            self.startup = time.time() - self.began
        if len(self.ends) == self.steps - 1:
            self._write()
            self._guarded(self._start_profile)
        elif len(self.ends) == self.steps:
            self._guarded(self._stop_profile)
            self._write()

    def _write(self) -> None:
        seconds, processor = self._each(self.ends), self._each(self.spent)
        shape = (
            SHAPES[self.row.model] if self.device.type == "cuda" else tiny(SHAPES[self.row.model])
        )
        tokens, typical = self.row.micro_batches * self.sequence, median(seconds)
        flops, name = shape.flops(tokens, self.sequence), device_name(self.device)
        limit = peak(name)
        now = {
            "row": self.row.name, **asdict(self.row), "device": name, "card": card(self.device),
            "shape": asdict(shape), "parameters": shape.parameters, "sequence": self.sequence, "dtype": "bfloat16",
            "seconds": seconds, "processor_seconds": processor, "startup_s": self.startup,
            "tokens_per_s": tokens / typical,
            "tflops": flops / typical / 1e12, "mfu": flops / typical / limit if limit else None, "peak_flops": limit,
            "tflops_all_scores": shape.flops(tokens, self.sequence, all_scores=True) / typical / 1e12,
            "losses": self.losses, "versions": versions(),
            "environment": environment(), "notes": self.notes, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        memory = self.memory()
        now["figure"] = _figure(now, memory)
        self.found = (
            memory | now | {key: self.found[key] for key in ("profile",) if key in self.found}
        )
        write(self.into, self.found)

    def _each(self, ends: list[float]) -> list[float]:
        """Of the measured steps."""
        steps = ends[WARM_UPS - 1 : WARM_UPS + self.measured]
        return [end - begin for begin, end in zip(steps, steps[1:], strict=False)]

    def memory(self) -> dict[str, int]:
        """Bytes at the peak of the run so far."""
        if self.device.type != "cuda":
            return {
                "peak_allocated": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "peak_reserved": 0,
            }
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved": torch.cuda.max_memory_reserved(self.device),
        }

    def _guarded(self, part: Callable[[], None]) -> None:
        """A profiler that fails leaves its reason, and the measurement as it is."""
        try:
            part()
        except Exception as error:
            self.found["profile"] = {"problem": f"{type(error).__name__}: {error}"[:500]}

    def _start_profile(self) -> None:
        activity = torch.profiler.ProfilerActivity
        kind = activity.CUDA if self.device.type == "cuda" else activity.CPU
        self._profiler = torch.profiler.profile(activities=[kind])
        self._profiler.start()

    def _stop_profile(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
        self.found["profile"] = breakdown(trace, self.device.type)


def _figure(found: dict, memory: dict) -> str:
    """What was measured, in a line."""
    mfu = f"{found['mfu']:.1%} MFU, " if found["mfu"] else ""
    speed = f"{found['tokens_per_s']:.0f} tokens/s, {found['tflops']:.3g} TFLOP/s, {mfu}"
    return f"{speed}{memory['peak_allocated'] / 1e9:.1f} GB, first step after {found['startup_s']:.0f} s"
