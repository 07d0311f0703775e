"""Captured models on any layout: loss and every gradient are those of the unmodified model in one
process.
"""

import weakref
from dataclasses import replace

import pytest
import torch

from megatron_merak.config import OptimizerConfig, ParallelConfig
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.stages.traced import Traced
from tests.choice import later
from tests.engines import blueprint_of, engine_of, step
from tests.graph.tiny import gradients, randomise, tiny
from tests.parity.rig import spoil
from tests.ranks import run_ranks

RATE, DECAY, STEPS = 1e-2, 0.1, 3
INSTANCES = "num_distributed_optimizer_instances"
OPTIMIZER = OptimizerConfig(clip_grad=1.0)


def trainer_of(model, batch, grid, rank, micro_batches, ways=None, seed=1234, dtype="float32"):
    """``ways``: further fields of ParallelConfig."""
    degrees = {"tensor_model_parallel_size": grid.tp, "pipeline_model_parallel_size": grid.pp}
    parallel = ParallelConfig(**degrees, **(ways or {}))
    instances, others = (ways or {}).get(INSTANCES, 1), {"optimizer": OPTIMIZER, "seed": seed}
    mesh = build_mesh(grid, rank, torch.device("cpu"), instances=instances)
    asked = {"microbatches": micro_batches // grid.dp, "parallel": parallel}
    return engine_of(model, batch, mesh, dtype=dtype, others=others, **asked)


def parts_of(trainer, flat=None):
    shards = (
        [*trainer.parameter_shards.others(), *trainer.shards(trainer.buffer.data)]
        if flat is None
        else trainer.shards(flat)
    )
    return [replace(shard, tensor=shard.tensor.detach().clone()) for shard in shards]


def micro_batches(name, count=4):
    """Different values, one shape."""
    _, _, batch = tiny(name)
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        order = torch.randperm(2, generator=generator)
        shift = int(torch.randint(0, 7, (), generator=generator))
        made.append({k: _moved(k, v, order, shift) for k, v in batch.items()})
    return made


def _moved(key, value, order, shift):
    if not isinstance(value, torch.Tensor):
        return value
    value = value[order]
    return value.roll(shift, 1) if value.dim() == 2 and not value.is_floating_point() else value


def _train(rank, world_size, name, grid, ways, options):
    torch.set_num_threads(1)
    real, _, batch = tiny(name, **options)
    model = randomise(real())
    batches = micro_batches(name)
    trainer = trainer_of(model, batch, grid, rank, len(batches), ways)
    mine = batches[trainer.mesh.dp_rank :: grid.dp]
    spoil(trainer.buffer)
    loss = trainer.gradients(mine)
    gatherer = trainer.parameters.gatherer
    grads = parts_of(trainer, gatherer.full(trainer.buffer.own_gradient()))
    curve = [step(trainer, mine, RATE, DECAY).loss for _ in range(STEPS)]
    gatherer.gather()
    return loss, grads, curve, parts_of(trainer)


def part(full, shard):
    if shard.dim is None:
        return full
    return torch.cat([full.narrow(shard.dim, a, b - a) for a, b in shard.intervals], shard.dim)


def eager(name):
    """Mean loss, gradients, and the curve of torch's AdamW, of the model as HuggingFace made it."""
    real, _, _ = tiny(name)
    model, batches = randomise(real()), micro_batches(name)
    losses, every = zip(*(gradients(model, batch) for batch in batches), strict=True)
    grads = {key: sum(found[key] for found in every) / len(batches) for key in every[0]}
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = sum(model(**batch)["loss"] for batch in batches) / len(batches)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        curve.append(total.item())
    return sum(loss.item() for loss in losses) / len(batches), grads, curve


FULL = {"recompute_granularity": "full"}
SPLIT = {"pipeline_schedule": "zb-h1"}
ZERO = {name: {"data_parallel_sharding_strategy": name} for name in SHARDINGS}
TWO = {INSTANCES: 2}
PARTS = {"sequence_parallel": True}
CASES = [
    ("llama", Grid(), {}),
    later("llama", Grid(tp=2, pp=2), FULL),
    later("llama", Grid(pp=2), FULL | {"pipeline_schedule": "zb-v"}),
    ("t5", Grid(tp=2, pp=2), {"pipeline_schedule": "interleaved"}),
    ("mixtral", Grid(tp=2, pp=2), {"pipeline_schedule": "zb-h1", "tp_comm_overlap": "none"}),
    pytest.param(
        "recurrent_gemma",
        Grid(tp=2, pp=2),
        FULL | {"pipeline_schedule": "shifted"},
        marks=pytest.mark.slow,
    ),
    ("bert", Grid(pp=3), {"pipeline_schedule": "auto"}),
    ("gpt2", Grid(tp=2, pp=1, dp=2), {"tp_comm_overlap": "pair"} | ZERO["optim"]),
    pytest.param(
        "t5", Grid(pp=2, dp=2), ZERO["optim_grads_params"] | SPLIT, marks=pytest.mark.slow
    ),
    pytest.param("mixtral", Grid(tp=2, dp=2), ZERO["optim_grads_params"], marks=pytest.mark.slow),
    pytest.param(
        "gpt2", Grid(pp=2, dp=2), ZERO["optim"] | {"ddp_bucket_size": 3000}, marks=pytest.mark.slow
    ),
    pytest.param("gpt2", Grid(pp=2, dp=2), FULL | ZERO["optim_grads"], marks=pytest.mark.slow),
    pytest.param(
        "llama", Grid(tp=2, pp=2, dp=2), ZERO["optim_grads_params"], marks=pytest.mark.slow
    ),
    later("llama", Grid(dp=4), TWO | ZERO["optim_grads_params"]),
    later("gpt2", Grid(dp=4), TWO | ZERO["optim"] | {"ddp_bucket_size": 3000}),
    pytest.param("gpt2", Grid(tp=2, dp=4), TWO | ZERO["optim_grads"], marks=pytest.mark.slow),
    pytest.param(
        "t5", Grid(pp=2, dp=4), TWO | ZERO["optim_grads_params"] | SPLIT, marks=pytest.mark.slow
    ),
    pytest.param(
        "mixtral", Grid(tp=2, dp=4), TWO | ZERO["optim_grads_params"], marks=pytest.mark.slow
    ),
    pytest.param("t5", Grid(dp=4), TWO | ZERO["optim"], marks=pytest.mark.slow),
    (
        "gpt2",
        Grid(pp=2),
        {"pipeline_schedule": "early-recompute"}
        | FULL
        | {"recompute_method": "block", "recompute_num_layers": 1},
    ),
    later("llama", Grid(tp=2, pp=2), PARTS | FULL),
    ("gpt2", Grid(tp=2, dp=2), PARTS | ZERO["optim_grads_params"]),
    later("mixtral", Grid(tp=2, pp=2), PARTS | SPLIT),
    later("t5", Grid(tp=2, pp=2), PARTS | {"pipeline_schedule": "interleaved"}),
    pytest.param(
        "gemma2",
        Grid(tp=2, pp=2),
        PARTS | {"tp_comm_overlap": "pair"} | FULL,
        marks=pytest.mark.slow,
    ),
    pytest.param("qwen3", Grid(tp=2, dp=2), PARTS | ZERO["optim"], marks=pytest.mark.slow),
    pytest.param("bert", Grid(tp=4), PARTS | {"tp_comm_overlap": "none"}, marks=pytest.mark.slow),
    pytest.param(
        "llama", Grid(tp=2, pp=2, dp=2), PARTS | ZERO["optim_grads"] | FULL, marks=pytest.mark.slow
    ),
]


def told(value):
    return (
        "-".join(map(str, value.values()))
        if isinstance(value, dict)
        else value
        if isinstance(value, str)
        else None
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "grid", "ways"), CASES, ids=told)
def test_a_layout_computes_what_the_model_computes(name, grid, ways):
    loss, grads, curve = eager(name)
    ranks = run_ranks(_train, grid.size, name, grid, ways, {}, timeout=200)
    # A key bias has no gradient but rounding: below this scale a difference is compared with the
    # model's largest one.
    floor = 1e-4 * max(grad.abs().max().item() for grad in grads.values())
    seen = set()
    for found, shards, steps, _ in ranks:
        assert found == pytest.approx(loss, abs=1e-5)
        assert steps == pytest.approx(curve, abs=1e-5)
        for shard in shards:
            expected = part(grads.get(shard.name, torch.zeros(shard.shape)), shard)
            scale = grads[shard.name].abs().max().item() if shard.name in grads else 0.0
            assert (shard.tensor - expected).abs().max() <= 1e-4 * max(scale, floor), shard.name
            seen.add(shard.name)
    assert seen >= set(grads)


