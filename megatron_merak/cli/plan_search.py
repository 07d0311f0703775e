"""Search the plan with which a step takes least time: degrees, micro-batch, schedule, recomputation,
overlap and sharding. Needs no GPU.

Give the flags of the model and of the batch as for pretrain_gpt.py, or with --model those of
pretrain_hf.py; data and learning rate may be left out. The flags that the search decides are
printed as a command line.

examples:
  # Llama-3 8B on 64 GPUs
  merak-plan search --cluster dgx-h100 --gpus 64 --global-batch-size 512 --bf16 --tokens 1T \\
      --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
      --group-query-attention --num-query-groups 8 --seq-length 8192 --vocab-size 128256 --swiglu \\
      --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \\
      --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0

  # an unmodified HuggingFace model; what tensor parallelism of 2 would cost; with half the GPUs
  merak-plan search --cluster dgx-a100 --gpus 384 --global-batch-size 2048 --bf16 \\
      --model examples/shapes/bloom-176b.json --seq-length 2048 --why tp=2 --what-if gpus=192

  # some settings are given; the plan is stored, and trained with pretrain_gpt.py --plan plan.json
  merak-plan search ... --fix tp=8,pp=4 -o plan.json
"""

import shlex
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import build_parser, expanded, flags, read
from ..cluster import Cluster, find_cluster, profiled
from ..config import Config, RunConfig, flag_name
from ..config.batches import number
from ..config.table import MAKES
from ..counting import counted
from ..errors import ConfigError, PlanError
from ..pipeline_parallel.search.progress import SearchProgress
from ..training.planned import kind_of, world_size
from .words import described

if TYPE_CHECKING:
    from ..plan import Plan
    from ..planner.search import FoundPlan, Result, Search

NAME = "merak-plan"
USAGE = """merak-plan search --cluster NAME --gpus N --global-batch-size B --seq-length S
                         [--tokens T] [--fix tp=8,pp=4] [--why tp=2] [--what-if gpus=128]
                         [-o FILE.json] TRAINING FLAGS"""
_DAY = 86_400
_OWN = ("--cluster", "--gpus", "--tokens", "--fix", "--why", "--what-if", "-o", "--output")
_SEARCHING = "searching a plan"


@dataclass(frozen=True)
class Question:
    """What a command line asks.

    words:  its training flags.
    name:   of the cluster.
    tokens: of the run; None: unknown.
    output: the file in which the plan is stored; None: it is not.
    """

    config: RunConfig
    words: tuple[str, ...]
    name: str
    cluster: Cluster
    ranks: int
    pins: dict[str, Any]
    tokens: int | None
    output: str | None


def search(arguments: Sequence[str]) -> None:
    """Print the plan that a search finds, and what was asked beside it."""
    from ..planner.search import pins_of

    arguments = expanded(arguments)
    question, own = _question(arguments)
    if own.output is not None:
        from ..training.outputs import check_file

        check_file("--output", own.output)
    from ..training.searched import batch_sizes, search_of, unfit

    searched = search_of(question.config, question.cluster, question.pins)
    batch = batch_sizes(question.config)
    here = searched.for_ranks(question.ranks)
    result = _run(here, question.ranks, batch, question.pins)
    best = result.best
    if best is None:
        raise unfit(searched, question.ranks, batch, question.pins, result)
    print(_shown(question, here, result, best))
    if own.why is not None:
        print(f"\n{_why(question, best, pins_of(own.why, '--why'), own.why)}")
    if own.what_if is not None:
        print(f"\n{_what_if(question, searched, best, own.what_if)}")
    if own.output is not None:
        Path(own.output).write_text(_made(question, best).to_json(), encoding="utf-8")
        print(f"wrote {own.output}", file=sys.stderr)


