"""What Megatron-LM's checkpoints say beside tensors: arguments of the run, schedule and groups of the optimizer."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError
from .megatron_names import MegatronTable
from .megatron_ranks import RankGrid
from .state import PortableState

VERSION = 3.0  # of checkpoints whose queries, keys and values are in the order of today

_SCHEDULE = (
    "max_lr lr_warmup_steps lr_decay_style lr_decay_steps min_lr start_wd end_wd wd_incr_style "
    "wd_incr_steps"
).split()


def arguments(
    config: Any,
    table: MegatronTable,
    state: PortableState,
    grid: RankGrid | None = None,
) -> Namespace:
    """Return the arguments of a run that would have written ``state``.

    config: the model's config of transformers.
    grid:   the ranks that have files of their own; None for a distributed checkpoint.
    """
    ranks = grid or RankGrid()
    return Namespace(
        **_model_arguments(config, table),
        iteration=state.iteration,
        consumed_train_samples=state.consumed_samples,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        tensor_model_parallel_size=ranks.tensor,
        pipeline_model_parallel_size=ranks.pipeline,
        expert_model_parallel_size=ranks.expert,
        context_parallel_size=1,
        ckpt_format="torch_dist" if grid is None else "torch",
    )


def check_arguments(found: object, config: Any, table: MegatronTable, where: object) -> None:
    """Raise ConfigError if the arguments of a run contradict the model's config.

    found: what a checkpoint has for its arguments; anything else than a Namespace says nothing.
    """
    if not isinstance(found, Namespace):
        return
    for name, ours in _model_arguments(config, table).items():
        if name in _FREE or not hasattr(found, name):
            continue
        theirs = getattr(found, name)
        if theirs is None or isinstance(theirs, int | float | str | bool) and theirs == ours:
            continue
        if not isinstance(theirs, int | float | str | bool):
            continue
        reason = f"the run that wrote {where} had {name} {theirs}"
        raise ConfigError(f"{name} of the config", ours, reason, "Give that model's --config")


def common_state(config: Any, table: MegatronTable, state: PortableState) -> dict[str, Any]:
    """Return what a checkpoint of Megatron-LM has beside tensors.

    The optimizer's part is one dictionary in which each of Megatron's optimizers finds what it
    reads. The schedule has the samples so far, and no rates.
    """
    common: dict[str, Any] = {
        "args": arguments(config, table, state),
        "checkpoint_version": VERSION,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        },
        "opt_param_scheduler": {name: None for name in _SCHEDULE}
        | {"num_steps": state.consumed_samples},
    }
    if state.has_optimizer:
        dense = _optimizer(state.optimizer_steps, expert=False)
        routed = _optimizer(state.optimizer_steps, expert=True)
        common["optimizer"] = {0: dense, 1: routed} if table.experts else dense
    return common


def optimizer_steps(common: Mapping[str, Any]) -> int:
    """Return the updates behind an optimizer state: the step that its groups have in common.

    Raises ConfigError for groups that differ.
    """
    steps = {int(step) for step in _steps(common.get("optimizer"))}
    if len(steps) > 1:
        reason = "the groups of its optimizer have different steps"
        raise ConfigError(
            "checkpoint", ", ".join(map(str, sorted(steps))), reason, "Convert the weights alone"
        )
    return steps.pop() if steps else 0


def _steps(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name in ("step", "common_step") and each is not None:
                yield each
            else:
                yield from _steps(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _steps(each)


# of the run, not of the model; and what several configs may say otherwise for the same model
_FREE = frozenset(
    "vocab_size padded_vocab_size seq_length max_position_embeddings group_query_attention "
    "num_query_groups rotary_percent".split()
)


def _model_arguments(config: Any, table: MegatronTable) -> dict[str, Any]:
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    gpt2 = config.model_type == "gpt2"
    keys = {tensor.key for tensor in table.tensors}
    padded = next(t.shape[0] for t in table.tensors if t.key == "embedding.word_embeddings.weight")
    first = next(t for t in table.tensors if t.key.endswith("linear_fc1.weight"))
    inner = first.shape[0] // (2 if table.gated else 1)
    found = {
        "num_layers": table.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": inner if not table.experts else config.intermediate_size,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "add_position_embedding": True,
        "position_embedding_type": "learned_absolute" if gpt2 else "rope",
        "normalization": "LayerNorm" if gpt2 else "RMSNorm",
        "norm_epsilon": config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        "swiglu": table.gated,
        "add_bias_linear": "decoder.layers.self_attention.linear_proj.bias" in keys,
        "add_qkv_bias": "decoder.layers.self_attention.linear_qkv.bias" in keys,
        "qk_layernorm": "decoder.layers.self_attention.q_layernorm.weight" in keys,
        "untie_embeddings_and_output_weights": "output_layer.weight" in keys,
    }
    if not gpt2:
        found["rotary_base"] = config.rope_parameters["rope_theta"]
        found["rotary_percent"] = 1.0
    if table.experts:
        found["num_experts"] = table.experts
        found["moe_router_topk"] = config.num_experts_per_tok
        found["moe_ffn_hidden_size"] = inner
        # whether weights of experts are not divided by their sum
        found["moe_router_pre_softmax"] = not getattr(config, "norm_topk_prob", True)
    return found


def _optimizer(steps: int, expert: bool) -> dict[str, Any]:
    groups = [_group(steps, expert, decay) for decay in (1.0, 0.0)]
    return {
        "optimizer": {"param_groups": groups, "state": {"common_step": steps}},
        "param_groups": groups,
        "state": {"common_step": steps},
        "param_state_sharding_type": "fully_reshardable",
    }


def _group(steps: int, expert: bool, decay: float) -> dict[str, Any]:
    """Return a group as Megatron's optimizers have them; a run sets its own rates."""
    return {
        "wd_mult": decay,
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
        "step": steps,
    }
