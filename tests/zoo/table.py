"""docs/evidence/parity.md from the rows of a sweep."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from megatron_merak.graph.lowering.context import REPEATED

from .compare import BROKEN, DOUBLE, EXACT, REFUSED, WRONG
from .curve import GRID, MICRO_BATCHES, STEPS
from .heads import ORDER
from .measure import CELLS, DIVIDED, FULL

Row = Mapping[str, Any]
SHOWN = ("pp3", "tp2", "curve")  # cells in the table of heads

TEXT = """# Parity: any model, unmodified

This page compares every model type of transformers' auto mappings that trains from a tiny configuration with **one
process that runs the unmodified eager model** with the same random weights. Each type appears once, with its most
natural training head.

`tests/zoo` finds types, configurations and batches in transformers; none is registered by hand, so a new release adds
its own rows. Heads whose loss needs special labels (detection, instance segmentation, speech synthesis) or an image
processor (text about images) have no rows. [parity_native.md](parity_native.md) covers the layouts of the GPT of flags.
Measured with {versions}{origin}.

| | all types | causal language models |
|---|---:|---:|
{summary}

| head | types | train | captured | exact in 3 stages | exact at TP=2 | {steps} steps |
|---|---:|---:|---:|---:|---:|---:|
{heads}

- **pp2, pp3**: the captured graph, cut into 2 and 3 stages. Each stage has its own engine; stages share only the
  values that cross between them. Loss and every gradient are compared.
- **tp2, tp4**: the graph sharded over 2 ranks, and over 4 if there are fewer key-value heads than ranks. Loss and
  every gradient are compared.
- **curve**: the loss over {steps} AdamW steps, including clipping, on {ranks} ranks (tensor {tp} x pipeline {pp} x
  data {dp}), with {micro} micro-batches each.
- **Numbers**: the largest difference of a gradient, relative to that gradient's largest entry (curve: of the loss). A
  plain number is **exact** in fp32: loss within 1e-5, every gradient within 1e-4. If fp32 misses that, the run is
  repeated entirely in fp64; **fp64** means loss and gradients within 1e-10, so the difference was rounding. A
  gradient below 1e-7 of the largest one is zero in exact arithmetic (key biases) and is compared with the largest.
- **share**: the fraction of all parameters on one rank at TP=2.
- **Models** are tiny: hidden size 64, 4 heads, 2 key-value heads, at least two layers and one of each kind, 256
  tokens of vocabulary, sequences of 32, fp32, no dropout. Every initial weight has noise added, because zero biases
  and equal norms hide mistakes. CPU and gloo.

| type | class | capture | pp2 | pp3 | tp2 | tp4 | curve | share |
|---|---|---|---:|---:|---:|---:|---:|---:|
{rows}
{failures}{notes}
## Not supported

These types train with transformers but not here. The error names the line of the model that prevents it.

{refused}

## Left out

The unmodified model of these types does not train from a tiny configuration and a generic batch, for the given reason.

{left_out}

