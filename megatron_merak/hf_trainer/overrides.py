"""Names of ``transformers.Trainer`` that a script may use and ``MerakTrainer`` cannot support.

The two classes are compared: a name that ``Trainer`` has and ``MerakTrainer`` lacks is refused when
a subclass overrides it, and when it is set or read. ``REFUSED`` gives the reasons and remedies, and
adds attributes that ``Trainer`` sets on instances.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

from torch.optim import Optimizer
from transformers import Trainer

from ..errors import AbsentError, ConfigError


@dataclass(frozen=True)
class Reason:
    """Why a name is refused, and what to do instead."""

    why: str
    instead: str


LOSS = Reason(
    "the loss is captured once, with the model",
    "Override compute_loss, and enter the context in it",
)
SHARES = Reason(
    "it is derived from the model's loss_type", "Override compute_loss, and count the targets there"
)
STEP = Reason(
    "a step is a schedule of micro-batches over all stages", "Use callbacks, or the model's forward"
)
OPTIMIZER = Reason(
    "the engine owns steps, gradients and state", "Override create_optimizer or create_scheduler"
)
BATCHES = Reason(
    "batches are cut from one order of samples, in all layouts",
    "Override _get_train_sampler or _get_eval_sampler, or change the dataset or the data_collator",
)
COLUMNS = Reason(
    "the model's forward determines the columns",
    "Set remove_unused_columns=False, or drop them yourself",
)
EVALUATION = Reason(
    "batches of an evaluation run through the pipeline together",
    "Use compute_metrics and preprocess_logits_for_metrics, or override evaluate or predict",
)
LOOP = Reason("this library has its own training loop", "Use callbacks")
FILES = Reason(
    "every rank writes its part of a checkpoint", "Override save_model, or use the callback on_save"
)
HUB = Reason("nothing is uploaded", "Call save_model, then huggingface_hub.upload_folder")
SEARCH = Reason("there is no hyperparameter search", "Start one run per trial")
ACCELERATE = Reason("accelerate is not used", "Use trainer.args or trainer.mesh")
DEGREES = Reason("this library has its own parallelism", "Use trainer.mesh.grid")
PLACEMENT = Reason(
    "the model is captured, and its shards are on the devices", "Use trainer.model as it is"
)
COUNTS = Reason(
    "FLOPs are counted as 6 x tokens x parameters", "Count them differently in a callback"
)
OTHER = Reason("it would never be called", "Use callbacks, or a method listed in docs/trainer.md")

_GROUPS: tuple[tuple[Reason, str], ...] = (
    (LOSS, "compute_loss_context_manager autocast_smart_context_manager"),
    (SHARES, "_loss_shifts_labels"),
    (
        STEP,
        "training_step optimizer_step neftune_noise_alpha neftune_hook_handle "
        "current_gradient_accumulation_steps",
    ),
    (
        OPTIMIZER,
        """create_optimizer_and_scheduler _get_learning_rate _clip_grad_norm _get_grad_norm _has_mixed_mesh_grads
        _mixed_mesh_grad_norm""",
    ),
    (
        BATCHES,
        """get_train_dataloader get_eval_dataloader get_test_dataloader _get_dataloader num_examples get_batch_samples
        _get_num_items_in_batch _prepare_input _prepare_inputs _prepare_context_parallel_inputs
        get_total_train_batch_size _update_auto_batch_size _train_batch_size _track_num_input_tokens""",
    ),
    (
        COLUMNS,
        """_set_signature_columns_if_needed _remove_unused_columns _get_collator_with_removed_columns
        _signature_columns can_return_loss""",
    ),
    (
        EVALUATION,
        "prediction_step evaluation_loop _evaluate gather_function model_preparation_time",
    ),
    (
        LOOP,
        """_inner_training_loop _init_training_state _prepare_for_training _run_epoch _finalize_training
        _maybe_log_save_evaluate set_initial_training_values _determine_best_metric _validate_args""",
    ),
    (
        FILES,
        """_save _save_checkpoint _save_rng_state _save_optimizer_and_scheduler _save_scaler _load_from_checkpoint
        _load_best_model _load_rng_state _load_optimizer_and_scheduler _load_scaler _load_callback_state
        _issue_warnings_after_load _get_output_dir _tune_save_checkpoint""",
    ),
    (
        HUB,
        "push_to_hub init_hf_repo create_model_card _push_from_checkpoint _finish_current_push "
        "hub_model_id",
    ),
    (HUB, "push_in_progress"),
    (
        SEARCH,
        """hyperparameter_search _hp_search_setup _report_to_hp_search hp_name hp_search_backend hp_space objective
        compute_objective""",
    ),
    (
        ACCELERATE,
        """accelerator create_accelerator_and_postprocess _build_accelerator_args deepspeed is_deepspeed_enabled
        is_fsdp_enabled is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled
        is_distributed_loading_by_transformers _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters""",
    ),
    (DEGREES, "get_sp_size get_cp_size get_tp_size is_model_parallel"),
    (PLACEMENT, "model_wrapped place_model_on_device _wrap_model _move_model_to_device"),
    (COUNTS, "floating_point_ops"),
)
REFUSED: Mapping[str, Reason] = MappingProxyType(
    {name: why for why, names in _GROUPS for name in names.split()}
)
# Supported, with a difference from transformers.
DIFFERENT: Mapping[str, str] = MappingProxyType(
    {
        "args": "`MerakArguments`; the same on every rank",
        "callbacks": "`on_substep_end` and `on_pre_optimizer_step` are called when all gradients "
        "of the step "
        "are complete; "
        "gradients are not in `p.grad`. Training that ends in `on_substep_end` discards the "
        "gradient, as under "
        "`Trainer`, and its loss is in no average. All ranks follow the decision of one rank's "
        "callback. With `async_save`, `on_save` is called once the checkpoint is complete, with the "
        "state of the save",
        "compute_loss": "captured with the model: its Python code runs once per kind of batch, "
        "and may read "
        "only values that do not change",
        "compute_loss_func": "captured with the model, like `compute_loss`",
        "compute_metrics": "runs on the first rank, which sends the result to the others",
        "end": "leaves the job; every rank calls it last",
        "evaluate": "collective: every rank calls it",
        "_get_eval_sampler": "called on every rank, for the samples of all replicas",
        "_get_train_sampler": "called on every rank, for the samples of all replicas; its random "
        "numbers are "
        "seeded by seed and epoch",
        "is_local_process_zero": "true only on the first rank of the job, not on that of every "
        "node",
        "label_names": "read-only: set `args.label_names` before constructing the trainer",
        "log": "called on every rank, with the same numbers",
        "lr_scheduler": "a schedule of `trainer.optimizer`; set by `create_scheduler`, or passed "
        "in `optimizers`",
        "create_optimizer": "called when the model is captured; optimizers of the class that it "
        "sets step the "
        "shards, see "
        "docs/optimizers.md",
        "optimizer": "its parameter groups: changes of `lr` and `weight_decay` take effect, any "
        "other change or "
        "call raises. "
        "A parameter that no batch of a step uses has a gradient of 0, not None, so weight decay "
        "and moments still "
        "change it, with a warning",
        "optimizers": "the optimizer itself is not stepped: optimizers of its class step the "
        "shards, see "
        "docs/optimizers.md",
        "predict": "collective: every rank calls it and gets the predictions",
        "preprocess_logits_for_metrics": "gets tensors on the CPU",
        "save_model": "collective; writes `training_args.json`, no pickle; not to be overridden "
        "with `async_save`",
        "train": "collective; `trial` is refused",
    }
)


class Refused:
    """Descriptor for a name that only ``transformers.Trainer`` has; setting or reading it
    raises.
    """

    def __init__(self, name: str):
        self.name = name
        self.reason = REFUSED.get(name, OTHER)

    def __get__(self, trainer: object, kind: type) -> object:
        if trainer is None:
            return self
        raise AbsentError(self.name, f"(of {kind.__name__})", self.reason.why, self.reason.instead)

    def __set__(self, trainer: object, value: object) -> None:
        raise ConfigError(
            f"{type(trainer).__name__}.{self.name}", "(set)", self.reason.why, self.reason.instead
        )


def refusing(kind: type) -> type:
    """Set every name that ``transformers.Trainer`` has and ``kind`` lacks to ``Refused``; return
    ``kind``.
    """
    for name in dict.fromkeys((*dir(Trainer), *REFUSED)):
        if not hasattr(kind, name):
            setattr(kind, name, Refused(name))
    return kind


def refuse_inputs(
    model: object, model_init: object, optimizer_class: object, optimizers: tuple
) -> None:
    """Raise ConfigError for arguments of MerakTrainer that contradict each other.

    model, model_init: exactly one of them is needed.
    optimizers:        (optimizer, scheduler), or None.
    """
    if (model is None) == (model_init is None):
        both = "model and model_init"
        raise ConfigError(
            both, f"({type(model).__name__})", "exactly one of the two is needed", "Give one"
        )
    optimizer, scheduler = optimizers
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizers", type(optimizer).__name__, "it is not a torch.optim.Optimizer", "Pass one"
        )
    if optimizer is not None and optimizer_class is not None:
        what = "optimizers and optimizer_cls_and_kwargs"
        raise ConfigError(
            what, type(optimizer).__name__, "both define the optimizer", "Pass only one of them"
        )
    if model_init is not None and (optimizer, scheduler) != (None, None):
        reason = "its parameters do not belong to a model of model_init"
        raise ConfigError(
            "optimizers", type(optimizer).__name__, reason, "Override create_optimizer instead"
        )
    if scheduler is not None and (
        optimizer is None or getattr(scheduler, "optimizer", None) is not optimizer
    ):
        reason = "the scheduler belongs to another optimizer"
        raise ConfigError(
            "optimizers",
            type(scheduler).__name__,
            reason,
            "Pass both, or override create_scheduler",
        )


def refuse_overrides(kind: type, base: type, adapted: Collection[type] = ()) -> None:
    """Raise ConfigError if ``kind``, a class derived from ``base``, has a name that ``base``
    refuses.

    kind:    the user's class, including classes that it is mixed from.
    adapted: classes whose overrides are supported.
    """
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in () if each in adapted else vars(each):
            if isinstance(refused := vars(base).get(name), Refused):
                why = f"it would have no effect, because {refused.reason.why}"
                raise ConfigError(
                    f"{each.__name__}.{name}", "(overridden)", why, refused.reason.instead
                )
    if issubclass(kind, Trainer) and not adapted:
        remedy = f"Derive it from {base.__name__} alone"
        raise ConfigError(
            kind.__name__, "(a transformers.Trainer)", "its methods would not be called", remedy
        )


def refuse_late(
    built: Mapping[str, Any], requested: Mapping[str, Any], later: Collection[str]
) -> None:
    """Raise ConfigError for an argument that was changed after the model was captured with it.

    built, requested: arguments by name, at the capture and now; some are grouped in a mapping or
                      dataclass.
    later:            names of arguments that a built model still follows.
    """
    for name, new in requested.items():
        old = built[name]
        if isinstance(new, Mapping):
            refuse_late(old, new, later)
        elif dataclasses.is_dataclass(new):
            refuse_late(vars(old), vars(new), later)
        elif old != new and name not in later:
            remedy = "Create a new MerakTrainer with it"
            raise ConfigError(f"args: {name}", new, f"the model was captured with {old}", remedy)


def refuse_gradients(callback: object) -> None:
    """Raise ConfigError for a callback, or its class, that reads ``.grad``: parameters have no
    gradients here.
    """
    for event in ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"):
        code = getattr(getattr(callback, event, None), "__code__", None)
        if code is not None and _reads(code, "grad"):
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            reason = "it reads .grad, which is None here: gradients are in sharded flat buffers"
            raise ConfigError(
                f"{name}.{event}",
                f"(line {code.co_firstlineno})",
                reason,
                "Use grad_norm of on_log",
            )


def _reads(code: CodeType, name: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_reads(each, name) for each in inner)
