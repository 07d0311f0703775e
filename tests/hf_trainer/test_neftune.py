"""``neftune_noise_alpha``: noise on the input embedding in training, the same wherever and whenever
it is computed.
"""

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.arguments.neftune import embedding_of, noisy
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 5,
        "weight_decay": 0.1,
    },
}
STAGES = {"pipeline_model_parallel_size": 2}
ALPHA = 0.2  # a third of the largest numbers of the embedding


def test_noise_is_distributed_as_in_transformers():
    """Uniform, of the same magnitude: bounds, mean and variance of many draws."""
    model = tiny_llama()
    embedding, tokens = embedding_of(model), torch.arange(1, 33).repeat(64, 1)
    plain = embedding(tokens)
    with noisy(model.train(), ALPHA):
        ours = embedding(tokens) - plain
        assert torch.equal(embedding.eval()(tokens), plain)
    embedding.train().neftune_noise_alpha = ALPHA
    theirs = neftune_post_forward_hook(embedding, (tokens,), plain) - plain
    magnitude = ALPHA / (plain.shape[1] * plain.shape[2]) ** 0.5
    for noise in (ours, theirs):
        assert 0.999 * magnitude < noise.abs().max() <= 1.00001 * magnitude
        assert noise.mean().abs() < 0.01 * magnitude
        assert noise.var().item() == pytest.approx(magnitude**2 / 3, rel=0.02)
    assert torch.equal(embedding(tokens), plain), "the hook is gone"
    with noisy(model.eval(), ALPHA):
        assert torch.equal(embedding(tokens), plain)


def trained(directory, alpha, ragged=False, **changes):
    """The losses of steps, of evaluations before and after, this rank's weights of norms, and
    whether halves ran.
    """
    arguments = MerakArguments(directory, neftune_noise_alpha=alpha, **{**RUN, **changes})
    data = samples(16, ragged=ragged)
    trainer = MerakTrainer(
        tiny_llama(2), arguments, collate, data, samples(4, seed=9, ragged=False)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    buffer = trainer.engine.buffer
    norms = {
        name: buffer.view(buffer.data, name).clone() for name in buffer.slots if "norm" in name
    }
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, before, trainer.evaluate()["eval_loss"], norms, trainer.engine.halves


def test_training_has_it_and_an_evaluation_has_not(tmp_path):
    runs = {
        alpha: trained(str(tmp_path), alpha, learning_rate=0.0)
        for alpha in (None, 0.0, 1e-5, ALPHA)
    }
    plain, losses = runs[None][0], runs[ALPHA][0]
    assert (
        runs[0.0][0] == plain
        and runs[1e-5][0] == pytest.approx(plain, rel=1e-5)
        and runs[1e-5][0] != plain
    )
    gaps = [abs(one - other) for one, other in zip(losses, plain, strict=True)]
    assert min(gaps) > 1e-5 and len({round(gap, 7) for gap in gaps}) == len(gaps)
    assert len({run[1:3] for run in runs.values()}) == 1


def test_recomputation_repeats_it_and_the_seed_decides_it(tmp_path):
    once, again, other = (
        trained(str(tmp_path), ALPHA, **changes)[0]
        for changes in ({}, {"activation_checkpointing": True}, {"seed": 6, "data_seed": 5})
    )
    assert once == again != other


@pytest.mark.long
def test_batches_run_at_their_own_lengths(tmp_path):
    """The magnitude depends on the length: none is padded."""
    losses = trained(str(tmp_path), ALPHA, ragged=True)[0]
    assert losses != trained(str(tmp_path), None, ragged=True)[0] and all(
        loss < 6 for loss in losses
    )


def on_ranks(rank, world_size, directory, changes):
    torch.set_num_threads(1)
    return trained(directory, ALPHA, **changes)


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        (STAGES, {}),
        pytest.param(
            {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 2},
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param({}, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_stages_and_replicas_give_what_one_process_gives(tmp_path, changes, alike):
    wanted = trained(
        str(tmp_path),
        ALPHA,
        **(changes | {"pipeline_model_parallel_size": 1} if alike is None else alike),
    )
    for found in run_ranks(on_ranks, 2, str(tmp_path), changes, timeout=200):
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        assert found[1:3] == pytest.approx(wanted[1:3], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["weight-gradient", "sub-pipeline"])
def test_tensor_parallel_ranks_draw_the_same(tmp_path, overlap):
    """Weights that both of them have stay equal."""
    changes = {"tensor_model_parallel_size": 2, "tp_comm_overlap": overlap}
    one, other = run_ranks(on_ranks, 2, str(tmp_path), changes, timeout=200)
    assert one[0] == other[0] and len(one[3]) > 2 and one[4] == (overlap == "sub-pipeline")
    assert all(torch.equal(value, other[3][name]) for name, value in one[3].items())
    plain = trained(str(tmp_path), None)
    assert one[1] == pytest.approx(plain[1], rel=1e-5) and one[0] != pytest.approx(
        plain[0], rel=1e-6
    )
    assert one[0] == pytest.approx(plain[0], rel=0.05)


class NoEmbedding(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("alpha", [-1.0, float("inf"), "5", True])
def test_what_is_no_magnitude_is_refused(alpha):
    with pytest.raises(
        ConfigError, match="neftune_noise_alpha .*: it is not a non-negative number"
    ):
        MerakArguments("unused", use_cpu=True, neftune_noise_alpha=alpha)


def test_a_model_without_an_embedding_is_refused():
    with pytest.raises(
        ConfigError, match="neftune_noise_alpha .*: NoEmbedding has no input embedding"
    ):
        embedding_of(NoEmbedding())
