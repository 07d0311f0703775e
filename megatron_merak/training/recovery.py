"""A state between two checkpoints: the checkpoint before it is loaded, and the steps behind that are done again by the
optimizer, from the gradients that increments have.

What a step computed is a function of the state, the gradient, its norm and its rates; all but the
state are read, so that the same bits come out. Whatever else takes part must be as it was, or is
refused by name.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import store
from ..checkpoint.files import disk_errors
from ..checkpoint.increments import Increment, StepRecord
from ..checkpoint.recoverable import Recoverable, StepChain, has_increments
from ..config import OptimizerConfig, RunConfig, flag_name
from ..errors import CheckpointError, DamagedError
from ..optimizer.base import LocalOptimizer
from ..parallel.agree import together
from ..stages.own_gradient import fill_gradient, fill_running
from ..stages.saved_run import SavedRun
from ..stages.trained_model import TrainedModel

# settings of the update itself that an optimizer reads in every step, of which a step's record says
# nothing; the others of an optimizer's own it was made with
_READ = ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_SWITCH = "use_precision_aware_optimizer"  # changes nothing by itself
_STORED = ("exp_avg_dtype", "exp_avg_sq_dtype")
_REMEDY = "Check --load"


class Recovery:
    """Loads the best state of a directory that has increments. Collective.

    root:      the directory.
    iteration: of the state; None: the newest that is undamaged.

    ``steps``:   how many `repeat` has done.
    ``seconds``: that it took.

    Raises `CheckpointError` on every rank.
    """

    def __init__(self, model: TrainedModel, config: RunConfig, root: Path, iteration: int | None):
        self.steps = 0
        self.seconds = 0.0
        self._model = model
        self._config = config
        self._root = root
        self._group = model.mesh.control
        self._states = Recoverable(root, self._group, iteration)
        self._increments: list[Increment] = []
        self._chain = StepChain(0, 0)

    def load(
        self,
        kinds: Mapping[str, store.StateKind],
        check: Callable[[Mapping[str, Any]], object],
        say: Callable[[str], object] | None,
    ) -> dict[str, Any]:
        """Load the checkpoint that the state follows, and return its meta.

        kinds, say: as for ``store.load``.
        check:      called with what the state says of its run.
        """
        while True:
            chain = self._states.best()
            self._chain = chain
            self._increments = [
                each for each in self._states.increments(chain) if each.first <= chain.last
            ]
            own = self._increments[-1].manifest.meta if self._increments else None

            def compare(meta: dict, own: Mapping[str, Any] | None = own) -> None:
                if own is not None:
                    self._check_updates(own)
                check(meta if own is None else own)

            try:
                meta = store.load(
                    self._root,
                    kinds,
                    self._group,
                    "cpu",
                    iteration=chain.checkpoint,
                    check=compare,
                )
            except DamagedError as error:
                self._states.drop(chain, error)
                continue
            self._tell(say)
            return meta

    def repeat(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Do the steps behind the loaded checkpoint again; return the meta of the state.

        meta: of the checkpoint.
        """
        if not self._increments:
            return meta
        began = time.perf_counter()
        model = self._model
        optimizer = model.optimizer
        assert isinstance(optimizer, LocalOptimizer), "its own ranks update the model"
        start = SavedRun.read(meta, self._root)
        optimizer.steps = start.optimizer_steps
        own = optimizer.config
        for increment in self._increments:
            saved = increment.manifest.meta["config"]["optimizer"]
            optimizer.config = replace(own, **{name: saved[name] for name in _READ})
            for record in increment.records:
                if self._chain.checkpoint < record.iteration <= self._chain.last:
                    self._step(optimizer, increment, record)
                    meta = {**increment.manifest.meta, **record.counters()}
        optimizer.config = own
        last = self._increments[-1]
        with together(self._group, "cpu"), disk_errors(last.path, _REMEDY):
            fill_running(model, last, self._chain.last)
        model.gatherer.launch()
        model.gatherer.finish()
        self.seconds = time.perf_counter() - began
        return meta

    def _step(self, optimizer: LocalOptimizer, increment: Increment, record: StepRecord) -> None:
        square = math.inf if record.square is None else record.square
        with together(self._group, "cpu"), disk_errors(increment.path, _REMEDY):
            if record.square is not None:
                fill_gradient(self._model, increment, record.iteration)
        optimizer.scaled = record.scaled
        optimizer.apply(square, [(lr, weight_decay) for lr, weight_decay in record.rates])
        if optimizer.steps != record.optimizer_steps:
            reason = f"its step {record.iteration} is not the {optimizer.steps}th update"
            remedy = "Load an earlier step with --ckpt-step"
            raise CheckpointError("increment", increment.path, reason, remedy)
        self.steps += 1

    def _check_updates(self, meta: Mapping[str, Any]) -> None:
        """Raise CheckpointError where this run would repeat steps otherwise than they were done."""
        saved = meta["config"]["optimizer"]
        own = self._config.to_dict()["optimizer"]
        remedy = (
            "Resume with the same one and let the run save a checkpoint, or load a checkpoint "
            "with --ckpt-step"
        )
        where = f"the steps behind iteration {self._chain.checkpoint} were made with"
        # runs of before have moments of the types that are the default
        saved = {name: getattr(OptimizerConfig(), name) for name in _STORED} | saved
        for name in self._config.optimizer.own:
            if name not in (*_READ, _SWITCH) and saved.get(name) != own[name]:
                reason = f"{where} {saved.get(name)}"
                raise CheckpointError(flag_name(name), own[name], reason, remedy)
        if (saved.get("decoupled_lr") is None) != (own["decoupled_lr"] is None):
            reason = f"{where} {saved.get('decoupled_lr')}, so with other parameter groups"
            raise CheckpointError("--decoupled-lr", own["decoupled_lr"], reason, remedy)
        dtype = meta["plan"]["dtype"]
        if dtype != self._model.plan.dtype:
            raise CheckpointError("precision", self._model.plan.dtype, f"{where} {dtype}", remedy)

    def _tell(self, say: Callable[[str], object] | None) -> None:
        if say is None:
            return
        chain = self._chain
        for text in self._states.messages:
            say(
                f"Something damaged was passed over, and the state of iteration {chain.last} was "
                f"loaded. {text}."
            )
        if chain.note:
            say(f"No later state than that of iteration {chain.last} can be reached. {chain.note}")


def recovery_of(
    model: TrainedModel, config: RunConfig, root: str | Path, iteration: int | None
) -> Recovery | None:
    """Return what loads a state of a directory; None if it has no increments. Collective."""
    if not has_increments(root, model.mesh.control):
        return None
    return Recovery(model, config, Path(root), iteration)
