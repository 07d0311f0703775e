"""--decoupled-lr: the word embedding and the output layer learn at a rate of their own, in any
model and layout.
"""

import json

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from megatron_merak.config import HFConfig, OptimizerConfig
from megatron_merak.errors import ConfigError
from megatron_merak.optimizer.schedules import learning_rate
from megatron_merak.stages.parameter_groups import groups_of_run, matrices_and_others, rates_of_run
from tests.choice import later
from tests.config import make
from tests.ranks import run_ranks
from tests.training.jobs import job

FLAGS = "--train-iters 3 --decoupled-lr 3e-2 --decoupled-min-lr 2e-2 --lr-warmup-iters 1 --weight-decay 0.3"
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=60
)
# its two matrices are one
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=16)


def test_groups_and_their_rates():
    config = OptimizerConfig(
        lr=1.0, min_lr=0.1, decoupled_lr=4.0, lr_warmup_iters=2, weight_decay=0.2
    )
    group_of = groups_of_run(config, {"embed", "head"})
    shapes = {"embed": (9, 4), "head": (9, 4), "up": (4, 4), "norm": (4,)}
    assert [group_of(name, shape) for name, shape in shapes.items()] == [2, 2, 0, 1]
    assert groups_of_run(OptimizerConfig(), {"embed"}) is matrices_and_others
    rate, outer = (
        learning_rate(config, 7, 10),
        learning_rate(OptimizerConfig(lr=4.0, min_lr=0.1, lr_warmup_iters=2), 7, 10),
    )
    assert (
        rates_of_run(config, 7, 10) == [(rate, 0.2), (rate, 0.0), (outer, 0.2), (outer, 0.0)]
        and outer > 2 * rate
    )
    assert rates_of_run(config, 1, 10)[2][0] == 2.0, "in the middle of the warm-up"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"decoupled_min_lr": 1e-4},
            "--decoupled-min-lr 0.0001: has no effect without --decoupled-lr. ",
        ),
        (
            {"decoupled_lr": 1e-4, "min_lr": 2e-4},
            "--min-lr 0.0002: exceeds --decoupled-lr 0.0001. Use at most 0.0001",
        ),
        (
            {"decoupled_lr": 1e-4, "decoupled_min_lr": 2e-4},
            "--decoupled-min-lr 0.0002: exceeds --decoupled-lr 0.0001.",
        ),
    ],
)
def test_rates_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        make(optimizer={"lr": 1e-3} | given).validate(1)
    make(
        optimizer={"lr": 1e-3, "decoupled_lr": 1e-4, "min_lr": 2e-4, "decoupled_min_lr": 0.0}
    ).validate(1)
    assert str(error.value).startswith(message)


def losses(told: str) -> list[float]:
    return [
        float(line.split("lm loss: ")[1].split()[0])
        for line in told.splitlines()
        if "lm loss: " in line
    ]


@pytest.mark.parametrize("original", [later(LLAMA), GPT2], ids=["untied", "tied"])
def test_native_and_captured_models_learn_alike_in_every_layout(tmp_path, original):
    path = tmp_path / "config.json"
    name = type(original).__name__.replace(
        "Config", "ForCausalLM" if original is LLAMA else "LMHeadModel"
    )
    plain = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} if original is GPT2 else {}
    path.write_text(json.dumps(original.to_dict() | plain | {"architectures": [name]}))
    llama = """--position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --ffn-hidden-size 64
        --disable-bias-linear --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1"""
    gpt2 = "--max-position-embeddings 16 --make-vocab-size-divisible-by 1"
    model = f"--model {path} --attn-implementation eager"
    native = f"{llama if original is LLAMA else gpt2} {FLAGS}"
    (alone,) = run_ranks(job, 1, f"{native} --save {tmp_path}/c --save-interval 1")
    (plainly,) = run_ranks(
        job, 1, native.replace("--decoupled-lr 3e-2 --decoupled-min-lr 2e-2", "")
    )
    assert losses(alone) != losses(plainly) and len(losses(alone)) == 3
    two = run_ranks(job, 2, f"{native} --pipeline-model-parallel-size 2")
    assert losses(two[-1]) == pytest.approx(losses(alone), abs=1e-5)
    # the same weights to begin with
    model += f" --load {tmp_path}/c --ckpt-step 1 --tensor-model-parallel-size 2"
    captured = run_ranks(job, 2, f"{model} {FLAGS}", HFConfig)
    assert losses(captured[-1]) == pytest.approx(losses(alone)[1:], abs=1e-5)


def test_the_rates_are_torchs(tmp_path):
    """One step by hand: what each parameter moves by is its group's rate, and a matrix's decay."""
    from megatron_merak.optimizer.adamw import AdamW
    from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer

    config = OptimizerConfig(lr=1e-2, decoupled_lr=5e-2, weight_decay=0.3, clip_grad=0.0)
    group_of = groups_of_run(config, {"embed"})
    shapes = {"embed": (7, 3), "up": (5, 3), "norm": (3,)}
    buffer = ParameterBuffer(
        [[BufferEntry(n, s, group_of(n, s)) for n, s in shapes.items()]], torch.float32, "cpu"
    )
    torch.manual_seed(1)
    theirs = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    for name, parameter in theirs.items():
        buffer.parameter(name).copy_(parameter.detach())
        parameter.grad = torch.randn(shapes[name])
        buffer.grad(name).copy_(parameter.grad)
    rates = {"embed": (5e-2, 0.3), "up": (1e-2, 0.3), "norm": (1e-2, 0.0)}
    groups = [
        {"params": [theirs[n]], "lr": lr, "weight_decay": decay} for n, (lr, decay) in rates.items()
    ]
    torch.optim.AdamW(groups, betas=(0.9, 0.95)).step()
    AdamW(buffer, config).step(rates_of_run(config, 0, 10))
    for name, parameter in theirs.items():
        torch.testing.assert_close(buffer.parameter(name), parameter.detach(), rtol=1e-6, atol=1e-7)