def _question(arguments: Sequence[str]) -> tuple[Question, Any]:
    """Return what is asked, and the values of the flags of this command."""
    from ..planner.search import pins_of
    from ..training.searched import stand_ins

    kind = kind_of(arguments)
    parser = build_parser(described(__doc__, NAME), kind)
    parser.usage = described(USAGE, NAME)
    parser.add_argument("command", choices=("search",), help="search the fastest plan")
    group = parser.add_argument_group("search")
    texts = {
        "--cluster": ("NAME", "device or cluster to plan for, or its JSON file [required]"),
        "--gpus": ("N", "number of ranks [required]"),
        "--tokens": ("N", "tokens of the run, such as 1.4T: shows its days [unset]"),
        "--fix": ("NAME=VALUE,...", "settings that the plan must have: tp, pp, mb, ... [unset]"),
        "--why": ("NAME=VALUE,...", "show what the best plan with these settings costs [unset]"),
        "--what-if": ("NAME=VALUE,...", "search again with other gpus, memory, cluster [unset]"),
    }
    for name, (metavar, text) in texts.items():
        group.add_argument(name, metavar=metavar, default=None, help=text)
    group.add_argument(
        "-o", "--output", metavar="FILE", default=None, help="store the plan [unset]"
    )
    standing = stand_ins(arguments, "--fix {}=VALUE")
    config, own = read(parser, arguments, kind, standing)
    ranks = world_size(own.gpus, "--gpus")
    if own.cluster is None:
        raise ConfigError("--cluster", "(missing)", "it is what is planned for", "Name one")
    if config.parallel.parallel is not None:
        raise ConfigError("--parallel", "(given)", "this command searches", "Use --fix")
    cluster = profiled(find_cluster(own.cluster), config.parallel.device_profile)
    cluster.used_by(ranks)
    tokens = None
    if own.tokens is not None and not (tokens := number(own.tokens)):
        reason = "it is not a number of tokens"
        raise ConfigError("--tokens", own.tokens, reason, "Write it like 300B or 1.4T")
    pins = pins_of(own.fix, "--fix") if own.fix else {}
    question = Question(
        config,
        tuple(without(arguments[1:], _OWN)),
        own.cluster,
        cluster,
        ranks,
        pins=pins,
        tokens=tokens,
        output=own.output,
    )
    return question, own


