"""What a script gives to ``transformers.Trainer`` or overrides in it and ``MerakTrainer`` cannot honour."""

from ..errors import ConfigError

# What a subclass of transformers.Trainer overrides and this trainer cannot call.
REFUSED_METHODS = (
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop", "get_train_dataloader"),
    *("get_eval_dataloader", "get_test_dataloader", "create_optimizer", "create_scheduler"),
    *("create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs", "optimizer_step"),
)


def refuse_inputs(model: object, model_init: object, given: dict[str, object], optimizers: tuple) -> None:
    """Raises ConfigError for an argument of MerakTrainer that would have no effect.

    model, model_init: exactly one of them is needed. given: other arguments by name, which have to be None.
    optimizers: (optimizer, scheduler), both None.
    """
    for name, value in given.items():
        if value is not None:
            remedy = "Let the model compute its loss; AdamW is set by the arguments"
            raise ConfigError(name, repr(value), "a captured model has its own loss and optimizer", remedy)
    if tuple(optimizers) != (None, None):
        remedy = "Choose learning_rate, lr_scheduler_type and the adam_ arguments"
        raise ConfigError("optimizers", optimizers, "parameters lie in flat buffers of their own AdamW", remedy)
    if (model is None) == (model_init is None):
        both = "model and model_init"
        raise ConfigError(both, f"({type(model).__name__})", "exactly one of the two is needed", "Give one")


def refuse_overrides(kind: type) -> None:
    """Raises ConfigError for a method of ``kind``, a class derived from MerakTrainer, that would never be called."""
    for name in REFUSED_METHODS:
        if hasattr(kind, name):
            remedy = "Put the loss into the model's forward, and use callbacks for the rest"
            raise ConfigError(f"{kind.__name__}.{name}", "(overridden)", "it would never be called", remedy)
