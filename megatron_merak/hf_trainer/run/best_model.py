"""Which evaluation of a run was the best, by the metric that was named."""

import math
from collections.abc import Mapping

import numpy as np
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ...errors import ConfigError


def metric_of(args: TrainingArguments, metrics: Mapping[str, float]) -> float:
    """Return the metric of an evaluation that the run follows. Raises ConfigError if it has none of
    that name.
    """
    name = args.metric_for_best_model
    assert name is not None, "transformers sets it where something follows a metric"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        remedy = f"Choose one of {', '.join(metrics)}"
        raise ConfigError(
            "metric_for_best_model", name, "the evaluation has no such metric", remedy
        )
    return metrics[name]


def note_best(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, float]) -> bool:
    """Whether the model is the best so far; if so, record it in the state."""
    if args.metric_for_best_model is None:
        return False
    value = metric_of(args, metrics)
    compare = np.greater if args.greater_is_better else np.less
    if state.best_metric is None:
        state.best_metric = -math.inf if args.greater_is_better else math.inf
    if not compare(value, state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != SaveStrategy.NO:
        state.best_global_step = state.global_step
    return True
