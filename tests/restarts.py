"""Jobs whose ranks are killed and which torchrun starts again, compared with the same job left
alone.

    python -m tests.restarts --trials 30 [--seed 0] [--only gpt-2-gloo]

Every trial draws a door, a layout, a backend and one to three kills. It has passed when the last
checkpoint holds what the undisturbed job's does, bit for bit, and each restart trained again in
time.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 24
LIMIT = 240.0  # seconds for a whole trial: beyond, it hangs
SOON = 15.0  # seconds from a kill to the next step
# seconds after which the agents miss a dead one: three signs of life, one each second, and a margin
MISSED = 5.0
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 60 --mock-data"
RUN = f"""--seq-length 16 --micro-batch-size 2 --global-batch-size 16 --lr 1e-2 --log-interval 1 --eval-iters 0
    --train-iters {STEPS} --save-interval 4"""
LAYOUTS = {2: ("--pipeline-model-parallel-size 2", ""), 4: ("--tensor-model-parallel-size 2", "")}


@dataclass(frozen=True)
class Case:
    """A job: its door, the number of its ranks, their backend, and on how many nodes
    torchrun runs.
    """

    door: str
    ranks: int
    backend: str
    nodes: int = 1

    @property
    def name(self) -> str:
        return f"{self.door}-{self.ranks}-{self.backend}" + (
            f"-{self.nodes}-nodes" if self.nodes > 1 else ""
        )

    def command(self, directory: Path, model: Path) -> list[str]:
        """The command of a rank, which saves to ``directory`` and resumes from there."""
        save = f"--save {directory} --load {directory} --distributed-backend {self.backend}"
        layout = LAYOUTS[self.ranks][0]
        if self.door == "gpt":
            return [str(ROOT / "pretrain_gpt.py"), *f"{SHAPE} {RUN} {layout} {save}".split()]
        if self.door == "hf":
            words = f"--model {model} --mock-data {RUN} {layout} {save}"
            return [str(ROOT / "pretrain_hf.py"), *words.split()]
        return [
            str(ROOT / "tests" / "restarts_trainer.py"),
            str(directory),
            str(STEPS),
            self.backend,
        ]


def cases() -> list[Case]:
    """Every door on two and four ranks, by both backends, and on two nodes."""
    found = []
    for door in ("gpt", "hf", "trainer"):
        for ranks in (2, 4):
            for backend in ("gloo", "merak_shm"):
                found.append(Case(door, ranks, backend))
        found.append(Case(door, 2, "gloo", nodes=2))
    return found


@dataclass
class Job:
    """A running job of ``case``: its launchers, what they printed, and when a step was last
    reported.
    """

    case: Case
    command: list[str]
    log: Path
    launchers: list[subprocess.Popen] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    port: int = 0

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        for _ in range(self.case.nodes):
            self.start_launcher()

    def start_launcher(self) -> None:
        here = self.case.ranks // self.case.nodes
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={here}",
            "--max-restarts=3",
        ]
        words += [
            f"--nnodes={self.case.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
        ]
        words += [
            "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
            + str(not self.launchers)
        ]
        words += ["--rdzv-id=restarts", *self.command]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.case.nodes > 1:
            # torch's agents publish the address of their store once; one that joins a later round
            # waits for it in vain.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            cwd=ROOT,
        )
        self.launchers.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        with open(self.log, "a") as log:
            for line in process.stdout:
                log.write(f"{time.monotonic():.2f} {line}")
                log.flush()
                if found := re.search(r"(?:iteration|step) +(\d+)(?:/| )", line):
                    self.steps.append((time.monotonic(), int(found[1])))

    def ranks(self) -> list[int]:
        """The processes of the ranks."""
        found = []
        launchers = {process.pid for process in self.launchers}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent in launchers and self.command[0].encode() in words:
                found.append(int(entry.name))
        return sorted(found)

    def wait_for_step(self, step: int, limit: float, since: float = 0.0) -> float | None:
        """Return when ``step`` or a later one was reported after ``since``; None if it is not
        within ``limit``.
        """
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for when, reported in list(self.steps):
                if when > since and reported >= step:
                    return when
            if all(process.poll() is not None for process in self.launchers):
                return None
            time.sleep(0.02)
        return None

    def wait(self, limit: float) -> int | None:
        end = time.monotonic() + limit
        for process in self.launchers:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
        return max(abs(process.returncode) for process in self.launchers[-self.case.nodes :])

    def kill(self) -> None:
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
        for pid in self.ranks():
            os.kill(pid, signal.SIGKILL)


def digests(directory: Path) -> dict:
    """What the newest checkpoint holds: the digest of every part of every tensor."""
    manifests = sorted(directory.rglob("iter_*/manifest.json"), key=lambda path: path.parent.name)
    tensors = json.loads(manifests[-1].read_text())
    assert manifests[-1].parent.name == f"iter_{STEPS:07}", manifests[-1]
    return {key: tensors[key] for key in ("tensors", "kinds", "iteration") if key in tensors}


def undisturbed(case: Case, directory: Path, model: Path) -> dict:
    job = Job(case, case.command(directory / "saved", model), directory / "log")
    job.start()
    status = job.wait(LIMIT)
    job.kill()
    assert status == 0, (case.name, status, (directory / "log").read_text()[-3000:])
    return digests(directory / "saved")


def trial(
    case: Case, kills: int, draw: random.Random, directory: Path, model: Path, expected: dict
) -> dict:
    """Run the job of ``case`` with so many kills. Returns what happened."""
    job = Job(case, case.command(directory / "saved", model), directory / "log")
    began = time.monotonic()
    job.start()
    again = []
    status = "?"
    try:
        for index in range(kills):
            step = draw.randrange(2 + 6 * index, 7 + 6 * index)
            since = again[-1][0] if again else 0.0
            if job.wait_for_step(step, LIMIT / 2, since) is None:
                status = "hung before a kill"
                break
            time.sleep(draw.random() * 0.05)
            killed = time.monotonic()
            agent = case.nodes > 1 and draw.random() < 0.5
            if agent:  # the second node: its launcher and, with it, its ranks
                job.launchers[-1].kill()
                job.launchers.pop().wait()
                # torchrun's agents count a node that comes back before it is missed as two.
                time.sleep(MISSED)
                job.start_launcher()
            else:
                os.kill(draw.choice(job.ranks()), signal.SIGKILL)
            back = job.wait_for_step(1, LIMIT / 2, killed + 0.5)
            if back is None:
                status = "did not train again"
                break
            again.append((back, back - killed))
        else:
            ended = job.wait(max(1.0, LIMIT - (time.monotonic() - began)))
            if ended is None:
                status = "hung"
            elif ended != 0:
                status = f"status {ended}"
            else:
                status = "bitwise" if digests(directory / "saved") == expected else "DIFFERENT"
    finally:
        job.kill()
    return {
        "case": case.name,
        "kills": kills,
        "status": status,
        "again": [round(each, 1) for _, each in again],
    }


def make_model(directory: Path) -> Path:
    """A configuration of a small Llama, for pretrain_hf.py."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    ).save_pretrained(directory)
    return directory


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="name of a case")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    chosen = [case for case in cases() if options.only in (None, case.name)]
    top = Path(tempfile.mkdtemp(prefix="merak-restarts-"))
    model = make_model(top / "model")
    expected: dict[str, dict] = {}
    bad = 0
    for index in range(options.trials):
        case = chosen[index % len(chosen)]
        if case.name not in expected:
            straight = top / f"straight-{case.name}"
            straight.mkdir()
            expected[case.name] = undisturbed(case, straight, model)
        place = top / f"trial-{index}"
        place.mkdir()
        row = trial(case, draw.randint(1, 3), draw, place, model, expected[case.name])
        late = [each for each in row["again"] if each > SOON]
        fine = row["status"] == "bitwise"
        bad += not fine
        print(f"{index + 1:3} {json.dumps(row)}{' LATE' if late else ''}", flush=True)
        if fine:
            shutil.rmtree(place)
        else:
            print(f"    log: {place / 'log'}", flush=True)
    print(f"{options.trials - bad} of {options.trials} bitwise")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
