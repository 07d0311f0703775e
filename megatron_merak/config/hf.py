"""The settings of a run that trains a HuggingFace model: its shape comes from ``--model``, not from
flags.
"""

import dataclasses

from .settings import InPlan, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFModelConfig(Section):
    """The model, and how its graph is captured, cut and sharded."""

    model: str = setting(ours=True)
    """HuggingFace model directory, or just a config.json."""
    seq_length: int = setting(least=1, plan=InPlan("sequence_length"))
    """Tokens per training sample."""
    vocab_size: int | None = setting(None, least=1)
    """Number of token ids in the data of NullTokenizer, which adds an end-of-document id (unset:
    the model's).
    """
    make_vocab_size_divisible_by: int = setting(1, least=1, megatron=128)
    """Pad a sharded vocabulary to a multiple of this times the tensor-parallel degree."""
    init_weights: str = setting("auto", choices=("auto", "directory", "random"), ours=True)
    """Initial weights: those of the directory, random ones from --seed, or auto: those of the
    directory if it has any."""
    attn_implementation: str | None = setting(None, choices=("sdpa", "eager"), ours=True)
    """Attention implementation of the model (unset: sdpa if the model has it, else eager)."""
    trust_remote_code: bool = setting(False, ours=True)
    """Run Python code from the model directory."""
    allow_pickle: bool = setting(False, ours=True)
    """Also read weights from .bin files, which are pickles; only tensors are unpickled."""
    graph_sharding: str = setting(
        "cut", choices=("cut", "farthest-dependency"), ours=True, plan=InPlan("graph_sharding")
    )
    """How the graph is cut into units: where the fewest values cross, or by the farthest dependency
    of each node.
    """
    tensor_parallel_rules: str | None = setting(None, ours=True, makes_plan=True)
    """How weights are sharded, such as '*.o_proj.weight=row; lm_head.weight=replicate', or a file
    of such lines.
    """
    cross_entropy_chunk_size: int = setting(0, least=0, ours=True, plan=InPlan("loss_chunk"))
    """Compute the loss for this many tokens at a time; logits are recomputed in the backward
    instead of stored (0: store all logits)."""
