"""Differences between a run that resumes and the run that saved: another model or other data is an
error, the rest is reported.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..arguments import shown
from ..config import HFConfig, ModelConfig, OptimizerConfig, RunConfig, flag_name
from ..data.identity import difference
from ..errors import CheckpointError, ConfigError
from ..stages.model_config import ConfigDifference, differences
from ..stages.saved_run import SavedRun

# Of the model's settings: those that change neither its function nor its samples, ...
_FREE = frozenset(
    """init_method_std make_vocab_size_divisible_by cross_entropy_chunk_size model init_weights trust_remote_code
    allow_pickle graph_sharding tensor_parallel_rules""".split()
)
# ... those that may change during a run, ...
_REPORTED = frozenset(
    "hidden_dropout attention_dropout attn_implementation fp32_residual_connection "
    "moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
    "moe_expert_capacity_factor moe_token_drop_policy".split()
)
# ... and those that a new run from old weights may choose anew.
_OF_A_RUN = frozenset(
    "seq_length max_position_embeddings rotary_base rotary_percent use_rope_scaling "
    "rope_scaling_factor".split()
)
_TRAIN_REPORTED = """train_iters train_samples rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed
    micro_batch_size bf16 fp16 fp8_format fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
    fp32_matmul_precision calculate_per_token_loss""".split()
_PARALLEL_REPORTED = ("compile_pointwise", "grad_reduce_in_bf16")
_SCHEDULE = """lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples
    lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay
    start_weight_decay end_weight_decay weight_decay_incr_style""".split()

# Settings that follow from others where they are unset: they are compared last, by what they come
# to.
_DERIVED = (
    "ffn_hidden_size moe_ffn_hidden_size kv_channels group_query_attention num_query_groups "
    "max_position_embeddings"
).split()


class Change(NamedTuple):
    """A changed setting; ``flag`` is its name for the user."""

    flag: str
    now: Any
    saved: Any

    def __str__(self) -> str:
        return f"{self.flag} {_text(self.now)} (it was {_text(self.saved)})"

    def undone(self) -> str:
        """Return how to restore the saved value."""
        if not self.flag.startswith("--"):
            return "Use the same model"
        if self.saved is None or self.saved is False:
            return f"Leave {self.flag} out"
        return f"Add {self.flag}" if self.saved is True else f"Give {self.flag} {_text(self.saved)}"


def check(
    config: RunConfig, saved: SavedRun, model: Mapping[str, Any] | None, data: Mapping, batch: int
) -> list[str]:
    """Return what a resumed run has to report, in lines. Raises CheckpointError for another model,
    and for other data.

    model: see ``TrainedModel.settings``.
    data:  see ``data.identity``.
    batch: samples per step.
    """
    changes = check_run(config, saved, model)
    lines = []
    if not config.checkpoint.finetune:
        lines += _check_data(config, saved, data)
        changes += _run_changes(config, saved)
        if saved.global_batch_size not in (None, batch):
            changes.append(Change("--global-batch-size", batch, saved.global_batch_size))
    if changes:
        lines.insert(0, f"Changed since the checkpoint was written: {'; '.join(map(str, changes))}")
    return lines


def check_run(config: RunConfig, saved: SavedRun, model: Mapping[str, Any] | None) -> list[Change]:
    """Return the model's settings that have changed and may. Raises CheckpointError for others, and
    for another seed.

    model: see ``TrainedModel.settings``.
    """
    refused, changes = _model_changes(config, saved, model)
    for change in refused:
        reason = (
            f"the checkpoint's run had {_text(change.saved)}; another value makes another model"
        )
        raise CheckpointError(change.flag, _text(change.now), reason, change.undone())
    if not config.checkpoint.finetune:
        _check_seed(config, saved)
    return changes


def schedule_of(saved: SavedRun, config: RunConfig) -> OptimizerConfig:
    """Return the optimizer settings of ``config`` with the checkpoint's schedule.

    Raises CheckpointError if that is invalid, or counts samples in a run of iterations or the other
    way round.
    """
    theirs = {
        name: saved.config["optimizer"][name]
        for name in _SCHEDULE
        if name in saved.config["optimizer"]
    }
    unit, other = ("samples", "iters") if config.train.train_samples else ("iters", "samples")
    remedy = "Leave out --use-checkpoint-opt-param-scheduler"
    if saved.config["train"].get(f"train_{other}") is not None:
        reason = (
            f"the checkpoint's schedule counts in --train-{other}, and this run has --train-{unit}"
        )
        raise CheckpointError("--use-checkpoint-opt-param-scheduler", "on", reason, remedy)
    if theirs.get(f"lr_decay_{unit}") is None:
        theirs[f"lr_decay_{unit}"] = saved.config["train"].get(f"train_{unit}")
    try:
        return dataclasses.replace(config.optimizer, **theirs)
    except ConfigError as error:
        raise CheckpointError(
            "--use-checkpoint-opt-param-scheduler", "on", f"in the checkpoint, {error}", remedy
        ) from error


def _model_changes(
    config: RunConfig, saved: SavedRun, model: Mapping[str, Any] | None
) -> tuple[list[Change], list[Change]]:
    now = config.to_dict()["model"]
    then = dict(saved.config["model"])
    # the GPT of flags and a model of --model share names only
    if isinstance(config, HFConfig) != ("model" in then):
        now, then = ({"seq_length": values.get("seq_length")} for values in (now, then))
    elif isinstance(config.model, ModelConfig):
        now = _effective(config.model)
        then = _effective_saved(then)
    # a conversion has no settings of a run, and the length of sequences is one
    unsaid = _FREE if saved.config["train"] else {*_FREE, "seq_length"}
    changes = [
        Change(flag_name(name), now[name], then[name])
        for name in _differing(now, then)
        if name not in unsaid
    ]
    may_change = _REPORTED | _OF_A_RUN if config.checkpoint.finetune else _REPORTED
    refused = [change for change in changes if change.flag[2:].replace("-", "_") not in may_change]
    allowed = [change for change in changes if change not in refused]
    others, choices = differences(
        model, saved.model, causal=True, whole=bool(saved.config["train"])
    )
    refused += [_of_config(each) for each in others]
    allowed += [_of_config(each) for each in choices]
    return refused, allowed


def _of_config(difference: ConfigDifference) -> Change:
    return Change(f"config.json {difference.name}", difference.now, difference.saved)


def _effective(model: ModelConfig) -> dict[str, Any]:
    """Return the settings with the values that replace unset ones."""
    values = {
        name: value for name, value in dataclasses.asdict(model).items() if name not in _DERIVED
    }
    values |= {
        # experts take the place of the MLP
        "ffn_hidden_size": model.ffn_size if model.num_experts is None else None,
        "moe_ffn_hidden_size": None if model.num_experts is None else model.expert_ffn_size,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
    }
    # else it is the length of a table of angles
    learned = model.position_embedding_type == "learned_absolute"
    values["max_position_embeddings"] = model.max_positions if learned else None
    return values


def _effective_saved(values: dict[str, Any]) -> dict[str, Any]:
    try:
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        return _effective(
            ModelConfig.from_dict({name: value for name, value in values.items() if name in known})
        )
    except ConfigError:
        return values


def _differing(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names with different values; names that only one version of this program has are
    skipped.
    """
    return (name for name, value in now.items() if name in then and value != then[name])