def without(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without some flags and their values."""
    kept = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word.partition("=")[0] not in names:
            kept.append(word)
            continue
        while left and not left[0].startswith("--"):
            left.pop(0)
    return kept


def _run(search: "Search", ranks: int, batch: Sequence[int], pins: dict[str, Any]) -> "Result":
    with SearchProgress(_SEARCHING) as progress:
        return search.run(ranks, batch, pins, progress)


def _made(question: Question, found: "FoundPlan") -> "Plan":
    """Return the plan as its flags make it: with the shardings of weights."""
    from ..training.planned import Maker
    from ..training.searched import applied

    config = applied(question.config, found.choice)
    own = Namespace(world_size=str(question.ranks), device=question.name)
    return Maker(config, own).plan


def _shown(question: Question, search: "Search", result: "Result", best: "FoundPlan") -> str:
    """Return the answer: the plan, its flags, its time and memory, and what is near it."""
    from ..plan import batch, layout, time_text
    from ..planner.search.report import (
        binding,
        left_out,
        memory_line,
        rate,
        runners_up,
        stages_on_nodes,
        table,
    )

    plan = best.plan
    tokens = rate(plan, best.seconds)
    unit = "tokens" if plan.sequence_length else "samples"
    lines = [
        layout(plan),
        batch(plan),
        f"predicted on {plan.cluster}: {time_text(best.seconds)} per step, {tokens:,.0f} {unit} "
        f"per second and rank",
    ]
    if question.tokens is not None:
        seconds = question.tokens / (tokens * plan.grid.size)
        lines.append(
            f"{question.tokens:,} tokens: {seconds / _DAY:,.1f} days, "
            f"{seconds * plan.grid.size / 3600:,.0f} GPU hours"
        )
    lines.append(memory_line(plan, search.memory))
    counts = f"{result.counted:,} layouts considered, {result.made:,} planned"
    parts = ["\n".join(lines), stages_on_nodes(plan), command(question, best), table(plan)]
    parts += [binding(best, search.memory), runners_up(result, best)]
    parts += ["\n".join(filter(None, (counts, left_out(result))))]
    return "\n\n".join(part for part in parts if part)


def command(question: Question, found: "FoundPlan") -> str:
    """Return the command line that trains with a plan that was found; where nodes differ, with the
    stored plan, since its flags alone say nothing of these.
    """
    settings = found.choice.settings()
    script = "pretrain_gpt.py" if isinstance(question.config, Config) else "pretrain_hf.py"
    words = [script, *question.words]
    if not found.choice.layer.exchanges_rows:
        words = [script, *without(words[1:], (flag_name("moe_expert_rank_capacity_factor"),))]
    if found.plan.cluster.nodes:
        decided = tuple(flag_name(name) for name in MAKES)
        words = [script, "--plan", question.output or "FILE", *without(words[1:], decided)]
        return _wrapped(words)
    for flag in flags(type(question.config)):
        value = settings.get(flag.field)
        if value is None or (value == flag.default and flag.field in settings):
            continue
        words += [flag_name(flag.field)] if value is True else [flag_name(flag.field), str(value)]
    return _wrapped(words)


def _wrapped(words: Sequence[str], width: int = 96) -> str:
    """Return a command line over several lines, a flag and its values on one."""
    groups: list[list[str]] = [[words[0]]]
    for word in words[1:]:
        if word.startswith("--") or len(groups) == 1:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    lines = [""]
    for group in map(" ".join, groups):
        if lines[-1] and len(lines[-1]) + len(group) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {group}" if lines[-1] else group
    return " \\\n".join(lines)


def _why(question: Question, best: "FoundPlan", pins: dict[str, Any], text: str) -> str:
    """Return what the best plan with other settings costs, and where."""
    from ..planner.search.report import comparison
    from ..training.searched import batch_sizes, search_of, unfit

    batch = batch_sizes(question.config)
    both = {**question.pins, **pins}
    # what is pinned may need another form of the model
    search = search_of(question.config, question.cluster, both)
    result = _run(search, question.ranks, batch, both)
    if result.fastest is None:
        return f"{text}: {unfit(search, question.ranks, batch, both, result)}"
    other = result.fastest
    if other.choice == best.choice:
        return f"{text}: the plan has it."
    return f"best with {text}: {other.choice}\n{comparison(best, other, 'a step')}"


def _what_if(question: Question, search: "Search", best: "FoundPlan", text: str) -> str:
    """Return what another machine changes."""
    from ..plan import nodes_text, time_text
    from ..planner.search.report import rate
    from ..training.searched import batch_sizes, search_of, unfit

    ranks = question.ranks
    memory = None
    other = search
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "gpus":
            ranks = world_size(value, "--what-if gpus")
        elif name == "memory":
            memory = _gibibytes(value)
        elif name == "cluster":
            other = search_of(question.config, find_cluster(value), question.pins)
        else:
            use = "Use gpus, memory (GiB of a rank) or cluster"
            raise ConfigError("--what-if", part, "it is not known", use)
    if memory is not None:
        other = other.on(other.cluster, memory)
    batch = batch_sizes(question.config)
    try:
        other.cluster.used_by(ranks)
    except PlanError as error:
        return f"with {text}: {error}"
    result = _run(other, ranks, batch, question.pins)
    if result.best is None:
        return f"with {text}: {unfit(other, ranks, batch, question.pins, result)}"
    found = result.best
    used = ""
    if other.cluster.nodes:
        own = found.plan.cluster
        alike = f"{counted(-(-ranks // own.ranks_per_node), 'node')} of {own.device_names}"
        used = f" on {nodes_text(found.plan) or alike}"
    return (
        f"with {text}{used}: {found.choice}\n{time_text(found.seconds)} per step "
        f"({found.seconds / best.seconds - 1:+.1%}), {rate(found.plan, found.seconds):,.0f} tokens "
        "per second and rank"
    )


def _gibibytes(text: str) -> float:
    try:
        memory = float(text)
    except ValueError:
        memory = 0.0
    if not 0 < memory < 1 << 20:
        reason = "it is not a number of GiB"
        raise ConfigError("--what-if memory", text, reason, "Write it like 80")
    return memory