Regenerate: `make parity` (resumes where it stopped; `tools/parity.py --help`).
"""


def markdown(rows: Sequence[Row]) -> str:
    rows = sorted(rows, key=lambda r: r["type"])
    trained = [r for r in rows if "left_out" not in r]
    captured = [r for r in trained if "how" in r]
    return TEXT.format(
        versions=f"transformers {version('transformers')}, torch {version('torch').split('+')[0]}",
        summary=summary(rows),
        origin=origin(rows),
        heads=by_head(rows),
        steps=STEPS,
        ranks=GRID.size,
        tp=GRID.tp,
        pp=GRID.pp,
        dp=GRID.dp,
        micro=MICRO_BATCHES,
        rows="\n".join(line(r) for r in captured),
        failures=failures(captured),
        notes=notes(captured),
        refused="\n".join(
            f"- `{r['type']}`: {plain(uncaptured(r))}" for r in trained if "how" not in r
        )
        or "None.",
        left_out="\n".join(
            f"- `{r['type']}` ({r['class']}): {plain(r['left_out'])}"
            for r in rows
            if "left_out" in r
        ),
    )


def summary(rows: Sequence[Row]) -> str:
    columns = [facts(rows), facts([r for r in rows if r["causal"]])]
    return "\n".join(
        f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in columns[0]
    )


def by_head(rows: Sequence[Row]) -> str:
    lines = []
    for mapping in ORDER:
        here = [r for r in rows if r["mapping"] == mapping]
        if not here:
            continue
        captured = [r for r in here if "how" in r]
        trained = sum("left_out" not in r for r in here)
        exact = [
            sum(r.get(name, {}).get("state") in (EXACT, DOUBLE) for r in captured) for name in SHOWN
        ]
        name = mapping.lower().replace("_", " ").replace("lm", "LM")
        lines.append(
            f"| {' | '.join(map(str, (name, len(here), trained, len(captured), *exact)))} |"
        )
    return "\n".join(lines)


def facts(rows: Sequence[Row]) -> dict[str, str]:
    trained = [r for r in rows if "left_out" not in r]
    captured = [r for r in trained if "how" in r]

    def exact(*names: str) -> str:
        asked = [r for r in captured if all(name in r for name in names)]
        return share(
            sum(all(r[name]["state"] in (EXACT, DOUBLE) for name in names) for r in asked),
            len(asked),
        )

    wrong = [
        r["type"] for r in captured if any(r[name]["state"] == WRONG for name in CELLS if name in r)
    ]
    return {
        "types": str(len(rows)),
        "train eagerly": share(len(trained), len(rows)),
        "captured, of those": share(len(captured), len(trained)),
        "exact in 2 and 3 stages": exact("pp2", "pp3"),
        "exact at TP=2": exact("tp2"),
        "exact at TP=4, with 2 key-value heads": exact("tp4"),
        f"{STEPS} steps at TP={GRID.tp} x PP={GRID.pp} x DP={GRID.dp}": exact("curve"),
        "silently wrong": f"{len(wrong)} {', '.join(wrong)}".strip(),
        f"at most {FULL} of the parameters per rank at TP=2": str(
            sum(
                (r.get("share") or 1.0) <= FULL
                for r in captured
                if r.get("tp2", {}).get("state") in (EXACT, DOUBLE)
            )
        ),
    }


def share(count: int, of: int) -> str:
    return f"{count} of {of} ({count / of:.1%})" if of else "-"


def line(r: Row) -> str:
    cells = [r["type"], r["class"], r["how"]]
    cells += [cell(r.get(name), name) for name in CELLS]
    return "| " + " | ".join([*cells, f"{r['share']:.2f}" if r.get("share") else "-"]) + " |"


def cell(found: Row | None, name: str) -> str:
    if found is None:
        return ""
    number = f"{found['loss'] if name == 'curve' else found['gradient']:.0e}"
    number = "0" if number == "0e+00" else number
    return {EXACT: number, DOUBLE: f"fp64 {number}", WRONG: f"**wrong** {number}"}.get(
        found["state"], found["state"]
    )


def failures(captured: Sequence[Row]) -> str:
    """What stands behind the cells that are not numbers."""
    lines = []
    for r in captured:
        for name in CELLS:
            found = r.get(name)
            if found and found["state"] in (REFUSED, BROKEN, WRONG):
                text = found["text"].splitlines()[0] if found["text"] else found["where"]
                lines.append(f"- `{r['type']}` {name}: {found['state']}. {plain(text)}")
    return "\n## Cells without a number\n\n" + "\n".join(lines) + "\n" if lines else ""


def notes(captured: Sequence[Row]) -> str:
    """What a user is told about a capture, and of which types."""
    told: dict[str, list[str]] = {}
    for r in captured:
        for note in r["notes"]:
            told.setdefault(plain(note), []).append(f"`{r['type']}`")
    lines = [f"- {', '.join(types)}: {note}" for note, types in told.items()]
    return "\n## What a capture says\n\n" + "\n".join(lines) + "\n" if lines else ""


def origin(rows: Sequence[Row]) -> str:
    """Nothing where one state of the sources gave all rows."""
    count = len({r.get("digest") for r in rows})
    return f", rows by {count} successive states of the sources" if count > 1 else ""


def uncaptured(r: Row) -> str:
    return r.get(REFUSED) or r.get(BROKEN) or "?"


def plain(text: str) -> str:
    """On one line, without this machine's paths, safe inside a table."""
    words = " ".join(text.split())[:400]
    for folder in ("site-packages/", "dist-packages/"):
        while folder in words:
            at = words.index(folder)
            start = words.rfind(" ", 0, at) + 1
            words = words[:start] + words[at + len(folder) :]
    return words.replace("|", "\\|")


DIVIDED_TEXT = """# Parity: ranks that divide sequences and experts

{count} causal language models of [parity.md](parity.md), on ranks that divide more than weights, beside **one process
that runs the unmodified eager model**: loss and every gradient. Models, batches and limits are those of that
page.
Measured with {versions}.

| | exact | refused by name | other |
|---|---:|---:|---:|
{summary}

- **sp2**: tensor and sequence parallelism. What ranks would repeat is computed on parts of the sequence.
- **cp2**: context parallelism. Weights are replicated, sequences are divided, and heads where positions meet.
  **cp2 gather**, **cp2 ring**: with `--cp-comm-type all_gather` and `p2p`.
- **cp2tp2**: context, tensor and sequence parallelism, on four ranks.
- **ep2**: tensor, sequence and expert parallelism, of the types whose experts are multiplied by grouped products;
  **ep2pp2**: in two stages.
- **cp2ep2**: ranks that divide sequences divide experts; **cp2tp2ep4**: all of four ranks do.

## Refused, and why

{refused}

## Repeated

What can be divided neither by positions nor by heads, every rank computes in full. In these models, which are tiny,
that is more than 5 % of the FLOPs with cp2; of a model whose images or sounds come before long texts it is less.

{repeated}

## Exact

| type | class | {names} |
|---|---|{lines}
{rows}

Regenerate: `python tools/parity.py --divided --write`.
"""


def divided_page(rows: Sequence[Row]) -> str:
    """docs/evidence/parity_divided.md."""
    captured = sorted((r for r in rows if "how" in r), key=lambda r: r["type"])
    summary, refused = [], []
    for name in DIVIDED:
        states = [r[name]["state"] for r in captured if name in r]
        exact = sum(state in (EXACT, DOUBLE) for state in states)
        named = states.count(REFUSED)
        summary.append(
            f"| {name} | {exact} of {len(states)} | {named} | {len(states) - exact - named} |"
        )
        refused += [
            f"- `{r['type']}` {name}: {plain(r[name]['text'].splitlines()[0])}"
            for r in captured
            if name in r and r[name]["state"] not in (EXACT, DOUBLE)
        ]
    lines = [
        f"| {r['type']} | {r['class']} | {' | '.join(cell(r.get(name), name) for name in DIVIDED)} |"
        for r in captured
    ]
    return DIVIDED_TEXT.format(
        count=len(captured),
        versions=f"transformers {version('transformers')}, torch {version('torch').split('+')[0]}",
        summary="\n".join(summary),
        refused="\n".join(refused) or "None.",
        repeated=", ".join(
            f"{r['type']} {r['repeated']:.0%}"
            for r in captured
            if (r.get("repeated") or 0.0) > REPEATED
        )
        or "None.",
        names=" | ".join(DIVIDED),
        lines="---:|" * len(DIVIDED),
        rows="\n".join(lines),
    )
