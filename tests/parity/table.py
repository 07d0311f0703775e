"""docs/evidence/parity_native.md from a full sweep."""

from collections.abc import Mapping, Sequence

from .cases import AXES, GLOBAL_BATCH, MICRO_BATCH, STEPS, Case, accelerated
from .compare import TOLERANCE, Distance, distance
from .families import FAMILIES, HEADS, HIDDEN, LAYERS, SEQUENCE
from .reference import reference

TEXT = """# Parity of the GPT of flags: every layout computes what one process computes

This page compares the GPT that flags describe with **one process that runs HuggingFace's own model**
(`GPT2LMHeadModel`, `LlamaForCausalLM`, and `Qwen3ForCausalLM` with biases on its qkv projections) with plain autograd,
`torch.optim.AdamW`, no weight decay on biases and norms, and `clip_grad_norm_`. There are {cases} runs:

- every layout of up to 8 ranks under gpipe and 1f1b, with and without recomputation of every layer, with and without
  sequence parallelism, with full micro-batches and with halves;
- every schedule with every recomputation and every overlap, all of them with tensor and pipeline parallelism.

A cell is the largest difference over all settings other than its row and column.

- **Gradient**: |ours - theirs| / |theirs| after one step, in 2-norms, of the worst tensor and of all tensors as one
  vector. Every rank's part of every gradient is read back under its HuggingFace name. Each element has exactly one
  owner, copies on other ranks are bitwise equal, and padding is zero.
- **Curve**: the largest absolute difference of the loss over {steps} optimizer steps with warm-up, clipping and
  weight decay.
- **Models**: {layers} layers, hidden size {hidden}, {heads} heads, sequence {sequence}, vocabularies of
  {vocabularies} (no tensor-parallel size divides them, so they are padded), random weights everywhere, including
  norms and biases. Global batch {batch}, micro-batch {micro}, unevenly masked tokens, and one micro-batch in which
  every token is masked. CPU and gloo, one thread per rank.
- **Limits** (worst tensor, all, curve): fp32 {fp32}; bf16 {bf16}. Two correct bf16 models differ about as much as
  each differs from fp32: the last table shows the distance of HuggingFace's bf16 run from its fp32 run. The worst
  tensors are the smallest: norms of six elements and biases of key projections.

`tests/parity/test_bitwise.py` lists what is bitwise equal, and why.

| TP | PP | DP | model | fp32: worst tensor | all | curve | bf16: worst tensor | all | curve |
|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|
{rows}

| model | HuggingFace bf16 against fp32: worst tensor | all | curve |
|---|---:|---:|---:|
{own}

Schedules by overlap of tensor-parallel communication: fp32, worst tensor, over {ways} runs of the Llama with TP 2 x
PP 2 and TP 2 x PP 4, with every recomputation ({recompute}), with and without sequence parallelism.

| schedule | {overlaps} |
|---|{rules}
{schedules}

Regenerate: `make parity-full ARGS="--parity-table docs/evidence/parity_native.md"`
"""


def cells(distances: Sequence[Distance]) -> list[str]:
    columns = zip(*((d.tensor, d.gradient, d.loss) for d in distances), strict=True)
    return [f"{max(column):.1e}" for column in columns]


def markdown(measured: Mapping[Case, Distance]) -> str:
    rows = []
    for layout in dict.fromkeys(case.layout for case in measured):
        for family in FAMILIES:
            row = [*map(str, layout), family]
            for dtype in ("fp32", "bf16"):
                here = [
                    case
                    for case in measured
                    if (case.layout, case.family, case.dtype) == (layout, family, dtype)
                ]
                row += cells([measured[case] for case in here])
            rows.append(f"| {' | '.join(row)} |")
    own = []
    for family in FAMILIES:
        found = distance(reference(family, "bf16", "masked"), reference(family, "fp32", "masked"))
        own.append(f"| {family} | {' | '.join(cells([found]))} |")
    ways = [case for case in accelerated() if case in measured]
    schedules = []
    for schedule in AXES["schedule"]:
        here = [
            [c for c in ways if (c.schedule, c.overlap) == (schedule, overlap)]
            for overlap in AXES["overlap"]
        ]
        if all(here):
            worst = (max(measured[case].tensor for case in cases) for cases in here)
            schedules.append(f"| {schedule} | {' | '.join(f'{value:.1e}' for value in worst)} |")
    return TEXT.format(
        cases=len(measured),
        ways=len(ways),
        recompute=", ".join(AXES["recompute"]),
        overlaps=" | ".join(AXES["overlap"]),
        rules="---:|" * len(AXES["overlap"]),
        schedules="\n".join(schedules),
        steps=STEPS,
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        sequence=SEQUENCE,
        vocabularies=", ".join(str(family.vocabulary) for family in FAMILIES.values()),
        batch=GLOBAL_BATCH,
        micro=MICRO_BATCH,
        **{
            dtype: ", ".join(f"{v:g}" for v in (d.tensor, d.gradient, d.loss))
            for dtype, d in TOLERANCE.items()
        },
        rows="\n".join(rows),
        own="\n".join(own),
    )
