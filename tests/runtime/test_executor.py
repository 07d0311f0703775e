"""The executor: one step over stages and replicas equals one autograd graph over the
global batch.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from megatron_merak.config import Config, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import Kind, Schedule
from megatron_merak.pipeline_parallel.passes import add_communication, forward_only
from megatron_merak.planner import plan
from megatron_merak.runtime.executor import Executor
from megatron_merak.stages.gpt_model import build_gpt
from megatron_merak.stages.init_captured import Initialiser
from tests.engines import gpt_model
from tests.models.families import FAMILIES, batch, gpt
from tests.ranks import run_ranks

CPU = torch.device("cpu")
MICROBATCHES = 4
SEED = 5


@dataclass(frozen=True)
class Case:
    """A layout over as many ranks as there are, and what else changes how a step runs."""

    name: str
    pp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    recompute: bool = False
    per_token: bool = False
    dropout: float = 0.0


def global_batch():
    """Four micro-batches with 0 to 24 unmasked tokens each."""
    batches = [batch(seed=seed) for seed in range(MICROBATCHES)]
    batches[1]["loss_mask"].zero_()
    batches[2]["loss_mask"][0] = 0
    return batches


class Rank:
    """One rank's model and executor for a case."""

    def __init__(self, case, rank, world_size):
        model = replace(
            FAMILIES[case.name], hidden_dropout=case.dropout, attention_dropout=case.dropout
        )
        parallel = ParallelConfig(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            pipeline_schedule=case.schedule,
            recompute_granularity="full" if case.recompute else None,
        )
        train = TrainConfig(micro_batch_size=2, global_batch_size=2 * MICROBATCHES, seed=SEED)
        config = Config(model=model, parallel=parallel, train=train)
        self.plan = plan(config, world_size)
        self.mesh = build_mesh(self.plan.grid, rank, CPU)
        self.model = gpt_model(config, self.plan, self.mesh)
        self.stages = self.model.stages
        self.per_token = case.per_token
        self.executor = Executor(self.stages, add_communication(self.plan.schedule), self.mesh)
        own = global_batch()[self.mesh.dp_rank :: self.mesh.grid.dp]
        self.batches = self.model.from_samples(own)

    def step(self, number=3):
        """Loss and every gradient that this rank holds, by HuggingFace name and place."""
        self.model.parameters.start_step()
        loss = self.executor.run(self.batches, number, sum_losses=self.per_token)
        self.model.parameters.finish_step()
        assert all(stage.parts == {} for stage in self.model.stages.values())
        shards = self.model.shards(self.model.buffer.main_grad)
        return loss, {(shard.name, shard.intervals): shard.tensor.clone() for shard in shards}

    def evaluate(self):
        before = self.model.buffer.main_grad.clone()
        schedule = add_communication(forward_only(self.plan.schedule))
        loss = Executor(self.stages, schedule, self.mesh).run(self.batches, 0, training=False)
        assert all(stage.parts == {} for stage in self.stages.values())
        assert torch.equal(self.model.buffer.main_grad, before)
        return loss


def single_graph(name, per_token):
    """Sum of losses, tokens, and every gradient of the same weights by plain autograd."""
    empty = build_gpt(FAMILIES[name])
    initialiser = Initialiser(empty)
    drawn = {key: initialiser.draw(key, SEED) for key, _ in empty.named_parameters()}
    model = gpt(name, drawn)
    sums = [model(**model.batch_of(data)) for data in global_batch()]
    tokens = [data["loss_mask"].sum() for data in global_batch()]
    weights = [1.0 if per_token else 1 / count.clamp(min=1) / MICROBATCHES for count in tokens]
    sum(loss * weight for loss, weight in zip(sums, weights, strict=True)).backward()
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    return torch.stack(sums).detach(), torch.stack(tokens), grads


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_equals_one_autograd_graph(name, per_token):
    """Every micro-batch has another number of tokens, one has none."""
    sums, tokens, expected = single_graph(name, per_token)
    loss, grads = Rank(Case(name, per_token=per_token), 0, 1).step()
    torch.testing.assert_close(loss.total, sums.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.mean, (sums / tokens.clamp(min=1)).sum(), rtol=1e-6, atol=0)
    assert loss.tokens == tokens.sum() and tokens.tolist()[1] == 0
    assert {tensor for tensor, _ in grads} == set(expected)
    for (tensor, _), grad in grads.items():
        scale = expected[tensor].abs().max()
        assert (grad - expected[tensor]).abs().max() <= 2e-6 * scale, tensor