@pytest.mark.long
def test_dropout_draws_the_same_masks_on_every_pipeline_layout_and_again_in_recomputation():
    options = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    ((loss, grads, curve, _),) = run_ranks(_train, 1, "gpt2", Grid(), {}, options)
    whole = {shard.name: shard.tensor for shard in grads}
    plain = run_ranks(_train, 1, "gpt2", Grid(), {}, {})[0]
    assert plain[0] != loss and len(set(curve)) == STEPS
    early = FULL | {"pipeline_schedule": "shifted"}
    for grid, ways in ((Grid(), FULL), (Grid(pp=2), {}), (Grid(pp=2), early), (Grid(dp=2), FULL)):
        for found, shards, _, _ in run_ranks(_train, grid.size, "gpt2", grid, ways, options):
            assert found == pytest.approx(loss, abs=1e-6)
            for shard in shards:
                torch.testing.assert_close(shard.tensor, whole[shard.name], rtol=1e-4, atol=1e-6)


def _halves(rank, world_size, name, grid, ways):
    """Micro-batches of three samples with unequal numbers of targets; losses are shares of the
    step's.
    """
    torch.set_num_threads(1)
    real, _, _ = tiny(name)
    model = randomise(real())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (4, 3, 12), generator=generator)
    batches = [{"input_ids": rows, "labels": rows.clone()} for rows in ids]
    for number, batch in enumerate(batches):
        batch["labels"][0, : 2 + number] = -100
        batch["labels"][2, 5:] = -100
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches).float()
    batches = [batch | {"num_items_in_batch": count} for batch in batches]
    if grid is None:
        losses, every = zip(*(gradients(model, batch) for batch in batches), strict=True)
        return sum(losses).item(), {key: sum(found[key] for found in every) for key in every[0]}
    trainer = trainer_of(model, batches[0], grid, rank, len(batches), ways)
    loss = trainer.gradients(batches)
    made = [len(programs._programs) for programs in trainer.programs.values()]
    return loss, parts_of(trainer, trainer.buffer.main_grad), made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "schedule", "parts"),
    [("llama", "1f1b", False), ("mixtral", "zb-h1", False), ("llama", "1f1b", True)],
)
@pytest.mark.long
def test_halves_of_a_micro_batch_compute_what_the_whole_computes(name, schedule, parts):
    loss, grads = _halves(0, 1, name, None, {})
    ways = FULL | {
        "tp_comm_overlap": "sub-pipeline",
        "pipeline_schedule": schedule,
        "sequence_parallel": parts,
    }
    for found, shards, made in run_ranks(_halves, 4, name, Grid(tp=2, pp=2), ways, timeout=200):
        assert found == pytest.approx(loss, abs=1e-5)
        assert made == [3], (
            "one program for two samples, one for one, and the whole that they were compared with"
        )
        for shard in shards:
            expected = part(grads[shard.name], shard)
            limit = 1e-4 * max(grads[shard.name].abs().max().item(), 1e-4)
            assert (shard.tensor - expected).abs().max() <= limit, shard.name


