"""Runs that are saved under one layout and resumed under another: samples, state and losses.

    python -m benchmarks elastic --json result.json    # every pair (10 minutes)
    python -m benchmarks elastic --only 'dp4' --keep DIR
    python -m benchmarks elastic --from result.json    # no run: the table of an earlier one

Every run is a job of the real commands. One under the first layout trains an epoch and saves in its midst; one under
the second goes on from there. Of each step, every rank writes down the samples that it trained on. Checked is:

    samples   those of the resumed steps are, step for step, those of the run that was not interrupted, and with
              those before the checkpoint they are every sample of the epoch once
    state     what was loaded, saved again before the first step, equals the checkpoint in every tensor of weights and
              optimizer, bit for bit
    losses    of the resumed steps are those of the run that was not interrupted, but for sums in another order
"""

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints.elastic_cases import (
    DOORS,
    PAIRS,
    REFUSED,
    SAMPLES,
    STEPS,
    Layout,
    Pair,
)
from benchmarks.checkpoints.elastic_rank import LENGTH, VOCABULARY, Request, start
from benchmarks.runs import add_from, circumstances, parsed, show
from benchmarks.step.launcher import free_port, rank_environment
from megatron_merak.checkpoint.difference import difference
from megatron_merak.checkpoint.found import find
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter

BEGIN = "<!-- written by: python -m benchmarks elastic -->"
END = "<!-- end of elastic -->"
LIMIT = 300.0  # seconds of a job
GPT = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0
    --vocab-size 63"""
RUN = f"""--seq-length {LENGTH} --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0 --split 100,0,0
    --tokenizer-type NullTokenizer"""
TRAINER = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "num_train_epochs": 1,
    "save_strategy": "steps",
}
# Runs the ranks of a job; returns what went wrong, "" for nothing.
Launch = Callable[[Request, int], str]
# What a run of all found, as JSON.
Found = dict[str, Any]


class Failed(Exception):
    """A job ended with an error, or something is not as it should be."""


class Bench:
    """Data and models in a directory, and the runs under the first layouts, each of them once."""

    def __init__(self, root: Path, launch: Launch):
        self.root = root
        self._launch = launch
        self._runs: dict[str, Path] = {}
        self._jobs = 0
        write_data(root / "data")

    def model(self, name: str) -> Path:
        place = self.root / name
        if not place.is_dir():
            write_model(place, name)
        return place

    def run(self, pair: Pair) -> dict[str, Any]:
        """Return what was found, for a row of the table. Raises Failed."""
        saved = pair.saved
        straight = self._straight(pair)
        place = self._fresh("resumed")
        began = time.monotonic()
        log = self._job(pair, pair.after, place, straight)
        before = Steps.read(straight / "log", pair.before)
        after = Steps.read(log, pair.after)
        found = {
            "seconds": time.monotonic() - began,
            "samples": check_samples(pair, before, after),
            "tensors": check_state(checkpoint(straight, saved), place / "loaded"),
        }
        if pair.same_batch:
            found["loss"] = check_losses(before, after, pair.apart)
        return found

    def refused(self, pair: Pair) -> str:
        """Return the error of a resumption that is refused. Raises Failed if it is not."""
        straight = self._straight(pair)
        try:
            self._job(pair, pair.after, self._fresh("refused"), straight)
        except Failed as error:
            return error_line(str(error))
        raise Failed(f"{pair.name}: it was not refused")

    def _straight(self, pair: Pair) -> Path:
        """The run under the first layout that nothing interrupts, with a checkpoint on its way."""
        own = dict(pair.more), pair.saved, pair.rows, pair.kind
        key = json.dumps([pair.door, pair.before.name, own])
        if key not in self._runs:
            place = self._fresh("straight")
            self._job(pair, pair.before, place, None)
            self._runs[key] = place
        return self._runs[key]

    def _fresh(self, name: str) -> Path:
        self._jobs += 1
        place = self.root / f"{self._jobs:03d}-{name}"
        place.mkdir()
        return place

    def _job(self, pair: Pair, layout: Layout, place: Path, straight: Path | None) -> Path:
        """Run it; return where its ranks wrote."""
        more = pair.more
        saved = pair.saved
        log = place / "log"
        common = {"log": str(log), "loaded": None if straight is None else str(place / "loaded")}
        if pair.door.startswith("trainer"):
            mixture = pair.door == "trainer_moe"
            flags = {**TRAINER, **more, **layout.settings(), "output_dir": str(place / "saved")}
            flags["per_device_train_batch_size"] = layout.micro
            flags["gradient_accumulation_steps"] = layout.batch // (layout.micro * layout.dp)
            flags["save_steps"] = saved
            resume = None if straight is None else str(checkpoint(straight, saved))
            model = str(self.model("qwen3_moe" if mixture else "llama"))
            own = {"model": model, "resume": resume, "rows": pair.rows, "kind": pair.kind}
            request = Request("trainer", flags, **common, **own)
        else:
            words = RUN.split() if pair.door != "gpt" else [*GPT.split(), *RUN.split()]
            words += ["--data-path", str(self.root / "data")]
            if pair.door != "gpt":
                words += ["--model", str(self.model(pair.door))]
            options = {
                "train_iters": STEPS,
                **layout.settings(),
                **more,
                "micro_batch_size": layout.micro,
                "global_batch_size": layout.batch,
            }
            if straight is None:
                options |= {"save": str(place / "saved"), "save_interval": saved}
            else:
                options |= {"load": str(straight / "saved"), "ckpt_step": saved}
            if "train_samples" in options:
                del options["train_iters"]
            for name, value in options.items():
                words.append("--" + name.replace("_", "-"))
                words += [] if value is True else [str(value)]
            request = Request("gpt" if pair.door == "gpt" else "hf", words, **common)
        if text := self._launch(request, layout.ranks):
            raise Failed(f"{pair.name}: {text}")
        return log


class Steps:
    """What a run's ranks wrote down.

    samples: of each step, those of its replicas one after the other.
    losses:  of each step.
    """

    def __init__(self, samples: dict[int, list[list[int]]], losses: dict[int, float]):
        self.samples = samples
        self.losses = losses

    @classmethod
    def read(cls, log: Path, layout: Layout) -> "Steps":
        """Raises Failed if ranks of one replica trained on different samples, or on a step
        twice.
        """
        samples: dict[int, dict[int, list[int]]] = {}
        losses: dict[int, float] = {}
        for rank in range(layout.ranks):
            if not Path(f"{log}.{rank}").exists():
                raise Failed(f"rank {rank} made no step")
            steps = [json.loads(line) for line in Path(f"{log}.{rank}").read_text().splitlines()]
            numbers = [each["step"] for each in steps]
            if len(set(numbers)) < len(numbers):
                raise Failed(f"rank {rank} trained on a step twice: {numbers}")
            for each in steps:
                known = samples.setdefault(each["step"], {})
                if known.setdefault(each["replica"], each["ids"]) != each["ids"]:
                    raise Failed(f"ranks of a replica trained on different samples: {each}")
                if each.get("loss") is not None:
                    losses[each["step"]] = each["loss"]
        told = Path(f"{log}.losses")
        if told.exists():
            losses = {int(step): loss for step, loss in json.loads(told.read_text()).items()}
        if any(sorted(each) != [*range(layout.dp)] for each in samples.values()):
            raise Failed("a replica has no part of a step")
        parts = {}
        for step, each in samples.items():
            parts[step] = [each[replica] for replica in range(layout.dp)]
        return cls(parts, losses)

    def of(self, step: int) -> list[int]:
        return sorted(number for part in self.samples[step] for number in part)

    def all(self, first: int, last: int) -> list[int]:
        """Samples of steps first to last."""
        return [number for step in range(first, last + 1) for number in self.of(step)]


def check_samples(pair: Pair, before: Steps, after: Steps) -> int:
    """Return how many samples the resumed steps had. Raises Failed."""
    saved = pair.saved
    last = max(before.samples)
    if min(after.samples) != saved + 1:
        raise Failed(f"{pair.name}: it goes on with step {min(after.samples)}")
    if pair.same_batch:
        for step in range(saved + 1, last + 1):
            if after.of(step) != before.of(step):
                text = f"step {step} has samples {after.of(step)}, not {before.of(step)}"
                raise Failed(f"{pair.name}: {text}")
        if max(after.samples) != last:
            raise Failed(f"{pair.name}: it ends behind step {max(after.samples)}, not {last}")
    resumed = after.all(saved + 1, max(after.samples))
    counts = Counter([*before.all(1, saved), *resumed])
    straight = Counter(before.all(1, last))
    if counts != straight:
        twice = sorted((counts - straight).elements())
        missing = sorted((straight - counts).elements())
        raise Failed(f"{pair.name}: samples {twice} come too often, {missing} are missing")
    epochs, rest = divmod(counts.total(), pair.rows)
    if not rest and set(counts.values()) != {epochs}:
        raise Failed(f"{pair.name}: the epochs do not have every sample once: {counts}")
    return len(resumed)


def checkpoint(run: Path, saved: int) -> Path:
    """Return a run's checkpoint."""
    unit = run / "saved" / f"checkpoint-{saved}"
    return unit if unit.is_dir() else run / "saved" / f"iter_{saved:07d}"


