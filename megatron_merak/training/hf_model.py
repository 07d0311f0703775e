"""From the flags of pretrain_hf.py to the model, its capture and its plan."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from ..checkpoint.hf import from_pretrained
from ..cluster import Cluster
from ..config import Config, HFConfig, HFModelConfig, ModelConfig, RunConfig
from ..errors import CheckpointError, ConfigError, TraceError
from ..graph.capture.capture import accepts_num_items, capture
from ..graph.capture.captured import Captured
from ..parallel.ranks import Members
from ..plan import LAYERS, TensorSharding
from ..planner.make import ProgressCallback
from ..planner.request import Request, request_of
from ..stages.blueprint import Blueprint, blueprint_from_plan, make_blueprint
from ..stages.gpt_model import tables_of, traced_gpt
from ..stages.searched import CapturedChain
from ..stages.traced import Batch, Traced
from .hf_batches import TokenBatches
from .plan_file import plan_of

Made = TypeVar("Made")

_SPARE = 4  # rows of a table of positions beside those of positions


def build_model(config: HFModelConfig) -> nn.Module:
    """Return the causal language model of ``--model``, without memory.

    ``merak_source`` is the source of its weights; None if they are initialized. Raises
    CheckpointError, and ConfigError for what the model cannot do.
    """
    path = Path(config.model)
    try:
        model: Any = from_pretrained(
            path,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
            attn_implementation=config.attn_implementation,
        )
    except CheckpointError as error:
        inside = "" if error.value == path else f"{error.what} {error.value}: "
        reason = f"{inside}{error.reason}"
        raise type(error)("--model", config.model, reason, error.remedy) from error
    _check_causal(model, path)
    if config.init_weights == "random":
        model.merak_source = None
    elif config.init_weights == "directory" and model.merak_source is None:
        remedy = "Use --init-weights random, or name a directory with weights"
        raise ConfigError("--init-weights", "directory", f"{path} has no weights", remedy)
    _check_length(model, config.seq_length, 0)
    return model


def _check_length(model: Any, length: int, more: int) -> None:
    """Raise ConfigError if a sample has positions that the model has learned nothing for.

    more: positions needed beside those of the sample.
    """
    longest = most_positions(model)
    if longest is not None and length + more > longest and _learns_positions(model, longest):
        needs = f" (the shift of its labels needs {more} more)" if more else ""
        reason = f"exceeds the model's max_position_embeddings {longest}{needs}"
        raise ConfigError("--seq-length", length, reason, f"Use at most {longest - more}")


def most_positions(model: Any) -> int | None:
    """Return the ``max_position_embeddings`` of a model; None: it says nothing."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def _learns_positions(model: Any, longest: int) -> bool:
    """Whether a table has a row for each of so many positions; else they are computed.

    Some tables have a few rows more, of which the first are of no position.
    """
    words = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return any(
        0 <= table.num_embeddings - longest <= _SPARE for table in tables if table is not words
    )


def beyond_positions(model: Any, length: int) -> tuple[str, ...]:
    """Return a notice on samples of more positions than the model's configuration names."""
    longest = most_positions(model)
    if longest is None or length <= longest:
        return ()
    return (
        f"--seq-length {length} is above the model's max_position_embeddings {longest}: it computes "
        "its positions, so it takes more, but its configuration does not promise what they are "
        "worth.",
    )