def _resume(rank, world_size, grid, directory):
    torch.set_num_threads(1)
    real, empty, batch = tiny("llama")
    batches = micro_batches("llama")
    if directory[0] is not None:
        first = trainer_of(randomise(real()), batch, grid, rank, len(batches))
        mine = batches[first.mesh.dp_rank :: grid.dp]
        step(first, mine, RATE, DECAY)
        first.save(directory[0], {"epoch": 0.5})
        return [step(first, mine, RATE, DECAY).loss for _ in range(2)]
    second = trainer_of(empty(), batch, grid, rank, len(batches))
    extra = second.load(directory[1])
    assert extra == {"epoch": 0.5} and second.iteration == 1
    mine = batches[second.mesh.dp_rank :: grid.dp]
    return [step(second, mine, RATE, DECAY).loss for _ in range(2)]


def test_training_goes_on_in_another_layout(tmp_path):
    """The second run starts from an empty model: all of its weights are the checkpoint's."""
    (curve,) = run_ranks(_resume, 1, Grid(), (str(tmp_path), None))
    for found in run_ranks(_resume, 4, Grid(tp=2, pp=2), (None, str(tmp_path))):
        assert found == pytest.approx(curve, abs=1e-5)


def _initial(rank, world_size, grid):
    _, empty, batch = tiny("llama")
    return parts_of(trainer_of(empty(), batch, grid, rank, 4, seed=7))


