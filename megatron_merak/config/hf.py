"""The settings of a run that trains a captured model: its shape comes from ``--model``, not from flags."""

import dataclasses

from .settings import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFModelConfig(Section):
    """Which model is trained, and how its graph is captured, cut and divided."""

    model: str = setting(ours=True)
    """HuggingFace directory, or a config.json alone."""
    seq_length: int = setting(least=1)
    """Tokens per training sample."""
    vocab_size: int | None = setting(None, least=1)
    """Token ids in the data of a NullTokenizer, which adds one that ends a document (unset: all the model knows)."""
    make_vocab_size_divisible_by: int = setting(1, least=1, megatron=128)
    """Pad a vocabulary that tensor parallelism divides to a multiple of this times the tensor-parallel degree."""
    init_weights: str = setting("auto", choices=("auto", "directory", "random"), ours=True)
    """Initial weights: those in the directory, random ones that follow from --seed, or auto: the former if any."""
    attn_implementation: str | None = setting(None, choices=("sdpa", "eager"), ours=True)
    """The model's attention code (unset: sdpa where the model has it, else eager)."""
    trust_remote_code: bool = setting(False, ours=True)
    """Run Python code that the directory brings along."""
    allow_pickle: bool = setting(False, ours=True)
    """Read weights from .bin files too, which are pickles, tensors only."""
    graph_sharding: str = setting("cut", choices=("cut", "farthest-dependency"), ours=True)
    """How the graph becomes a chain of units: where fewest values cross, or by the farthest dependency of each node."""
    tensor_parallel_rules: str | None = setting(None, ours=True)
    """How weights are divided, like '*.o_proj.weight=row; lm_head.weight=replicate', or a file of such lines."""
    cross_entropy_chunk_size: int = setting(0, least=0, ours=True)
    """Compute the loss for so many tokens at a time, keeping no logits: their product is made twice; 0: keep all."""
