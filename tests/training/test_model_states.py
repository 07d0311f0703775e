"""--offload-model-states in whole jobs: the checkpoints of a run that keeps everything on its devices,
from each of which either goes on.
"""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint.directory import directory_of, read_manifest, verify
from megatron_merak.config import Config, HFConfig
from tests.ranks import run_ranks
from tests.training.jobs import job

FLAGS = "--train-iters 4 --save-interval 2 --lr-decay-style constant --clip-grad 0.5"
ON_HOST = "--offload-model-states"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"


def told(place: Path, iteration: int) -> dict:
    """Shapes and digests of the tensors of a checkpoint, whatever the files that they are in."""
    path = directory_of(place, iteration)
    verify(path)
    return {
        (kind, name): (
            tensor.shape,
            tensor.dtype,
            [(part.intervals, part.digest) for part in tensor.parts],
        )
        for kind, tensors in read_manifest(path)[1].tensors.items()
        for name, tensor in tensors.items()
    }


def both(tmp_path: Path, ranks: int, flags: str, config: type) -> None:
    """Train with and without; then go on from the middle of the one as the other."""
    flags = f"{FLAGS} {flags}"
    device, host = tmp_path / "device", tmp_path / "host"
    run_ranks(job, ranks, f"{flags} --save {device}", config)
    shown = run_ranks(job, ranks, f"{flags} --save {host} {ON_HOST}", config)
    assert "in host memory" in shown[0]
    for iteration in (2, 4):
        assert told(device, iteration) == told(host, iteration)
    for start, way, end in ((device, ON_HOST, "a"), (host, "", "b")):
        again = f"{flags} --load {start} --ckpt-step 2 --save {tmp_path / end} {way}"
        run_ranks(job, ranks, again, config)
        assert told(device, 4) == told(tmp_path / end, 4)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--bf16"),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.long),
        pytest.param(2, f"{SHARDED} --bf16", marks=pytest.mark.long),
        pytest.param(1, "--fp16 --initial-loss-scale 1024", marks=pytest.mark.long),
        pytest.param(1, "--optimizer lion --recompute-granularity full", marks=pytest.mark.long),
    ],
)
def test_checkpoints_are_those_of_a_run_on_the_device(tmp_path, ranks, flags):
    both(tmp_path, ranks, flags, Config)


@pytest.mark.long
def test_a_huggingface_model_too(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(
        tmp_path / "model"
    )
    both(tmp_path, 1, f"--model {tmp_path}/model --bf16", HFConfig)
