"""The premises of Merak's stage-aware recomputation, each beside what the planner counts."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_merak.cluster import GIB
from megatron_merak.plan import Plan, Unit
from megatron_merak.planner.memory import Ledger, StageMemory, stage_memory
from megatron_merak.planner.predict import stage_costs
from megatron_merak.planner.recompute import recomputed_units


@dataclass(frozen=True)
class Premises:
    """What a plan with the ratio rule counts.

    aware:   under 1F1B with --recompute-method stage-aware.
    shifted: the same chain under the shifted schedule.
    limit:   bytes that a rank may use.
    """

    aware: Plan
    shifted: Plan
    limit: float

    @property
    def layers(self) -> list[Unit]:
        return [self.aware.units[index] for index in recomputed_units(self.aware.units)]

    @property
    def memories(self) -> tuple[StageMemory, ...]:
        return stage_memory(self.aware)

    def kinds_of_layers(self) -> int:
        """How many different layers there are, by activations, inputs and parameters."""
        facts = [(unit.saved_bytes, unit.output_bytes, unit.parameters) for unit in self.layers]
        return len(set(facts))

    def head(self) -> float:
        """Activations of the output layer and the loss, in those of a layer."""
        return self.aware.units[-1].saved_bytes / self.layers[0].saved_bytes

    def input(self) -> float:
        """The input that a recomputed layer keeps, in the activations of a layer."""
        return self.layers[0].output_bytes / self.layers[0].saved_bytes

    def in_flight(self, plan: Plan) -> list[int]:
        ledger = Ledger.of(plan)
        return [ledger.in_flight(index) for index in range(len(plan.stages))]

    def activations(self) -> str:
        """What micro-batches keep on each stage, in the memory of a stage's layer."""
        layer = self.layers[0].saved_bytes
        return " ".join(f"{memory.activations / layer:.0f}" for memory in self.memories)

    def static(self) -> list[float]:
        """Weights, gradients and optimizer state of each stage."""
        return [memory.weights + memory.gradients + memory.optimizer for memory in self.memories]

    def unused(self) -> list[float]:
        """What each stage leaves of its memory."""
        return [self.limit - memory.total for memory in self.memories]

    def rounds(self) -> list[float]:
        """Seconds of a forward, a backward and a recomputation of each stage."""
        costs = stage_costs(self.aware)
        return [
            sum(times) for times in zip(costs.forward, costs.backward, costs.recompute, strict=True)
        ]

    def base_rounds(self) -> list[float]:
        """The same without recomputation."""
        costs = stage_costs(self.aware)
        return [sum(times) for times in zip(costs.forward, costs.backward, strict=True)]

    def kept(self) -> list[int]:
        """Layers of each stage that keep their activations."""
        own = set(recomputed_units(self.aware.units))
        return [len(own & {*stage.units} - {*stage.recompute}) for stage in self.aware.stages]


def _range(values: list[float]) -> str:
    return f"{min(values) / GIB:.1f} - {max(values) / GIB:.1f} GiB"


def _counts(counts: list[int]) -> str:
    return " ".join(map(str, counts))


def _spread(values: list[float]) -> str:
    return f"{max(values) / min(values):.2f}x"


ROWS = (
    ("1. different layers", lambda one: str(one.kinds_of_layers())),
    ("1. the head, in activations of a layer", lambda one: f"{one.head():.2f}"),
    ("2. in flight, 1F1B", lambda one: _counts(one.in_flight(one.aware))),
    ("2. in flight, shifted", lambda one: _counts(one.in_flight(one.shifted))),
    ("3. activations on each stage, in those of a layer", lambda one: one.activations()),
    ("4. a kept input, in activations of a layer", lambda one: f"{one.input():.1%}"),
    ("5. weights, gradients and state of a stage", lambda one: _range(one.static())),
    ("6. left of a stage's memory", lambda one: _range(one.unused())),
    ("7. F + B, largest stage over smallest", lambda one: _spread(one.base_rounds())),
    ("7. F + B + R, largest stage over smallest", lambda one: _spread(one.rounds())),
    ("8. layers kept, a_i", lambda one: _counts(one.kept())),
)