def options(case):
    """The same case run in every way that must not change a bit."""
    for schedule in ("gpipe", "1f1b"):
        for recompute in (False, True):
            yield replace(case, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_schedule_and_recomputation_change_no_bit(name):
    (loss, grads), *others = (Rank(case, 0, 1).step() for case in options(Case(name, dropout=0.2)))
    for other, other_grads in others:
        assert torch.equal(loss.total, other.total) and torch.equal(loss.mean, other.mean)
        assert all(torch.equal(grad, other_grads[key]) for key, grad in grads.items())


LIFO = {  # backwards in reverse, on as many ranks
    1: "lifo stages=1 microbatches=4 sums=unordered\nrank 0: 0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0",
    2: """lifo stages=2 microbatches=4 sums=unordered
        rank 0: 0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
        rank 1: 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0""",
}


def reversed_backwards(rank, world_size):
    """A step in this order, and the micro-batches in reverse in the usual one."""
    case = Case("llama", pp=world_size, schedule="gpipe")
    lifo, usual = Rank(case, rank, world_size), Rank(case, rank, world_size)
    schedule = Schedule.parse(LIFO[world_size])
    check(schedule)
    lifo.executor = Executor(lifo.stages, add_communication(schedule), lifo.mesh)
    usual.batches.reverse()
    return lifo.step(), usual.step()


def assert_summed_in_reverse(steps):
    (loss, grads), (other, expected) = steps
    assert grads and all(torch.equal(grad, expected[key]) for key, grad in grads.items())
    if loss is not None:
        torch.testing.assert_close(loss.total, other.total, rtol=1e-6, atol=0)


def test_unordered_sums_have_the_order_of_the_schedule():
    assert_summed_in_reverse(reversed_backwards(0, 1))
    for steps in run_ranks(reversed_backwards, 2):
        assert_summed_in_reverse(steps)


def test_dropout_depends_on_the_step_and_repeats():
    rank = Rank(Case("gpt2", dropout=0.2), 0, 1)
    first, again, later = (rank.step(number)[0].total for number in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, later)


PIPELINES = [Case(name, pp=pp, dropout=0.2) for name in ("gpt2", "llama") for pp in (2, 4)]
OTHERS = [
    Case("gpt2", tp=2, pp=2),
    Case("qwen3", tp=2, pp=2, recompute=True),
    Case("llama", tp=2),
    Case("llama", pp=1),
]


def over_four_ranks(rank, world_size):
    """Every case in one launch; two stages leave two replicas."""
    cases = [*(case for base in PIPELINES for case in options(base)), *OTHERS]
    kept = {PIPELINES[0], PIPELINES[-1], *OTHERS}
    ranks = {}
    results = {}
    for case in cases:
        one = Rank(case, rank, world_size)
        results[case] = one.step()
        if case in kept:
            ranks[case] = one
    traced = ranks[PIPELINES[-1]].executor
    traced.trace = []
    ranks[PIPELINES[-1]].step()
    computed = [str(op) for op in traced.program if op.kind.is_compute]
    evaluated = {case: ranks[case].evaluate() for case in (PIPELINES[0], *OTHERS)}
    return results, traced.trace, computed, evaluated


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(over_four_ranks, 4, timeout=240)


def losses(results, case):
    return [result[case][0] for result in results]


@pytest.mark.parametrize(
    "base", [case for case in PIPELINES if case.pp == 4], ids=lambda case: case.name
)
def test_four_stages_equal_one_process_bitwise(ranks, base):
    """With dropout. The tied table of GPT-2 alone is summed in another order: its two uses are on
    two stages.
    """
    loss, grads = Rank(replace(base, pp=1), 0, 1).step()
    results = [result for result, *_ in ranks]
    for case in options(base):
        *others, last = losses(results, case)
        assert others == [None] * 3
        assert all(
            torch.equal(getattr(last, field), getattr(loss, field))
            for field in ("total", "tokens", "mean")
        )
        held = [result[case][1] for result in results]
        for key, grad in grads.items():
            copies = [part[key] for part in held if key in part]
            assert copies and all(torch.equal(copies[0], copy) for copy in copies)
            if len(copies) > 1:
                assert key[0] == "transformer.wte.weight" and len(copies) == 2
                torch.testing.assert_close(copies[0], grad, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(copies[0], grad), (case, key)


@pytest.mark.parametrize(
    "base", [case for case in PIPELINES if case.pp == 2], ids=lambda case: case.name
)
def test_two_replicas_of_two_stages_equal_one_process(ranks, base):
    """With dropout: a mask depends on the global micro-batch, wherever it runs. Sums over replicas
    are reordered.
    """
    loss, grads = Rank(replace(base, pp=1), 0, 1).step()
    results = [result for result, *_ in ranks]
    for case in options(base):
        parts = [part for part in losses(results, case) if part is not None]
        assert len(parts) == 2
        torch.testing.assert_close(sum(part.total for part in parts), loss.total, rtol=1e-6, atol=0)
        torch.testing.assert_close(sum(part.mean for part in parts), loss.mean, rtol=1e-6, atol=0)
        for result in results:
            for key, grad in result[case][1].items():
                torch.testing.assert_close(
                    grad, grads[key], rtol=1e-5, atol=1e-6 * grads[key].abs().max().item()
                )


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_tensor_parallel_ranks_and_replicas_equal_one_autograd_graph(ranks, case):
    sums, tokens, expected = single_graph(case.name, case.per_token)
    replicas = 4 // (case.tp * case.pp)
    parts = [part for part in losses([result for result, *_ in ranks], case) if part is not None]
    assert len(parts) == replicas * case.tp
    torch.testing.assert_close(
        sum(part.total for part in parts) / case.tp, sums.sum(), rtol=2e-6, atol=0
    )
    seen = set()
    for result, *_ in ranks:
        for (tensor, intervals), grad in result[case][1].items():
            whole = wanted = expected[tensor]
            for dim in range(whole.dim()):
                if grad.shape[dim] != whole.shape[dim]:
                    wanted = torch.cat([whole.narrow(dim, a, b - a) for a, b in intervals], dim)
            assert (grad - wanted).abs().max() <= 5e-6 * whole.abs().max(), tensor
            seen.add(tensor)
    assert seen == set(expected)


def test_evaluation_is_a_forward_without_dropout(ranks):
    sums, tokens, _ = single_graph("gpt2", False)
    *_, evaluated = zip(*ranks, strict=True)
    for case in (PIPELINES[0], OTHERS[0]):
        parts = [result[case] for result in evaluated if result[case] is not None]
        copies = case.tp
        torch.testing.assert_close(
            sum(part.total for part in parts) / copies, sums.sum(), rtol=1e-6, atol=0
        )
        assert sum(part.tokens for part in parts) / copies == tokens.sum()


def test_the_trace_is_the_program_in_order(ranks):
    for _, trace, program, _ in ranks:
        assert [op for op, _, _ in trace] == program
        times = [time for _, began, ended in trace for time in (began, ended)]
        assert times == sorted(times)


def test_last_backward_is_where_gradients_become_final():
    executor = Rank(Case("llama", schedule="gpipe"), 0, 1).executor
    assert [str(op) for op in executor.finals.values()] == [f"0{Kind.B}{MICROBATCHES - 1}"]
