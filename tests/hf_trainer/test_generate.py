"""``trainer.generate`` gives, token for token, what transformers' ``model.generate`` gives for the
trained weights.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.ranks import run_ranks

TOKENS = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(**TOKENS, **LLAMA, num_key_value_heads=2, initializer_range=0.3)
    )


def gpt2() -> nn.Module:
    """Positions are learned, the output layer is the embedding, and training drops."""
    return GPT2LMHeadModel(
        GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3)
    )


def t5() -> nn.Module:
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
    }
    return T5ForConditionalGeneration(
        T5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    )


MODELS = {"llama": llama, "gpt2": gpt2, "t5": t5}
# Rows of uneven length, padded on the left; three rows are not a multiple of replicas and stages.
SAMPLED = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 7},
    "short": {"max_new_tokens": 3},
    "stops": {"max_new_tokens": 7, "eos_token_id": [*range(1, 40)]},
    "length": {"max_length": 10, "min_length": 8, "no_repeat_ngram_size": 2},
    "sampled": {**SAMPLED, "max_new_tokens": 5, "num_return_sequences": 2},
    "beams": {
        "num_beams": 3,
        "max_new_tokens": 5,
        "num_return_sequences": 2,
        "length_penalty": 0.5,
    },
    "sampled beams": {"num_beams": 2, "max_new_tokens": 4, "do_sample": True},
    "config": {
        "generation_config": GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=1)
    },
}


LONG = (("llama", 4, 2, 2), ("gpt2", 4, 1, 2), ("t5", 2, 2, 1), ("t5", 1, 1, 1), ("gpt2", 2, 2, 1))


def prompts(length: int = 5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 96, (3, length), generator=draw)
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def build(
    directory: str,
    model: nn.Module,
    tp: int = 1,
    pp: int = 1,
    kind: type = MerakTrainer,
    **given: Any,
) -> MerakTrainer:
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 96, (2, 9), generator=draw) for _ in range(16)]
    data = [{"input_ids": row[0], "labels": row[1]} for row in rows]
    degrees = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "learning_rate": 1e-2,
    }
    plain = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 2,
    }
    return kind(
        model,
        MerakArguments(directory, **degrees, **plain),
        train_dataset=data,
        eval_dataset=data,
        **given,
    )


def compare(
    rank: int, world: int, directory: str, name: str, tp: int, pp: int, calls: list[str]
) -> list[list]:
    torch.manual_seed(0)
    trainer = build(directory, MODELS[name](), tp, pp)
    trainer.train()
    trainer.save_model()
    whole = (
        (AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM)
        .from_pretrained(directory)
        .eval()
    )
    found = []
    for call in calls:
        torch.manual_seed(5)
        wanted = whole.generate(**prompts(), **CALLS[call])
        torch.manual_seed(5 + 1000 * rank)  # the first rank's generator is the one that counts
        ours = trainer.generate(**prompts(), **CALLS[call])
        assert torch.equal(ours, wanted), f"{call}: {ours.tolist()} and not {wanted.tolist()}"
        assert torch.equal(torch.rand(1), trainer_draws(wanted, whole, call))
        found.append(ours.tolist())
    if world > 1:
        return found
    plain = prompts()["input_ids"].clamp(min=3)  # without padding there is no mask
    ours = trainer.generate(
        plain, max_new_tokens=4, return_dict_in_generate=True, output_logits=True
    )
    wanted = whole.generate(
        plain, max_new_tokens=4, return_dict_in_generate=True, output_logits=True
    )
    assert torch.equal(ours.sequences, wanted.sequences)
    for mine, theirs in zip(ours.logits, wanted.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return found


def trainer_draws(wanted: torch.Tensor, whole: nn.Module, call: str) -> torch.Tensor:
    """What the generator of one process draws behind a call."""
    torch.manual_seed(5)
    whole.generate(**prompts(), **CALLS[call])
    return torch.rand(1)


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "pp", "calls"),
    [
        ("llama", 1, 1, 1, [*CALLS]),
        pytest.param("t5", 2, 1, 2, ["short"], marks=pytest.mark.slow),
        pytest.param("llama", 2, 1, 1, ["short", "sampled"], marks=pytest.mark.slow),
        *(pytest.param(*row, [*CALLS], marks=pytest.mark.slow) for row in LONG),
    ],
)
@pytest.mark.timeout(300)
def test_tokens_are_those_of_one_process(tmp_path, name, ranks, tp, pp, calls):
    found = run_ranks(compare, ranks, str(tmp_path), name, tp, pp, calls, timeout=240)
    assert all(each == found[0] for each in found)


COMMON = {**LLAMA, "initializer_range": 0.3, "max_position_embeddings": 64}
FEW = {"num_key_value_heads": 2}
OTHERS = {
    "qwen3": (transformers.Qwen3Config, {**COMMON, **FEW, "head_dim": 8}),
    "mistral": (transformers.MistralConfig, {**COMMON, **FEW, "sliding_window": 4}),
    "mixtral": (transformers.MixtralConfig, {**COMMON, **FEW, "num_local_experts": 4}),
    "gemma2": (transformers.Gemma2Config, {**COMMON, **FEW, "head_dim": 8, "sliding_window": 4}),
    "gpt_neox": (transformers.GPTNeoXConfig, COMMON),
    "opt": (
        transformers.OPTConfig,
        {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    ),
    "bloom": (
        transformers.BloomConfig,
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "mamba": (
        transformers.MambaConfig,
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS])
def test_other_families(tmp_path, name):
    """Positions of every kind, windows, experts and a recurrence; prompts with padding and
    without.
    """
    torch.manual_seed(0)
    kind, sizes = OTHERS[name]
    model = AutoModelForCausalLM.from_config(kind(**TOKENS, **sizes))
    whole = copy.deepcopy(model).eval()
    trainer = build(str(tmp_path), model)
    for given in (prompts(), {"input_ids": prompts()["input_ids"].clamp(min=3)}):
        wanted = whole.generate(**given, max_new_tokens=8)
        assert torch.equal(trainer.generate(**given, max_new_tokens=8), wanted)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    torch.manual_seed(0)
    return build(str(tmp_path_factory.mktemp("generate")), llama())


class Ban(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(3, 50), -torch.inf)


def test_processors_of_a_script(trainer):
    found = trainer.generate(**prompts(), max_new_tokens=4, logits_processor=[Ban()])
    assert found[:, 5:].ge(50).logical_or(found[:, 5:] < 3).all()


def test_lengths_are_captured_once(trainer):
    made = trainer.engine.programs[0].all
    trainer.generate(**prompts(), max_new_tokens=3)
    known = len(made())
    trainer.generate(**prompts(4), max_new_tokens=4)  # 4 to 7 tokens, where there were 5 to 7
    assert len(made()) == known


class Samples(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, **kwargs):
        self.found.append(self.trainer.generate(**prompts(), max_new_tokens=2).tolist())


def test_a_callback_generates_while_training(tmp_path):
    torch.manual_seed(0)
    samples = Samples()
    samples.trainer = trainer = build(str(tmp_path), llama(), callbacks=[samples])
    trainer.train()
    assert len(samples.found) == 2
    assert samples.found[-1] == trainer.model.generate(**prompts(), max_new_tokens=2).tolist()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"cache_implementation": "static"},
            "generate: cache_implementation static: no keys and values are cached",
        ),
        ({"max_time": 1.0}, "generate: max_time 1.0: the clocks of ranks differ"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "generate: output_hidden_states True",
        ),
        ({"guidance_scale": 2.0}, "generate: guidance_scale 2.0"),
        ({"assistant_model": llama()}, "generate: assistant_model LlamaForCausalLM"),
        ({"custom_generate": "somewhere"}, "generate: custom_generate somewhere"),
        (
            {"prompt_lookup_num_tokens": 2},
            "generate assisted_generation: it needs more than the logits of the next token",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generate contrastive_search"),
        (
            {
                "generation_config": GenerationConfig(
                    num_beams=4, num_beam_groups=2, diversity_penalty=0.1
                )
            },
            "group_beam",
        ),
    ],
)
def test_what_is_refused(trainer, given, told):
    with pytest.raises(ConfigError, match=told):
        trainer.generate(**prompts(), max_new_tokens=2, **given)


def test_typing_mistakes_are_told_as_transformers_tells_them(trainer):
    with pytest.raises(ValueError, match="max_new_token"):
        trainer.generate(**prompts(), max_new_token=2)


def test_models_that_do_not_generate(tmp_path):
    config = BertConfig(**TOKENS, **LLAMA, max_position_embeddings=32)
    trainer = build(str(tmp_path), BertForMaskedLM(config))
    with pytest.raises(ConfigError, match="the model class cannot generate tokens"):
        trainer.generate(**prompts(), max_new_tokens=2)
