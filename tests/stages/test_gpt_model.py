"""The GPT that flags describe, trained: the losses and weights of the module's own training loop on
one rank, and those of one rank under every kind of layout.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.stages.gpt_model import GPTModel, build_gpt, traced_gpt
from megatron_merak.stages.init_captured import Initialiser
from megatron_merak.training.gpt_blueprint import gpt_blueprint
from tests.parity.rig import assemble, one
from tests.ranks import run_ranks

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 100 --seq-length 16
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2
    --mock-data --adam-eps 1e-3"""  # so that what rounding leaves of no gradient is no update
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"""
MIXTURE = f"""{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1
    --moe-z-loss-coeff 0.01"""
# of 32 tokens of a micro-batch and 4 experts, an expert computes 13
LIMITED = f"{MIXTURE} --moe-expert-capacity-factor 0.8"
FIRST = f"{LIMITED} --moe-token-drop-policy position"
SHARED = f"{LIMITED} --moe-shared-expert-intermediate-size 20 --moe-shared-expert-gate"
PER_TOKEN = "--calculate-per-token-loss"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
EP4 = "--expert-model-parallel-size 4"
ETP2 = "--expert-tensor-parallel-size 2"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
RATE = 1e-2
DECAY = 0.1
STEPS = 2


def config_of(flags):
    words = [*FLAGS.split(), *flags.split()]
    config, _ = arguments.read(arguments.build_parser(config=Config), words, Config)
    return config


def samples(count):
    """Micro-batches of which one has fewer targets than the others."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for index in range(count):
        text = torch.randint(100, (2, 17), generator=generator)
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


def trained(rank, world, flags):
    """(loss, gradient norm) of two steps, the loss of an evaluation, and the weights of this
    rank.
    """
    config = config_of(flags)
    blueprint = gpt_blueprint(traced_gpt(config), config, world, CLUSTERS["cpu"])
    plan = blueprint.plan
    mesh = build_mesh(
        plan.grid,
        rank,
        torch.device("cpu"),
        expert_group=plan.expert_group,
        expert_shards=plan.expert_shards,
    )
    model = GPTModel(blueprint, config, mesh)
    own = samples(4)[mesh.replica :: mesh.replicas]
    rates = [(RATE, DECAY), (RATE, 0.0)]
    steps = []
    for _ in range(STEPS):
        model.begin_step(rates)
        result = model.update(rates, model.backward(model.from_samples(own)))
        steps.append((result.loss, result.grad_norm))
    evaluated = model.mean_loss(own)
    model.gatherer.gather()
    shards = model.shards(model.buffer.data)
    weights = [replace(shard, tensor=shard.tensor.clone()) for shard in shards]
    return steps, evaluated, weights


def together(ranks):
    """What all ranks found: losses as those ranks know them who do, and full weights."""
    steps = []
    for number in range(STEPS):
        of_ranks = [rank[0][number] for rank in ranks]
        steps.append((one([loss for loss, _ in of_ranks]), one([norm for _, norm in of_ranks])))
    evaluated = one([rank[1] for rank in ranks])
    return steps, evaluated, assemble([rank[2] for rank in ranks])


@cache
def on_one_rank(flags):
    return together([trained(0, 1, flags)])


def mean_loss(model, per_token):
    """Of all micro-batches: the mean of their means over targets, or the mean over all targets."""
    batches = samples(4)
    sums = [model(**model.batch_of(batch)) for batch in batches]
    counts = [batch["loss_mask"].sum() for batch in batches]
    if per_token:
        return sum(sums) / sum(counts)
    return sum(total / count for total, count in zip(sums, counts, strict=True)) / len(batches)


def by_torch(flags):
    """The same of a plain training loop."""
    config = config_of(flags)
    per_token = config.train.calculate_per_token_loss
    model = build_gpt(config.model)
    initialiser = Initialiser(model)
    names = [name for name, _ in model.named_parameters()]
    drawn = {name: initialiser.draw(name, config.train.seed) for name in names}
    model.load_state_dict(drawn, assign=True)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=RATE,
        betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        eps=config.optimizer.adam_eps,
    )
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, per_token)
        loss.backward()
        clip = config.optimizer.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    with torch.no_grad():
        evaluated = mean_loss(model, per_token).item()
    return steps, evaluated, {name: each.detach() for name, each in model.named_parameters()}


