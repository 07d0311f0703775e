"""The GPT that flags describe as a captured model, for what its native units do not have."""

from ..config import Config, ModelConfig
from ..graph.capture.empty import init_empty_weights
from ..models.gpt_module import GPTModule
from ..parallel.ranks import Members
from ..stages.traced import Traced
from .hf_batches import GPTBatches


def build_gpt(config: ModelConfig) -> GPTModule:
    """Return the model, without memory."""
    with init_empty_weights():
        return GPTModule(config)


def traced_gpt(config: Config, ranks: Members | None = None) -> tuple[Traced, GPTBatches]:
    """Return the model, traced with its first micro-batch, and how its batches are made. ranks: see
    ``Traced``.
    """
    train = config.train
    batches = GPTBatches(config.model.position_embedding_type == "learned_absolute")
    example = batches.example(
        train.micro_batch_size, config.model.seq_length, train.calculate_per_token_loss
    )
    model = build_gpt(config.model)
    return Traced(model, example, train.dtype, train.is_half, ranks=ranks), batches
