"""A step of benchmarks/gpu_session.py on a machine without a GPU: the same command, started through
this module.

    python -m tests.rehearsal.program STEP SCRIPT ARGUMENTS...
    python -m tests.rehearsal.program STEP -m pytest ARGUMENTS...

Our own training steps run at their real shapes on a GPU that only pretends, two micro-batches of
each: what counts is that they run, what is in memory, and how many operations are launched. Peers
and all else run on the CPU, at tiny shapes; tests that need a GPU are skipped.

REHEARSAL_PLANT: "KIND" plants a failure into every step; "KIND:STEP;KIND:STEP" into these, and all
                 others end at once.
REHEARSAL_BYTES: what the GPU has.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = 2
OURS = ("gpt", "captured", "trainer")
CARD = "NVIDIA H100 80GB HBM3"
BYTES = 85_000_000_000  # what such a card tells


def planted(kind: str) -> None:
    """Fail as asked: in this process, and with one that it has started."""
    if kind == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("hanging", flush=True)
        time.sleep(600)
    elif kind == "memory":
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif kind != "nothing":
        raise ValueError(f"REHEARSAL_PLANT={kind}: it is no kind of failure")


def on_cpu(words: list[str]) -> None:
    """Run a script, or tests, where there is no GPU."""
    if words[0] == "-m":
        words = [word for word in words if word != "--no-skip"]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = [*words, "--device", "cpu"]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    runpy.run_path(words[0], run_name="__main__")


def on_a_pretended_gpu(words: list[str]) -> None:
    """Run a row of gpu_worker.py at its real shape, and replace its figure by memory and
    launches.
    """
    from contextlib import ExitStack
    from unittest import mock

    import torch

    from megatron_merak.stages.init_captured import Initialiser

    from .device import Rehearsal
    from .driver import driver
    from .memory import Memory

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpu_stopwatch
    import gpu_worker

    row = gpu_worker.row_of(words[1])
    words[1] = f"{row.model} {row.contestant} {MICRO_BATCHES}"
    sys.argv = [*words, "--steps", "1"]
    memory = Memory(int(os.environ.get("REHEARSAL_BYTES", BYTES)))
    rehearsal = Rehearsal(memory)
    marks = []
    stepped = gpu_stopwatch.Stopwatch.step
    drawn = gpu_worker.hf_model

    def step(stopwatch) -> None:
        stepped(stopwatch)
        marks.append(rehearsal.launches)
        if len(marks) == 1:  # the first step computes tables
            rehearsal.findings.clear()

    def empty(initialiser, name, seed):
        parameter = initialiser._model.get_parameter(name)
        return torch.empty(parameter.shape, dtype=parameter.dtype)

    def save(shape, sequence, device, folder) -> None:
        gpu_worker.hf_config(shape, sequence).save_pretrained(folder)

    with ExitStack() as stack:
        for patch in (
            mock.patch.object(gpu_stopwatch.Stopwatch, "step", step),
            mock.patch.object(gpu_stopwatch.Stopwatch, "_start_profile", lambda stopwatch: None),
            mock.patch.object(gpu_stopwatch, "WARM_UPS", 1),
            # a CPU would draw a billion weights in a minute, which nobody looks at
            mock.patch.object(torch.Tensor, "normal_", lambda tensor, *arguments, **others: tensor),
            mock.patch.object(
                torch.Tensor, "uniform_", lambda tensor, *arguments, **others: tensor
            ),
            mock.patch.object(Initialiser, "draw", empty),
            mock.patch.object(
                gpu_worker, "hf_model", lambda *given: drawn(*given[:2], torch.device("cpu"))
            ),
            mock.patch.object(gpu_worker, "save_model", save),
        ):
            stack.enter_context(patch)
        stack.enter_context(rehearsal)
        stack.enter_context(driver(CARD, memory))
        try:
            gpu_worker.main()
        finally:
            found = rehearsal.inside()
    into = Path(words[words.index("--into") + 1])
    result = json.loads(into.read_text(encoding="utf-8"))
    launches = marks[-1] - marks[-2]
    figure = f"{result['row']}: {memory.peak / 1e9:.1f} GB, {launches} operations a step"
    figure += (
        f"; in micro-batches: {'; '.join(found)}"
        if found
        else ", none on the CPU and no wait in micro-batches"
    )
    counted = {"figure": figure, "peak": memory.peak, "launches": launches, "wrong": found}
    into.write_text(json.dumps(result | counted, indent=1), encoding="utf-8")
    if found:
        sys.exit(1)


def main() -> None:
    name, *words = sys.argv[1:]
    plant = os.environ.get("REHEARSAL_PLANT", "")
    if plant:
        by_step = {
            where: kind for kind, _, where in (one.partition(":") for one in plant.split(";"))
        }
        planted(by_step.get(name, by_step.get("", "nothing")))
        return
    ours = words[0].endswith("gpu_worker.py") and words[1].split()[1] in OURS
    (on_a_pretended_gpu if ours else on_cpu)(words)


if __name__ == "__main__":
    main()