def test_initial_weights_do_not_depend_on_the_layout():
    (one,) = run_ranks(_initial, 1, Grid())
    whole = {shard.name: shard.tensor for shard in one}
    assert whole["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    for shards in run_ranks(_initial, 4, Grid(tp=2, pp=2)):
        for shard in shards:
            assert torch.equal(shard.tensor, part(whole[shard.name], shard)), shard.name


def test_a_weight_that_does_not_divide_is_told():
    _, empty, batch = tiny("llama")
    traced = Traced(empty(), batch)
    assert blueprint_of(traced, Grid()).replicated_weights() == ()
    told = blueprint_of(traced, Grid(tp=3)).replicated_weights()
    reason = "its 32 output features are not divisible by 3"
    assert told[0] == f"model.layers.*.self_attn.q_proj.weight is replicated: {reason}."
    assert len(told) == 4  # q, k, v, o: the feed-forward width is padded


def test_what_an_evaluation_handed_out_is_not_held():
    real, _, batch = tiny("llama")
    trainer = trainer_of(randomise(real()), batch, Grid(), 0, 1)
    (found,) = trainer.evaluate([batch], ("loss", "logits"))
    logits = weakref.ref(found.pop("logits"))
    assert logits() is None


def test_a_mask_that_masks_nothing_is_left_out():
    """Collators always send one; a micro-batch whose mask masks something runs a program of its
    own.
    """
    real, _, batch = tiny("llama")
    model = randomise(real())
    whole = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    short = {name: value.clone() for name, value in whole.items()}
    short["attention_mask"][1, 10:], short["labels"][1, 10:] = 0, -100
    trainer = trainer_of(model, whole, Grid(), 0, 2)
    loss = trainer.gradients([whole, short])
    assert (
        trainer.blueprint.fused["causal attention"] == 2
        and trainer.blueprint.fused["attention"] == 2
    )
    (first, grads), (second, more) = gradients(model, whole), gradients(model, short)
    assert loss == pytest.approx((first + second).item() / 2, abs=1e-6)
    for shard in trainer.shards(trainer.buffer.main_grad):
        torch.testing.assert_close(
            shard.tensor, (grads[shard.name] + more[shard.name]) / 2, rtol=1e-4, atol=1e-6
        )


def test_a_mask_that_the_model_would_else_make_from_the_ids_stays():
    """It would take the padding id for padding, wherever it stands."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 4)

        def forward(self, input_ids, attention_mask=None):
            mask = (input_ids != 0) if attention_mask is None else attention_mask
            return (self.table(input_ids) * mask.unsqueeze(-1)).square().sum()

    ids = torch.tensor([[1, 0, 3]])
    for batch in ({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"input_ids": ids}):
        model = randomise(Own())
        found = trainer_of(model, batch, Grid(), 0, 1).gradients([batch])
        assert found == pytest.approx(model(**batch).item(), rel=1e-6)