def _check_causal(model: Any, path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    config = model.config
    name = type(model).__name__
    known = AutoModelForCausalLM._model_mapping
    classes = known[type(config)] if type(config) in known else ()
    causal = (
        type(model) in (classes if isinstance(classes, tuple) else (classes,)) or "CausalLM" in name
    )
    seen = type(config) in AutoModelForMaskedLM._model_mapping and not getattr(
        config, "is_decoder", True
    )
    if not causal or seen or getattr(config, "is_encoder_decoder", False):
        reason = f"it is a {name}, and GPT data trains causal language models"
        raise ConfigError("--model", path, reason, "Train it with MerakTrainer on suitable data")


def known_tokens(model: nn.Module) -> int:
    """Return the number of rows of a model's embedding."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]


def rules_text(text: str | None) -> str:
    """Return the rules in ``--tensor-parallel-rules``, or in the file that it names, without #
    comments.
    """
    if text is None or "=" in text and not Path(text).is_file():
        return text or ""
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (
            f"it is neither a rule like '*.o_proj.weight=row' nor a file that can be read ({error})"
        )
        raise ConfigError(
            "--tensor-parallel-rules", text, reason, "Give rules, or a file of them"
        ) from error
    return "\n".join(line.partition("#")[0].strip() for line in lines)


def traced_of(
    model: nn.Module, config: HFConfig, ranks: Members | None = None
) -> tuple[Traced, TokenBatches]:
    """Return the model, traced with its first micro-batch, and how its batches are made. ranks: see
    ``Traced``.
    """
    train = config.train
    return with_example(
        model,
        config,
        lambda example: Traced(model, example, train.dtype, train.is_half, ranks=ranks),
    )


def blueprint_of(
    traced: Traced,
    config: RunConfig,
    world_size: int,
    cluster: Cluster,
    progress: ProgressCallback = lambda share: None,
    rank: int | None = None,
) -> Blueprint:
    """Return the plan of a run: that of ``--plan``, or one made for ``cluster``. Raises PlanError.

    rank:     see ``plan_of``.
    progress: see ``report_progress`` of ``plan_chain``.
    """
    stored = plan_of(config, world_size, cluster, rank)
    if stored is not None:
        return blueprint_from_plan(traced, stored)
    request = _sharded_as(request_of(config, world_size), config)
    pins = None
    if isinstance(config, Config):
        pins = tables_of(traced, request.grid.tp, request.vocabulary_multiple)
    return make_blueprint(traced, request, cluster, pins=pins, progress=progress)


def captured_chain(
    config: Config | HFConfig, request: Request, cluster: Cluster
) -> tuple[CapturedChain, Request]:
    """Return the model as a search needs it, and the request with how it is cut and sharded."""
    model = None if isinstance(config, Config) else build_model(config.model)

    def trace(samples: int) -> Traced:
        train = replace(config.train, micro_batch_size=samples)
        if isinstance(config, Config):
            return traced_gpt(replace(config, train=train))
        assert model is not None
        return traced_of(model, replace(config, train=train))[0]

    def pins_of(traced: Traced, tp: int) -> Mapping[str, TensorSharding]:
        return tables_of(traced, tp, request.vocabulary_multiple)

    request = _sharded_as(request, config)
    pins = pins_of if isinstance(config, Config) else None
    return CapturedChain(trace, request, cluster, pins_of=pins), request


def _sharded_as(request: Request, config: RunConfig) -> Request:
    """Return the request with how the graph of a model is cut and sharded."""
    model = config.model
    multiple = model.make_vocab_size_divisible_by
    if isinstance(model, ModelConfig):
        return replace(
            request,
            graph_sharding=LAYERS,
            vocabulary_multiple=multiple,
            fp32_residual=model.fp32_residual_connection,
        )
    return replace(
        request,
        graph_sharding=model.graph_sharding,
        rules=rules_text(model.tensor_parallel_rules),
        vocabulary_multiple=multiple,
    )


def with_example(
    model: nn.Module, config: HFConfig, make: Callable[[Batch], Made]
) -> tuple[Made, TokenBatches]:
    """Return what ``make`` returns for the first micro-batch, and how batches are made for the
    model.

    Whether the model's loss takes shifted labels shows in its capture, which refuses entries that
    the forward does not read.
    """
    per_token = config.train.calculate_per_token_loss
    if per_token and not accepts_num_items(model):
        reason = f"the loss of {type(model).__name__} takes no num_items_in_batch"
        raise ConfigError("--calculate-per-token-loss", "on", reason, "Leave it out")

    def example(batches: TokenBatches) -> dict[str, Tensor]:
        return batches.example(config.train.micro_batch_size, config.model.seq_length, per_token)

    packed = config.data.sft
    batches = TokenBatches("shifted", packed)
    try:
        return make(example(batches)), batches
    except TraceError as error:
        if packed and (error.what, error.value) == ("batch entry", "position_ids"):
            reason = f"{type(model).__name__} reads no positions, which tell conversations apart"
            raise ConfigError(
                "--sft", "on", reason, "Train another model on conversations"
            ) from error
        if (error.what, error.value) != ("batch entry", "shift_labels"):
            raise
    batches = TokenBatches("plain", packed)
    if shifts_labels(capture(model, example(batches))):
        batches = TokenBatches("longer", packed)
        _check_length(model, config.model.seq_length, batches.more)
    return make(example(batches)), batches


def shifts_labels(captured: Captured) -> bool:
    """Whether the loss compares position t with label t + 1, not label t: the first label is then
    never read.

    Everything that depends on labels alone is computed, with numbered labels.
    """
    graph = captured.module.graph
    labels = next(node for node in graph.find_nodes(op="placeholder") if node.target == "labels")
    shape = labels.meta["val"].shape
    known: dict[Node, Any] = {labels: torch.arange(1, shape.numel() + 1).view(shape)}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(source in known for source in inputs):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    read = [value for node, value in known.items() if any(user not in known for user in node.users)]
    numbers = [value for value in read if isinstance(value, Tensor) and value.dtype == torch.long]
    return not any((value == 1).any() for value in numbers)