def check(found, wanted):
    steps, evaluated, weights = found
    expected_steps, expected, tensors = wanted
    for step, expected_step in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected_step, rel=2e-6)
    assert evaluated == pytest.approx(expected, rel=2e-6)
    assert weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("flags", ["", LLAMA, PER_TOKEN, f"{LLAMA} {PER_TOKEN}", MIXTURE, SHARED])
def test_one_rank_trains_as_a_plain_loop_of_the_module_does(flags):
    steps, evaluated, _ = wanted = by_torch(flags)
    losses = [loss for loss, _ in steps] + [evaluated]
    assert losses[0] > losses[1] > losses[2]
    check(on_one_rank(flags), wanted)


@pytest.mark.parametrize(
    ("world", "shape", "layout"),
    [
        (1, PER_TOKEN, "--cross-entropy-chunk-size 8"),
        (2, LLAMA, f"{TP2} --sequence-parallel"),
        (2, "", f"{TP2} --tp-comm-overlap sub-pipeline"),
        (2, "", f"{PP2} --recompute-granularity full"),
        (2, LLAMA, ZERO3),
        (2, MIXTURE, f"{TP2} --sequence-parallel {EP2}"),
        (2, MIXTURE, EP2),
        pytest.param(2, SHARED, f"{TP2} --sequence-parallel {EP2}", marks=pytest.mark.long),
        pytest.param(2, SHARED, EP2, marks=pytest.mark.slow),
        pytest.param(2, FIRST, f"{TP2} {EP2} --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(4, SHARED, f"--context-parallel-size 2 {EP4}", marks=pytest.mark.slow),
        pytest.param(2, MIXTURE, f"{PP2} --recompute-granularity full", marks=pytest.mark.long),
        pytest.param(4, MIXTURE, f"{EP2} {ZERO3}", marks=pytest.mark.long),
        pytest.param(
            4,
            f"{MIXTURE} {PER_TOKEN}",
            f"{TP2} --sequence-parallel {EP4} --use-distributed-optimizer",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            MIXTURE,
            f"{PP2} {EP2} --pipeline-schedule zb-v --tp-comm-overlap pair",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            f"{MIXTURE} {PER_TOKEN}",
            f"--context-parallel-size 2 {EP4} --use-distributed-optimizer",
            marks=pytest.mark.long,
        ),
        pytest.param(2, MIXTURE, TP2, marks=pytest.mark.long),
        pytest.param(2, SHARED, ETP2, marks=pytest.mark.long),
        pytest.param(4, SHARED, f"{TP2} --sequence-parallel {EP2} {ETP2}", marks=pytest.mark.long),
        pytest.param(4, MIXTURE, f"{PP2} {ETP2} {ZERO3}", marks=pytest.mark.slow),
        pytest.param(
            2,
            MIXTURE,
            ZERO3,
            marks=pytest.mark.long,
        ),
        pytest.param(2, MIXTURE, "--context-parallel-size 2", marks=pytest.mark.long),
        pytest.param(
            4,
            f"{MIXTURE} {PER_TOKEN}",
            f"{TP2} {PP2} --sequence-parallel {EP2} --pipeline-schedule zb-v",
            marks=pytest.mark.long,
        ),
        # without experts, tests/parity/test_parity.py compares such layouts with HuggingFace's model
        pytest.param(4, PER_TOKEN, f"{TP2} {PP2}", marks=pytest.mark.slow),
        pytest.param(4, LLAMA, f"{PP2} --use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param(
            2,
            "",
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, LLAMA, f"{TP2} --recompute-granularity selective", marks=pytest.mark.long),
    ],
)
def test_a_layout_trains_as_one_rank_does(world, shape, layout):
    ranks = run_ranks(trained, world, f"{shape} {layout}", timeout=150)
    check(together(ranks), on_one_rank(shape))
