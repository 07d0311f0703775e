"""What the zoo is made of: discovery, tiny configurations, comparison, cache and table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.zoo import heads, tiny
from tests.zoo.chain import merge
from tests.zoo.compare import DOUBLE, EXACT, WRONG, gradient_difference, judge
from tests.zoo.configs import tiny_config
from tests.zoo.sweep import read_cache
from tests.zoo.table import markdown

ROOT = Path(__file__).resolve().parents[2]


def test_every_causal_language_model_is_found():
    from transformers.models.auto import modeling_auto

    found = heads()
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {name for name, head in found.items() if head.causal} == causal and len(causal) > 100
    assert (
        found["bert"].class_name == "BertForMaskedLM"
        and found["vit"].class_name == "ViTForImageClassification"
    )


def test_a_configuration_is_small_in_all_its_parts_and_shows_every_kind_of_layer():
    config = tiny_config("gemma3").get_text_config()
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (
        64,
        4,
        2,
    )
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert tiny_config("gemma3").vision_config.image_size == 32


def test_a_specimen_is_the_same_each_time_and_not_the_initial_model():
    specimen = tiny("gpt2")
    first, second, initial = specimen.model(), specimen.model(), specimen.empty()
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), initial.parameters(), strict=True
    ):
        assert torch.equal(a, b) and not torch.equal(a, c), name


def test_a_type_that_does_not_train_says_why():
    with pytest.raises(LookupError, match="no head"):
        tiny("no_such_type")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda g: g["a"].mul_(1 + 5e-5), EXACT),
        (lambda g: g["a"].mul_(1 + 2e-4), WRONG),
        (lambda g: g["zero"].add_(5e-8), EXACT),
        (lambda g: g["zero"].add_(2e-7), WRONG),
        (lambda g: g.pop("a"), WRONG),
        (lambda g: g.update(more=torch.ones(1)), WRONG),
        (lambda g: g.update(more=torch.zeros(1)), EXACT),
        (lambda g: g["a"].fill_(float("nan")), WRONG),
    ],
)
def test_gradients_that_differ_are_seen(change, state):
    wanted = {"a": torch.tensor([1.0, -0.5]), "zero": torch.tensor([1e-9])}
    found = {name: grad.clone() for name, grad in wanted.items()}
    change(found)
    assert judge(0.0, *gradient_difference(found, wanted), torch.float32).state == state


def test_a_loss_that_differs_is_seen():
    assert judge(2e-5, 0.0, "", torch.float32).state == WRONG
    assert judge(float("nan"), 0.0, "", torch.float32).state == WRONG
    assert judge(2e-10, 0.0, "", torch.float64).state == WRONG
    assert judge(0.0, 5e-11, "", torch.float64).state == DOUBLE


def test_parts_of_uneven_blocks_are_put_together():
    from megatron_merak.plan import TensorSharding

    tensor = TensorSharding("qkv", (8, 2), dim=0, blocks=(4, 2, 2))
    full = torch.arange(16.0).view(8, 2)
    parts = [torch.cat([full[a:b] for a, b in tensor.intervals(rank, 2)]) for rank in range(2)]
    assert torch.equal(merge(tensor, parts, 0), full)


def test_a_cache_keeps_the_last_row_of_each_type_and_survives_a_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        {"type": "a", "digest": "x", "n": 1},
        {"type": "a", "digest": "x", "n": 2},
        {"type": "b", "digest": "y"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"type": "c", "dig')
    assert read_cache(path, "x") == {"a": lines[1]}
    assert set(read_cache(path, None)) == {"a", "b"}


def test_the_table_counts_what_is_wrong():
    base = {
        "mapping": "CAUSAL_LM",
        "class": "A",
        "causal": True,
        "how": "as it is",
        "notes": ["Told."],
        "share": 0.5,
    }
    good = {"state": EXACT, "loss": 0.0, "gradient": 2e-7, "where": "", "text": ""}
    rows = [
        {**base, "type": "one", "pp2": good, "pp3": good, "tp2": good, "curve": good},
        {
            **base,
            "type": "two",
            "pp2": good,
            "pp3": good,
            "tp2": {**good, "state": WRONG},
            "curve": good,
        },
        {
            **base,
            "type": "six",
            "refused": "TraceError: /x/site-packages/transformers/a.py:1 | branches",
        },
        {
            "type": "ten",
            "mapping": "CAUSAL_LM",
            "class": "B",
            "causal": True,
            "left_out": "no loss",
        },
    ]
    del rows[2]["how"]
    text = markdown(rows)
    assert "- `one`, `two`: Told." in text and "successive states" not in text
    assert "successive states" in markdown([{**rows[0], "digest": "x"}, {**rows[1], "digest": "y"}])
    assert "| silently wrong | 1 two | 1 two |" in text
    assert "| exact at TP=2 | 1 of 2 (50.0%) | 1 of 2 (50.0%) |" in text
    assert (
        "- `six`: TraceError: transformers/a.py:1 \\| branches" in text
        and "- `ten` (B): no loss" in text
    )


PROGRAM = """
import hashlib, logging, sys
logging.disable(logging.WARNING)
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.graph.lowering.split import split
from tests.zoo import tiny
from tests.zoo.measure import subject_of
for name in sys.argv[1:]:
    subject = subject_of(tiny(name))
    sharding = shard(subject.captured, 2)
    rewritten = rewrite(subject.captured, subject.chain, sharding, 0, 2)
    fuse(rewritten.graph)
    parts = split(rewritten, range(len(subject.chain.units)))
    text = str(rewritten.graph) + repr([(p.parameters, p.common, p.ins, p.outs) for p in parts.parts])
    text += repr((parts.sources, parts.targets, rewritten.partial, sharding.tensors))
    print(name, hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.long
def test_processes_that_hash_differently_make_the_same_program():
    """Ranks are started apart: an order that comes from a set would make their collectives
    disagree.
    """
    answers = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, "qwen3_moe"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1]