def check_state(saved: Path, loaded: Path) -> int:
    """Return how many tensors two checkpoints have, all equal bit for bit. Raises Failed."""
    one = find(saved)
    other = find(loaded)
    tensors = 0
    for kind, found in difference(one, other, lambda *_: True).items():
        changed = [change.name for change in found.changes if not change.equal]
        odd = [*changed, *found.only_first, *found.only_second, *found.shapes, *found.dtypes]
        if odd:
            raise Failed(f"{kind}: {len(odd)} tensors differ after loading, {odd[0]} for one")
        tensors += len(found.changes)
    for name in ("iteration", "optimizer_steps", "consumed_samples", "loss_scale", "missed_steps"):
        if one.manifest.meta.get(name) != other.manifest.meta.get(name):
            raise Failed(f"{name} differs after loading")
    return tensors


def check_losses(before: Steps, after: Steps, limit: float) -> float:
    """Return the largest relative difference. Raises Failed above a limit."""
    apart = []
    for step in after.samples:
        if step not in after.losses:
            raise Failed(f"no loss of step {step} was told")
        apart.append(abs(after.losses[step] / before.losses[step] - 1))
    if not max(apart) <= limit:
        raise Failed(f"losses are {after.losses}, not {before.losses}")
    return max(apart)


def error_line(text: str) -> str:
    """Return the line of an error in what ranks have printed, without the rank and directories."""
    found = re.search(
        r"((?:--|[a-z_]+ |world size|batches of)[^\n]*: (?:it |[^\n]*)[^\n]*\.)\s*$", text, re.M
    )
    line = text.strip().splitlines()[-1] if found is None else found[1]
    line = re.sub(r"^.*?(?:rank \d+: |Error: )", "", line)
    return re.sub(r"/\S*/", "", line)