def _run_changes(config: RunConfig, saved: SavedRun) -> list[Change]:
    now = config.to_dict()
    pairs = [
        ("train", name)
        for name in _differing(now["train"], saved.config["train"])
        if name in _TRAIN_REPORTED
    ]
    before = saved.config.get("parallel", {})
    pairs += [
        ("parallel", name)
        for name in _differing(now["parallel"], before)
        if name in _PARALLEL_REPORTED
    ]
    pairs += [
        ("optimizer", name) for name in _differing(now["optimizer"], saved.config["optimizer"])
    ]
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        pairs = [(section, name) for section, name in pairs if name not in _SCHEDULE]
    return [
        Change(flag_name(name), now[section][name], saved.config[section][name])
        for section, name in pairs
    ]


def _check_seed(config: RunConfig, saved: SavedRun) -> None:
    seed = config.train.seed
    before = saved.config["train"].get("seed")
    if before is not None and seed != before:  # converted weights have none
        remedy = f"Give --seed {before}, or --finetune to start a new run from these weights"
        raise CheckpointError("--seed", seed, f"the checkpoint's run has seed {before}", remedy)


def _check_data(config: RunConfig, saved: SavedRun, data: Mapping) -> list[str]:
    if saved.data is None:
        return ["The checkpoint does not say which data its run read: it is not compared."]
    lines = []
    for part, now in data.items():
        then = saved.data.get(part)
        text = difference(now, then)
        if text and part == "train":
            if not config.checkpoint.override_dataset:
                remedy = (
                    "Give the same data, --override-dataset to go on with other data, or "
                    "--finetune for a new run"
                )
                raise CheckpointError(
                    "training data",
                    _paths(now),
                    f"the checkpoint's run read other data: {text}",
                    remedy,
                )
            lines.append(
                "Other training data than the checkpoint's run, as --override-dataset allows: "
                f"{text}."
            )
        elif text:
            lines.append(f"Other {part} data than the checkpoint's run: {text}.")
        elif (
            part == "train"
            and now is not None
            and then is not None
            and now["order"] != then.get("order")
        ):
            reason = "the run's length now reads the data another number of times"
            lines.append(
                f"Samples come in another order than in the checkpoint's run ({reason}): some "
                "may come again."
            )
    return lines


def _paths(part: Mapping | None) -> str:
    return "(none)" if part is None else " ".join(source["prefix"] for source in part["sources"])


def _text(value: Any) -> str:
    return shown(tuple(map(str, value)) if isinstance(value, list) else value)
