"""Compute a step with unexpected results again, to tell a transient fault from a persistent one and both from the data.

Megatron-LM's --rerun-mode, with one difference: where there are several replicas, the one before computes a suspicious
replica's micro-batches at once, which takes another device without restarting the job.

    first run     a rank has an unexpected result: all ranks run again
    second run    other bits                                       -> transient, on the rank that differs
    third run     micro-batches of the next replica: other bits    -> persistent, on the suspicious ranks
                  the same bits                                    -> the numbers are right
"""

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..counting import named_ranks
from ..errors import DoubtfulResultError, NumericsError, UnexpectedResultError
from ..parallel.agree import gather_json, together
from ..runtime.watching import Seals, sealed
from ..tensor_parallel import derive_seed
from .borrowed import batches_of_next
from .unexpected import Checks, Judge, Rejection

_INTERVAL = 2  # steps between two reports of --rerun-mode report_stats, as in Megatron-LM


class Rerun:
    """Runs the backwards of a model's steps, and looks at their results before weights are updated.

    model:  a TrainedModel.
    checks: what is looked for, and what follows.
    say:    called on every rank with each line for the user, the same on all but for ``warn``.
    warn:   called, without --rerun-mode, on the rank that has an unexpected result.
    name:   under which the user knows ``rerun_mode``.
    seed:   of injected errors.
    """

    def __init__(
        self,
        model: Any,
        checks: Checks,
        say: Callable[[str], object],
        warn: Callable[[str], object],
        name: str,
        seed: int = 0,
    ):
        self.model = model
        self.mesh = model.mesh
        self.checks = checks
        self.say = say
        self.warn = warn
        self.name = name
        self.seed = seed
        self.judge = (
            Judge(checks, finite=not model.optimizer.scaler.scales) if checks.active else None
        )
        self._worst: dict[str, float] = {}

    def backward(self, batches: Sequence[Mapping[str, Any]]) -> Tensor | None:
        """Return what the model's `backward` does. Collective over all ranks.

        Raises UnexpectedResultError or DoubtfulResultError on every rank, before anything is
        updated.
        """
        if self.judge is None:
            return self.model.backward(batches)
        if not self.model.settled:
            self.model.backward(batches)  # it decides how to run
        restore: Any = self.model.snapshot() if self.checks.rerun_mode != "disabled" else None
        reduced, seals = self._run(batches)
        facts = self._facts(batches, seals)
        if self.checks.rerun_mode == "report_stats":
            restore()
            again, seals = self._run(batches)
            self._note_difference(facts, self._facts(batches, seals))
            return again
        rejection = self._rejection(facts)
        if restore is None:
            if rejection is not None:
                self.warn(f"{self._step} on rank {self.mesh.rank}: {rejection.text}")
            return reduced
        if not self._any(rejection is not None):
            return reduced
        return self._validate(batches, rejection, facts, restore)

    @property
    def _step(self) -> str:
        return f"step {self.model.iteration + 1}"

    def _run(self, batches: Sequence[Mapping[str, Any]]) -> tuple[Tensor | None, Seals]:
        with sealed(self.model.executor(len(batches)), self.model.parameters) as seals:
            return self.model.backward(batches), seals

    def _facts(self, batches: Sequence[Mapping[str, Any]], seals: Seals) -> dict[str, Any]:
        """Return what this rank computed in the last run, JSON-safe."""
        executor = self.model.executor(len(batches))
        means = [mean for _, _, mean in executor.last.losses]
        losses = torch.stack(means).double().tolist() if means else []
        return {
            "losses": losses,
            "norm": math.sqrt(seals.square) / self.model.optimizer.scaled,
            "forward": [*map(_hex, losses), *map(int, seals.sent)],
            "gradients": [*map(int, seals.gradients)],
        }

    def _rejection(self, facts: Mapping[str, Any]) -> Rejection | None:
        assert self.judge is not None, "without it no step is computed again"
        rejection = self.judge.rejection(facts["losses"], facts["norm"])
        rate = self.checks.error_injection_rate
        if rejection is None and rate and self.checks.rerun_mode != "disabled":
            draw = derive_seed(self.seed, self.model.iteration, self.mesh.rank)
            rejection = Rejection("an injected error", False) if draw % rate == 0 else None
        return rejection

    def _any(self, flag: bool) -> bool:
        """Whether any rank has the flag. Collective."""
        if self.mesh.control is None:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.mesh.control)
        return bool(flags)

    def _gather(self, value: object) -> list:
        return gather_json(value, self.mesh.control, "cpu")

    def _validate(
        self,
        batches: Sequence[Mapping[str, Any]],
        rejection: Rejection | None,
        facts: Mapping[str, Any],
        restore: Callable[[], None],
    ) -> Tensor | None:
        """Compute the step again until it is known what is wrong; return the last result if all may
        go on.
        """
        reports = self._gather(None if rejection is None else [rejection.text, rejection.fatal])
        suspects = [rank for rank, report in enumerate(reports) if report is not None]
        text = reports[suspects[0]][0]
        fatal = any(report[1] for report in reports if report)
        injected = self.checks.error_injection_type if text == "an injected error" else ""
        self.say(f"{self._step}: {text}, on {named_ranks(suspects)}; the step is computed again")
        first = self._gather(facts)
        restore()
        reduced, seals = self._run(batches)
        second = self._gather(self._facts(batches, seals))
        odd = [rank for rank in range(len(first)) if _differ(first[rank], second[rank])]
        if injected:
            odd = suspects if injected == "transient_error" else odd
        if odd:
            who = self._origin(odd, first, second)
            verdict = (
                f"{self._named(who)} computed other numbers the second time: a transient fault"
            )
            return self._end(reduced, verdict, fatal, UnexpectedResultError)
        # replicas that divide experts compute with one another's rows, in an order of their own
        if self.mesh.grid.dp == 1 or self.mesh.experts is not None:
            verdict = (
                f"{self._named(suspects)} computed the same numbers again, and no other "
                "replica can compute them"
            )
            return self._end(
                reduced, verdict + self._place(batches, fatal), fatal, DoubtfulResultError
            )
        third = self._borrow(batches, restore)
        wrong = [rank for rank in suspects if _differ(first[rank], third[self._stand_in(rank)])]
        if injected:
            wrong = suspects if injected == "persistent_error" else wrong
        restore()
        reduced, _ = self._run(batches)
        stand_ins = named_ranks([self._stand_in(rank) for rank in wrong or suspects])
        if wrong:
            verdict = (
                f"{self._named(wrong)} computed the same numbers again, and {stand_ins} "
                "others from the same "
            )
            verdict += "micro-batches: a persistent fault"
            return self._end(reduced, verdict, fatal, UnexpectedResultError)
        verdict = (
            f"{self._named(suspects)} computed the same numbers again, and so did "
            f"{stand_ins}: they are right, and "
        )
        verdict += "due to the data, the weights or the learning rate"
        return self._end(
            reduced, verdict + self._place(batches, fatal), fatal, UnexpectedResultError
        )

    def _borrow(
        self, batches: Sequence[Mapping[str, Any]], restore: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Return what every rank computes from the micro-batches of the next replica."""
        restore()
        borrowed = batches_of_next(batches, self.mesh)
        stages = self.model.stages.values()
        own = {stage.index: stage.replica for stage in stages}
        shift = (self.mesh.dp_rank + 1) % self.mesh.grid.dp - self.mesh.dp_rank
        try:
            for stage in stages:
                stage.replica += shift
            with together(self.mesh.control, "cpu"):
                self.model.admit(borrowed, True)
            _, seals = self._run(borrowed)
        finally:
            for stage in stages:
                stage.replica = own[stage.index]
        return self._gather(self._facts(borrowed, seals))

    def _stand_in(self, rank: int) -> int:
        """Return the rank that computed in the third run what ``rank`` did in the first."""
        grid = self.mesh.grid
        tp, cp, dp, pp = grid.coordinates(rank)
        return grid.rank(tp, cp, (dp - 1) % grid.dp, pp)

    def _origin(
        self, odd: Sequence[int], first: Sequence[Mapping], second: Sequence[Mapping]
    ) -> list[int]:
        """Return those of the ranks with other numbers where they arose: others only passed them
        on.
        """
        forward = [rank for rank in odd if first[rank]["forward"] != second[rank]["forward"]]
        stage_of = {rank: self.mesh.grid.coordinates(rank)[3] for rank in odd}
        if forward:
            earliest = min(stage_of[rank] for rank in forward)
            return [rank for rank in forward if stage_of[rank] == earliest]
        # gradients pass from the last stage to the first
        latest = max(stage_of[rank] for rank in odd)
        return [rank for rank in odd if stage_of[rank] == latest]

    def _named(self, ranks: Sequence[int]) -> str:
        """Return the ranks with their hosts and devices. Collective."""
        places = self._gather(f"{platform.node()}, {self.mesh.device}")
        hosts = "; ".join(dict.fromkeys(places[rank] for rank in ranks))
        return f"{named_ranks(list(ranks))} ({hosts})"

    def _place(self, batches: Sequence[Mapping[str, Any]], fatal: bool) -> str:
        """Return a clause on the first module that is not finite."""
        if not fatal:
            return ""
        place = self.model.first_not_finite(batches, self.model.iteration)
        return f"; {place} is the first that is not finite" if place else ""

    def _end(
        self, reduced: Tensor | None, verdict: str, fatal: bool, kind: type[NumericsError]
    ) -> Tensor | None:
        self.say(f"{self._step}: {verdict}")
        if not fatal:
            self.say(f"{self._step}: the run goes on with the numbers of the last computation")
            return reduced
        remedy = "Test that device, and start the job again without its host"
        if kind is DoubtfulResultError:
            remedy = (
                "Start the job again on other devices: if it ends at this step again, the "
                "data or the weights cause it"
            )
        raise kind(self.name, self.checks.rerun_mode, f"in {self._step}, {verdict}", remedy)

    def _note_difference(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Record how far two runs of a step differ, and report it every few steps."""
        pairs = [("loss", *pair) for pair in zip(first["losses"], second["losses"], strict=True)]
        pairs.append(("norm of a rank's gradient", first["norm"], second["norm"]))
        for name, one, other in pairs:
            share = 0.0 if one == other or one != one else abs(one - other) / max(abs(one), 1e-300)
            self._worst[name] = max(self._worst.get(name, 0.0), share)
        if (self.model.iteration + 1) % _INTERVAL:
            return
        everywhere = self._gather(self._worst)
        names = list(dict.fromkeys(name for worst in everywhere for name in worst))
        told = [f"{name} {max(worst.get(name, 0.0) for worst in everywhere):.3g}" for name in names]
        self.say(
            f"{self._step}: computed twice, results have differed by at most, relative: "
            f"{', '.join(told)}"
        )


def _hex(value: float) -> str:
    return value.hex()


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["forward"] != other["forward"] or one["gradients"] != other["gradients"]