def launched(request: Request, ranks: int) -> str:
    """Run the ranks of a job; return the end of what they said if one failed.

    They are forked from a process that has imported everything, as a command has before it reads its
    arguments, and find the variables of a launcher.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoints.elastic_rank"])
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = rank_environment(rank, ranks, port, False)
        process = context.Process(target=start, args=(request, environment))
        process.start()
        processes.append(process)
    end = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if None in statuses:
        return f"it took more than {LIMIT:.0f} s"
    if not any(statuses):
        return ""
    texts = [Path(f"{request.log}.{rank}.out").read_text() for rank in range(ranks)]
    failed = [text for text, status in zip(texts, statuses, strict=True) if status and text.strip()]
    return (failed or texts)[0][-1500:]


def write_data(prefix: Path) -> None:
    """Write documents that are as long as samples, so that each sample begins one, whose first
    token is its number.
    """
    generator = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(SAMPLES + 1):  # of one of them, only the first token is a label
            tokens = generator.integers(0, VOCABULARY - 1, LENGTH)
            tokens[0] = number
            writer.add_document(tokens)


def write_model(place: Path, name: str) -> None:
    """Write a tiny model with weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2 * LENGTH,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(1)
    configs: dict[str, Any] = {"llama": LlamaConfig, "mixtral": MixtralConfig}
    configs["qwen3_moe"] = Qwen3MoeConfig
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    more = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": experts}.get(name, {})
    config = configs[name](**sizes, num_experts_per_tok=2, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


def play(pairs: Sequence[Pair], refused: Sequence[Pair], bench: Bench, file: Path | None) -> Found:
    """Run all; say what came out as it comes.

    file: written after each pair; what it has of an earlier run is not run again.
    """
    found: Found = {"pairs": [], "refused": []} | circumstances()
    if file is not None and file.exists():
        found |= json.loads(file.read_text())
    done = {row["name"] for row in (*found["pairs"], *found["refused"])}
    for pair in pairs:
        if pair.name not in done:
            found["pairs"].append({"name": pair.name} | outcome(pair, bench))
            keep(found, file)
    for pair in refused:
        if pair.name in done:
            continue
        try:
            says = bench.refused(pair)
        except Failed as error:
            says = f"**{error}**"
        print(f"refused {pair.name}: {says}", flush=True)
        found["refused"].append({"name": pair.name, "says": says})
        keep(found, file)
    return found


def outcome(pair: Pair, bench: Bench) -> dict[str, Any]:
    """Return what a pair's row has beside its name."""
    try:
        row = bench.run(pair)
    except Failed as error:
        print(f"FAILED  {pair.name}: {error}", flush=True)
        return {"failed": str(error)}
    print(f"ok      {pair.name}  {row.get('loss', '')}", flush=True)
    return row


def keep(found: Found, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def table(found: Found) -> str:
    """A row per pair."""
    passed = [row for row in found["pairs"] if "failed" not in row]
    lines = [
        f"{len(passed)} of {len(found['pairs'])} pairs passed. A layout ends with its micro-batches of a replica and "
        "their samples.",
        "",
        "| run | saved under | resumed under | | samples | tensors | losses apart by |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    by_name = {pair.name: pair for pair in PAIRS}
    for row in found["pairs"]:
        pair = by_name[row["name"]]
        head = f"| {DOORS[pair.door]} | {pair.before.name} | {pair.after.name} | {pair.says} |"
        if "failed" in row:
            lines.append(f"{head} **{row['failed']}** | | |")
            continue
        loss = (
            "other batches" if "loss" not in row else f"{row['loss']:.1e}" if row["loss"] else "0"
        )
        lines.append(f"{head} {row['samples']} | {row['tensors']} | {loss} |")
    lines += [
        "",
        "Refused, before a weight is changed:",
        "",
        "| run | asked for | error |",
        "|---|---|---|",
    ]
    of_refused = {pair.name: pair for pair in REFUSED}
    for row in found["refused"]:
        pair = of_refused[row["name"]]
        says = row["says"].replace("|", "\\|")
        lines.append(f"| {DOORS[pair.door]} | {pair.before.name} -> {pair.after.name} | {says} |")
    return "\n".join(lines)


def page(path: Path) -> str:
    """The tables of a file that a run wrote."""
    saved = json.loads(path.read_text())
    packages = ", ".join(f"{package} {number}" for package, number in saved["versions"].items())
    head = f"{saved['machine']}, {saved['cores']} cores, {packages}, {saved['date']}."
    return f"{head}\n\n{table(saved)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="pairs whose names have this")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files of the runs here")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write results here, pair by pair; what it has already is not run again",
    )
    add_from(parser)
    options = parsed(parser, argv)
    if options.saved:
        return show(page(options.saved), options.into, BEGIN, END)
    chosen = [pair for pair in PAIRS if re.search(options.only, pair.name)]
    refused = [pair for pair in REFUSED if re.search(options.only, pair.name)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before ranks are forked
    with tempfile.TemporaryDirectory(prefix="merak_bench_") as scratch:
        root = Path(scratch) if options.keep is None else options.keep
        root.mkdir(parents=True, exist_ok=True)
        found = play(chosen, refused, Bench(root, launched), options.json)
    print(table(found))
    return int(any("failed" in row for row in found["pairs"]))
