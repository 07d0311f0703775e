"""The captured GPT beside the one of native units: losses and weights of the same steps under every
kind of layout.
"""

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.planner import plan
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.stages.native import tensors
from megatron_merak.stages.native_model import NativeModel
from megatron_merak.training.hf_model import blueprint_of
from tests.ranks import run_ranks

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 60 --seq-length 16
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data
    --adam-eps 1e-3"""  # so that what rounding leaves of no gradient is no update
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"""
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"


def samples(count):
    """Micro-batches of which one has fewer targets than the others."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(count):
        text = torch.randint(60, (2, 17), generator=generator)
        mask = torch.ones(2, 16)
        mask[:, : 3 * index] = 0
        positions = torch.arange(16).expand(2, -1).contiguous()
        batches.append(
            {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": mask,
                "position_ids": positions,
            }
        )
    return batches


def steps(model, config, mesh):
    """The losses of two steps and of an evaluation, and the weights of this rank."""
    own = samples(4 // mesh.replicas * mesh.replicas)[mesh.replica :: mesh.replicas]
    losses = []
    for _ in range(2):
        rates = [(1e-2, 0.1), (1e-2, 0.0)]
        model.begin_step(rates)
        result = model.update(rates, model.backward(model.from_samples(own)))
        losses.append((result.loss, result.grad_norm))
    losses.append((model.mean_loss(own), 0.0))
    shards = model.shards(model.buffer.data)
    weights = {each.name: (each.intervals, each.tensor.clone()) for each in shards}
    return losses, weights


def both(rank, world, flags):
    words = [*FLAGS.split(), *flags.split()]
    config, _ = arguments.read(arguments.build_parser(config=Config), words, Config)
    found = []
    for captured in (False, True):
        if captured:
            traced = traced_gpt(config)
            blueprint = blueprint_of(traced, config, world, CLUSTERS["cpu"])
            made = blueprint.plan
        else:
            made = plan(config, world, shardings=tensors(config))
        mesh = build_mesh(made.grid, rank, torch.device("cpu"))
        model = GPTModel(blueprint, config, mesh) if captured else NativeModel(config, made, mesh)
        found.append(steps(model, config, mesh))
    return found


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ""),
        (1, LLAMA),
        (1, "--calculate-per-token-loss --cross-entropy-chunk-size 8"),
        (2, f"{TP2} --sequence-parallel {LLAMA}"),
        (2, f"{TP2} --tp-comm-overlap sub-pipeline"),
        (2, f"{PP2} --recompute-granularity full"),
        (2, f"{PP2} --pipeline-schedule pipedream --clip-grad 0 {LLAMA}"),
        (2, f"--data-parallel-sharding-strategy optim_grads_params {LLAMA}"),
        pytest.param(4, f"{TP2} {PP2} --calculate-per-token-loss", marks=pytest.mark.long),
        pytest.param(4, f"{PP2} --use-distributed-optimizer {LLAMA}", marks=pytest.mark.long),
        pytest.param(
            2,
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved",
            marks=pytest.mark.long,
        ),
        pytest.param(2, f"{TP2} --recompute-granularity selective {LLAMA}", marks=pytest.mark.long),
    ],
)
def test_the_captured_gpt_trains_as_its_native_units_do(world, flags):
    """To the bit where the graph computes products of the same shapes: GPT-2's, on one rank."""
    for native, captured in run_ranks(both, world, flags):
        for theirs, ours in zip(native[0], captured[0], strict=True):
            for expected, found in zip(theirs, ours, strict=True):
                assert (found is None) == (expected is None)
                assert expected is None or found == pytest.approx(expected, rel=2e-6)
        weights = {name: each for name, each in captured[1].items() if name in native[1]}
        alike = [name for name, each in weights.items() if each[0] == native[1][name][0]]
        assert alike
        for name in alike:
            ours = weights[name][1]
            theirs = native[1][name][1]
            if flags:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(ours, theirs), name