TEXT = """## The paper's rule, and whether its premises hold here

Stage-aware recomputation is of Lai et al., *Merak: An Efficient Distributed DNN Training Framework with Automated 3D
Parallelism for Giant Foundation Models*, IEEE TPDS 34(5), 2023, doi 10.1109/TPDS.2023.3247001. Its full text was not
open to us; the rule is given as descriptions of it do, and the ratio form is that of the published code, whose user
supplies the ratio of the first stage. Stage i = 1, ..., s of a pipeline has L_i layers, of which it keeps the
activations of a_i and recomputes the others. M_r is the memory of one micro-batch that runs with recomputation, M_a
that of the kept activations of one layer. Under 1F1B s - i micro-batches wait on stage i beside the one that runs.
Equal memory on all stages,

    M_r + (s - i) a_i M_a  =  the same for i = 1, ..., s - 1

gives the ratio and, since a stage has no more than its layers and the last one has nothing waiting,

    a_i / a_j  =  (s - j) / (s - i)
    a_i  =  min(L_i, floor(a_1 (s - 1) / (s - i)))     for i < s
    a_s  =  L_s

with the largest a_1 for which every stage fits. As shares of a stage, with r_i recomputed:
r_i = max(0, 1 - (1 - r_1) (s - 1) / (s - i)), r_s = 0. `--recompute-method stage-aware` computes the second form; how
much fits is counted by the planner and not by M_r and M_a (`megatron_merak/planner/recompute.py`).

What the derivation takes for granted, beside the plans of the table above (1F1B, `stage-aware`):

{table}

1. **Layers are alike**: true of the GPT's layers, and not of the output layer, which keeps logits and is on the
   last stage. There the rule keeps everything anyway.
2. **Stage i holds s - i + 1 micro-batches**: exactly, under 1F1B with m >= s. The shifted schedule holds one more on
   stage s - 1, so a_(s-1) of the rule is too large there, and a_1 is lowered until it fits. `gpipe` holds m on every
   stage and `zb-h1` s: for these equal a_i are what fits alike, and the rule is wrong.
3. **The one that runs takes M_r, whatever it keeps**: true where a stage is recomputed at once, since all its
   activations then exist while it runs, however many were kept: under the shifted schedule, during an R. It does not
   hold here under 1F1B, which recomputes layer by layer: the running micro-batch has its a_i M_a like those that wait,
   and frees them before it recomputes. Equal memory would then be a_i / a_j = (s - j + 1) / (s - i + 1); by the rule,
   late stages keep more than that, until the cap L_i. The activations in the table are therefore far from equal.
4. **What waits is a_i M_a**: nearly. A recomputed layer keeps its input, which the rule does not count.
5. **Stages have the same weights, gradients and optimizer state**: no. The embedding is on the first stage and the
   head on the last, and L_i differs by a layer where s does not divide the model. The fullest stage decides a_1
   for all.
6. **All stages are filled**: hence no. This is what 3., 5., 8. and the cap a_i <= L_i leave unused.
7. **Stages take the same time**: without recomputation nearly, where s divides the model; with the rule they cannot,
   since the first stages recompute most. The slowest sets the pace of the steady state, and what later stages save
   shortens the fill and the drain only: [the closed form](paper.md) has a_1 once per micro-batch, and the others twice
   per step.
8. **a_i is continuous**: no. Where a stage has few layers, a whole one is a large step.

So the rule's ratio follows from its premises for stages that are recomputed at once under 1F1B; its step times here are
bounded by 3. and 5. to 8. *Fewest* needs none of 1. to 6., as it counts the memory of each stage, and *capacity* drops
7. too; the first table says what each is worth."""


def section(found: Mapping[str, Premises]) -> str:
    """The section of the page; found: by model."""
    lines = [["premise", *found], ["---"] * (len(found) + 1)]
    for name, shown in ROWS:
        lines.append([name, *map(shown, found.values())])
    rows = [" | ".join(cells) for cells in lines]
    return TEXT.format(table="\n".join(f"| {row} |" for row in rows))
