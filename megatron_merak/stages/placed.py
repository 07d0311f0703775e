"""Refuse models that were sharded over ranks when they were loaded: a plan shards
unsharded models.
"""

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError

_DEGREES = {  # attribute of a transformers model -> the field of MerakArguments to set instead
    "_tp_size": "tensor_model_parallel_size={}",
    "_fsdp_size": "data_parallel_sharding_strategy='optim_grads_params'",
}


def refuse_placed(model: nn.Module) -> None:
    """Raise ConfigError for a model with a DTensor parameter, or that ``from_pretrained`` sharded.

    The latter shards by ``distributed_config``, ``tp_plan`` or ``tp_size``.
    """
    for module in model.modules():
        if getattr(module, "is_distributed_loading_by_transformers", False):
            sizes = {name: getattr(module, name, None) or 1 for name in _DEGREES}
            degrees = ", ".join(
                f"{name.removeprefix('_')} {size}" for name, size in sizes.items() if size > 1
            )
            instead = " and ".join(
                _DEGREES[name].format(size) for name, size in sizes.items() if size > 1
            )
            reason = (
                f"from_pretrained has sharded it over ranks{f' ({degrees})' if degrees else ''}"
            )
            remedy = (
                "Load it without distributed_config, tp_plan and tp_size; set "
                f"{instead or 'the degrees'} instead"
            )
            raise ConfigError("model", type(model).__name__, reason, remedy)
    for name, parameter in model.named_parameters():
        if isinstance(parameter.data, DTensor) or isinstance(parameter, DTensor):
            reason = "it is a DTensor: the model has already been sharded over ranks"
            raise ConfigError(
                "parameter", name, reason, "Pass the unsharded model; the plan shards it"
            )
