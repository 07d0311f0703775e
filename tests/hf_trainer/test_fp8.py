"""``MerakArguments(fp8=...)``: it trains as bf16 does, evaluates as it trains, and says what stays."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments, MerakTrainer
from megatron_merak.config.fp8 import Fp8
from megatron_merak.errors import ConfigError

STEPS = 50


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    )


def rows():
    """One sequence, from another place each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (16,), generator=generator)
    return [{"input_ids": tokens.roll(i), "labels": tokens.roll(i)} for i in range(64)]


def trainer_of(directory, **asked):
    arguments = MerakArguments(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        max_steps=asked.pop("max_steps", STEPS),
        learning_rate=3e-3,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
        **asked,
    )
    return MerakTrainer(model=tiny(), args=arguments, train_dataset=rows(), eval_dataset=rows()[:8])


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [{"fp8": "hybrid"}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}], ids=str
)
def test_training_falls_as_in_bf16(tmp_path, how):
    wide = trainer_of(tmp_path / "wide", save_strategy="no")
    wide.train()
    narrow = trainer_of(tmp_path / "narrow", save_strategy="no", **how)
    narrow.train()
    one, other = losses_of(wide), losses_of(narrow)
    assert len(one) == len(other) == STEPS // 5 and one[-1] < 0.6 * one[0]
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 0.02
    assert one != other


def test_a_run_resumes_to_the_bit_and_evaluates_in_fp8(tmp_path):
    whole = trainer_of(tmp_path / "whole", fp8="hybrid", max_steps=4, save_steps=2)
    whole.train()
    again = trainer_of(tmp_path / "again", fp8="hybrid", max_steps=4, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.evaluate()["eval_loss"] == again.evaluate()["eval_loss"]
    plain = trainer_of(tmp_path / "plain", max_steps=4, save_strategy="no")
    plain.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert plain.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], abs=0.02)
    assert plain.evaluate()["eval_loss"] != whole.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fp8": "e5m2"}, "fp8 'e5m2': it is not one of the choices. Use e4m3 or hybrid"),
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise: has no effect without --fp8-format"),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed"},
            "Use tensorwise: scales are of the values of now, and keep no history",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_end_in_bf16": 2},
            "--num-layers-at-end-in-bf16 2: has no effect without --first-last-layers-bf16",
        ),
    ],
    ids=str,
)
def test_arguments_that_are_refused(tmp_path, asked, said):
    with pytest.raises(ConfigError, match=said):
        MerakArguments(output_dir=str(tmp_path), use_cpu=True, **asked)


def test_arguments_are_settings(tmp_path):
    args = MerakArguments(
        output_dir=str(tmp_path), use_cpu=True, fp8="hybrid", first_last_layers_bf16=True
    )
    assert args.precision.fp8 == Fp8("hybrid", "tensorwise", (1, 1))
