"""MerakTrainer with AdamW whose moments are stored in bf16."""

import warnings

import pytest
import torch

from megatron_merak.checkpoint.directory import directory_of, read_manifest
from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.optimizer_cases import run

BOTH = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
    "adam_beta2": 0.95,
}
BATCH = {"per_device_train_batch_size": 4}


def ours(directory, changes, name="adamw_torch", resume=None):
    return run(MerakTrainer, MerakArguments, name, directory, {**BATCH, **changes}, resume)


def test_moments_are_bf16_and_counted_and_resumed(tmp_path):
    trainer, found = ours(tmp_path / "whole", BOTH)
    optimizer = trainer.engine.optimizer
    assert optimizer.exp_avg.dtype == optimizer.exp_avg_sq.dtype == torch.bfloat16
    kept = optimizer.exp_avg.nbytes + optimizer.exp_avg_sq.nbytes
    assert trainer.engine.plan.state_bytes * optimizer.buffer.size == kept
    saved = tmp_path / "whole" / "checkpoint-3"
    again, resumed = ours(tmp_path / "resumed", BOTH, resume=str(saved))
    assert resumed == found
    for kind, state in again.engine.optimizer.state().items():
        assert torch.equal(state, optimizer.state()[kind]), kind
    manifest = read_manifest(directory_of(saved / "training_state", 3))[1]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {each.dtype for each in manifest.tensors[kind].values()} == {"bfloat16"}
    plain = ours(tmp_path / "plain", {"adam_beta2": 0.95})[1]
    assert plain[0] == found[0] and plain[2] != found[2]
    assert [each[0] for each in found] == pytest.approx([each[0] for each in plain], rel=1e-2)


def test_moments_of_another_optimizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="use_precision_aware_optimizer True: .* SGD is another"):
        ours(tmp_path, BOTH, "momentum")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exp_avg_dtype": "bf16"}, "has no effect without --use-precision-aware-optimizer"),
        (
            {**BOTH, "exp_avg_dtype": "fp8"},
            "exp_avg_dtype 'fp8': .* Use bf16, which needs no scale",
        ),
        ({**BOTH, "exp_avg_sq_dtype": "int8"}, "exp_avg_sq_dtype 'int8': .* Use fp32 or bf16"),
    ],
)
def test_arguments_that_cannot_be_are_named(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        MerakArguments(str(tmp_path), use_cpu=True, **changes)


def test_a_second_moment_that_cannot_fall_is_told(tmp_path):
    with pytest.warns(UserWarning, match="^exp_avg_sq_dtype bf16 with adam_beta2 0.999: "):
        MerakArguments(str(tmp_path), use_cpu=True, **{**BOTH, "adam_beta2": 0.999})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MerakArguments(str(tmp_path), use_cpu=True, **BOTH)
