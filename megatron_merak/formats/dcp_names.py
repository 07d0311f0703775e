"""How stores of torch.distributed.checkpoint name the tensors of a model and of its optimizer.

    {"model": ..., "optim": ...}     model.NAME     optim.state.NAME.exp_avg       optim.param_groups....
    accelerate, two directories      model.NAME     optimizer.state.NAME.exp_avg   optimizer.param_groups....
    torchtitan                       TITAN          optimizer.state.TITAN.exp_avg  optimizer.param_groups....

NAME is what the model calls its parameter, TITAN what torchtitan's own models do. What stands before
them is found by comparing with the names of the model, so any other key or wrapper will do.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Modules that training programs put around others; state dicts of some versions show them.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_STATE = re.compile(r"(?P<head>(?:[^.]+\.)*?)state\.(?P<name>.+)\.(?P<kind>[^.]+)")
_OF_OPTIMIZERS = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg sum step".split()
)

HUGGINGFACE = "HuggingFace"
TORCHTITAN = "torchtitan"

OPTIMIZER_DIRECTORY = "optimizer_0"
STEP = "step"
SAMPLES = "consumed_samples"

# By model type, parts of names in transformers and in torchtitan: in its releases, and since.
_ATTENTION = {
    "self_attn.q_proj": ("attention.wq", "attention.qkv_linear.wq"),
    "self_attn.k_proj": ("attention.wk", "attention.qkv_linear.wk"),
    "self_attn.v_proj": ("attention.wv", "attention.qkv_linear.wv"),
    "self_attn.o_proj": ("attention.wo",),
}
_BLOCK = {
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.down_proj": ("feed_forward.w2",),
    "mlp.up_proj": ("feed_forward.w3",),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("ffn_norm",),
}
_NORMS = {"self_attn.q_norm": ("attention.q_norm",), "self_attn.k_norm": ("attention.k_norm",)}
_OUTSIDE = {
    "model.embed_tokens": ("tok_embeddings",),
    "model.norm": ("norm",),
    "lm_head": ("output", "lm_head"),
}
_TITAN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llama": {**_ATTENTION, **_BLOCK},
    "qwen3": {**_ATTENTION, **_BLOCK, **_NORMS},
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.weight")
BUFFERS = re.compile(r"(.*\.)?(freqs_cis|rope_cache|rope\.cache|inv_freq)")


@dataclass(frozen=True)
class Heading:
    """What stands before the names of tensors in a store.

    program: whose names they are, `HUGGINGFACE` or `TORCHTITAN`.
    prefix:  what stands before them.
    """

    program: str
    prefix: str


def bare(key: str) -> str:
    """Return a key without the modules that torch puts around others."""
    return _WRAPPERS.sub("", key)


def headings(
    keys: Iterable[str], tables: Mapping[str, Mapping[str, str]]
) -> list[tuple[Heading, int]]:
    """Return how many keys end with a known name, for all that stands before one, the most frequent
    first.

    tables: by program, from the names in a store to those of the model.
    """
    votes: Counter[Heading] = Counter()
    for key in map(bare, keys):
        for tail in tails(key):
            for program, table in tables.items():
                if tail in table:
                    votes[Heading(program, key.removesuffix(tail))] += 1
    return votes.most_common()


def optimizer_heads(keys: Iterable[str], known: Container[str]) -> list[str]:
    """Return what stands before ``state.NAME.exp_avg`` and the like in a store: "optim.".

    known: names in a store of the model's tensors, by which ``state.`` is told from a part of one.
    """
    found: dict[str, None] = {}
    for key in keys:
        match = _STATE.fullmatch(key)
        if match is None or match["kind"] not in _OF_OPTIMIZERS:
            continue
        head = match["head"]
        whole = bare(key.removesuffix(f".{match['kind']}"))
        tail = next((each for each in tails(whole) if each in known), None)
        if tail is not None:
            before = f".{whole.removesuffix(tail)}".rpartition(".state.")[0]
            head = f"{before}."[1:]
        found[head] = None
    return list(found)


def tails(name: str) -> Iterator[str]:
    """Yield a name, and what remains of it without its first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def state_names(keys: Iterable[str], head: str) -> dict[str, dict[str, str]]:
    """Return the keys of an optimizer's state, by kind ("exp_avg") and by name."""
    found: dict[str, dict[str, str]] = {}
    start = f"{head}state."
    for key in keys:
        if key.startswith(start):
            name, _, kind = key[len(start) :].rpartition(".")
            found.setdefault(kind, {})[name] = key
    return found


def titan_names(config: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return torchtitan's names of each tensor of a model: in its releases, then since.

    config: of transformers.
    names:  of the model.

    A tensor that torchtitan's model of the type does not have is not in the result; none are, where
    it has no such model.
    """
    table = _TITAN.get(config.model_type)
    if table is None:
        return {}
    known = {}
    for name in names:
        outside = name.removesuffix(".weight")
        match = _LAYER.fullmatch(name)
        if outside in _OUTSIDE and name.endswith(".weight"):
            known[name] = tuple(f"{each}.weight" for each in _OUTSIDE[outside])
        elif match and match[2] in table:
            known[name] = tuple(f"layers.{match[1]}.{each}.weight" for each in table[match[2]])
    return known


def rotated_heads(config: Any, name: str) -> int:
    """Return the heads whose rows torchtitan has in another order; 0 for any other tensor.

    It rotates pairs of neighbours in its Llama 3, where transformers rotates the first half of a head
    with the second; in its Qwen 3 it does as transformers.
    """
    match = _ROTATED.fullmatch(name)
    if config.model_type != "llama" or match is None:
        return 0
    heads = config.num_attention_heads
    return heads if match[1] == "q" else (config.num_key_value_heads or heads)


def halves_first(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in transformers' order, given them in torchtitan's."""
    rows, columns = values.shape
    pairs = values.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def pairs_first(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows in torchtitan's order, given them in transformers'."""
    rows, columns = values.shape
    halves = values.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
