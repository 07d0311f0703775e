"""The engine: the numbers of one autograd graph, collectives at their places, nothing left
behind.
"""

import functools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_merak import ops
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid
from megatron_merak.planner import plan
from megatron_merak.runtime.engine import Interpreter, State
from megatron_merak.runtime.weights import Gradient, WeightGradients
from megatron_merak.segment import Collective, Common, In, Out, Segment
from megatron_merak.stages.gpt_model import GPTModel
from megatron_merak.tensor_parallel import derive_seed
from tests.engines import gpt_model
from tests.models.families import FAMILIES, batch
from tests.oplog import OpLog
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@functools.cache
def built(model: ModelConfig, tp: int, rank: int, along: bool) -> GPTModel:
    """One stage with random weights, different ones of each rank where they are sharded.

    along: whether ranks divide sequences.
    """
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=along)
    train = TrainConfig(micro_batch_size=2, global_batch_size=2)
    config = Config(model=model, parallel=parallel, train=train)
    result = gpt_model(config, plan(config, tp), Mesh(Grid(tp=tp), rank, CPU))
    tensors = result.blueprint.sharding.tensors
    with torch.no_grad():
        for number, (name, parameter) in enumerate(result.parameter_shards.parameters.items()):
            own = rank if tensors[name].dim is not None else 0
            generator = torch.Generator().manual_seed(tp * number + own)
            parameter.normal_(0.0, 0.2, generator=generator)
    return result


class Machine:
    """An engine over the whole chain of a family, and the seeds that a stage would give."""

    def __init__(self, config, recompute=(), group=None, rank=0, sequence_parallel=False):
        self.rank = rank
        self.tp = 1 if group is None else group.size()
        model = built(config, self.tp, rank, sequence_parallel)
        (programs,) = model.programs.values()
        (self.batch,) = model.from_samples([batch()])
        self.program = programs(self.batch, True)
        self.segments = self.program.segments
        self.names = {p: name for name, p in model.parameter_shards.parameters.items()}
        self.sink = model.parameters.weights
        for grad in self.sink.grads.values():
            grad.total.zero_()
        self.engine = Interpreter(
            self.segments,
            [(unit,) for unit in recompute],
            self.program.outputs,
            group,
            weights=self.sink,
            device=CPU,
        )

    def seed(self, segment):
        shard = segment.random_shard(self.rank, 0, self.tp)
        torch.default_generator.manual_seed(derive_seed(11, segment.unit, segment.index, shard))

    def start(self, training=True):
        return State(Common(self.program.prelude(self.batch), self.seed), training)

    def forward(self, state):
        self.engine.forward(state)
        return state.values.pop("loss")

    def step(self):
        """The loss, and the gradients by name."""
        state = self.start()
        loss = self.forward(state)
        state.add_grad("loss", torch.ones(()))
        self.engine.backward(state)
        assert state.values == {} and state.works == {} and state.leftovers() == []
        return loss, {self.names[p]: grad.total.clone() for p, grad in self.sink.grads.items()}


def with_dropout(name):
    return replace(FAMILIES[name], hidden_dropout=0.2, attention_dropout=0.1)


def recompute_choices(config):
    layers = range(1, config.num_layers + 1)
    return [tuple(layers), (2,), (0, *layers, config.num_layers + 1)]


def recompute_equals_tape(rank, world_size):
    """Bitwise, with dropout on, for every choice of units. Returns what ranks have in common."""
    group = dist.group.WORLD if world_size > 1 else None
    common = {}
    for name in FAMILIES:
        config = with_dropout(name)
        loss, grads = Machine(config, (), group, rank).step()
        for units in recompute_choices(config):
            again, grads_again = Machine(config, units, group, rank).step()
            assert torch.equal(loss, again), (name, units)
            for key, grad in grads.items():
                assert grad.any() and torch.equal(grad, grads_again[key]), (name, units, key)
        norm = "transformer.ln_f.weight" if name == "gpt2" else "model.norm.weight"
        common[name] = (loss.item(), grads[norm].tolist())
    return common


def test_recomputation_changes_no_bit_with_dropout_and_launches_come_first():
    recompute_equals_tape(0, 1)
    first, second = run_ranks(tensor_parallel_checks, 2, timeout=240)
    assert first == second, "replicated regions drew different masks"


def tensor_parallel_checks(rank, world_size):
    order_of_operations(rank)
    evaluation_sends_only_forward(rank)
    return recompute_equals_tape(rank, world_size)


def order_of_operations(rank):
    """One layer's backward: a sum is launched before the weight gradients of the segment that made
    it.
    """
    machine = Machine(replace(FAMILIES["llama"], num_layers=1), (), dist.group.WORLD, rank)
    state = machine.start()
    machine.forward(state)
    state.add_grad("loss", torch.ones(()))
    with OpLog() as log:
        machine.engine.backward(state)
    # gradients of inputs, launch, gradients of weights. Gate and up have one gradient of their
    # input, and so have query, key and value.
    feed = ["mm", "mm", "allreduce_", *["addmm_"] * 3]
    attention = ["mm", "mm", "allreduce_", *["addmm_"] * 4]
    head = ["mm", "allreduce_", "addmm_"]
    assert log.names == [*head, *feed, *attention, "add_rows_"], log.names


def evaluation_sends_only_forward(rank):
    machine = Machine(FAMILIES["llama"], (1, 2), dist.group.WORLD, rank)
    with OpLog() as log:
        state = machine.start(training=False)
        machine.forward(state)
    # the last: statistics of the loss
    assert log.collectives == [*["allreduce_"] * 5, "_allgather_base_"]
    assert state.tape == {} and state.leftovers() == []


def test_two_microbatches_in_flight_do_not_mix():
    machine = Machine(with_dropout("gpt2"), (1,))
    loss, single = machine.step()
    states = [machine.start() for _ in range(2)]
    losses = [machine.forward(state) for state in states]
    for state in reversed(states):
        state.add_grad("loss", torch.ones(()))
        machine.engine.backward(state)
    assert all(torch.equal(other, loss) for other in losses)
    for parameter, grad in machine.sink.grads.items():
        one = single[machine.names[parameter]]
        torch.testing.assert_close(grad.total, 3 * one, rtol=1e-5, atol=1e-6)


def test_done_reports_each_segment_after_its_gradients():
    machine = Machine(FAMILIES["gpt2"], (1,))
    seen = []
    state = machine.start()
    machine.forward(state)
    state.add_grad("loss", torch.full((), 2.0))

    def done(segment):
        assert all(machine.sink.grads[p].total.count_nonzero() > 0 for p in segment.parameters)
        seen.append(segment)

    machine.engine.backward(state, done)
    assert seen == list(reversed(machine.segments))


def tracked_add(alive):
    """x + 1 that saves nothing for its backward and whose memory is in ``alive`` exactly while it
    is allocated.
    """

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            array = x.detach().numpy() + 1  # the tensor's storage owns the array
            alive.append(weakref.ref(array))
            return torch.from_numpy(array)

        @staticmethod
        def backward(ctx, grad):
            return grad

    return lambda common, x: (Add.apply(x),)


def residual_chain(alive, length):
    """One unit per addition, and a last one that multiplies by a weight."""
    weight = torch.nn.Parameter(torch.tensor(3.0))
    fn = tracked_add(alive)
    segments = [Segment(i, 0, fn, (In(f"h{i}"),), (Out(f"h{i + 1}"),)) for i in range(length)]
    last = Segment(
        length,
        0,
        lambda common, x: ((x * weight).sum(),),
        (In(f"h{length}"),),
        (Out("loss"),),
        parameters=(weight,),
    )
    return [*segments, last], weight


@pytest.mark.parametrize(
    ("recompute", "kept"), [((), []), ((2,), [1]), ((1, 2, 3), [0, 1, 2]), (range(7), range(5))]
)
def test_tapes_keep_no_value_that_no_backward_reads(recompute, kept):
    """After the forward only the weight's operand h6 lives, and the inputs of units that
    recompute.
    """
    alive = []
    segments, weight = residual_chain(alive, 6)
    sink = WeightGradients({weight: Gradient(torch.zeros(()))})
    engine, state = (
        Interpreter(
            segments, [(unit,) for unit in recompute], ("loss",), None, weights=sink, device=CPU
        ),
        State(Common({}), training=True),
    )
    state.values["h0"] = torch.zeros(4)
    engine.forward(state)
    assert state.values.pop("loss").item() == 3 * 4 * 6
    state.add_grad("loss", torch.ones(()))
    assert [i for i, ref in enumerate(alive) if ref() is not None] == [*kept, 5]
    engine.backward(state)
    assert state.take_grad("h0").tolist() == [3.0] * 4 and sink.grads[weight].total.item() == 4 * 6
    assert not [ref for ref in alive if ref() is not None] and state.values == {}


def saved_bytes(run, known):
    """Bytes of all storages that autograd keeps for a backward of ``run()``, without those of
    ``known``.
    """
    known, saved = {t.untyped_storage().data_ptr() for t in known}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    assert alive is not None
    return sum(storage.nbytes() for address, storage in saved.items() if address not in known)


@pytest.mark.parametrize("name", FAMILIES)
def test_tapes_keep_what_one_autograd_graph_keeps(name):
    machine = Machine(with_dropout(name))
    known = [*machine.sink.grads, *machine.batch.values()]

    def plain():
        values = {}
        for segment in machine.segments:
            made = segment.fn(common, *(values[i.value] for i in segment.ins))
            values.update(zip((o.value for o in segment.outs), made, strict=True))
        return values["loss"]

    state = machine.start()
    common, known = state.common, [*known, *state.common.values()]
    assert saved_bytes(lambda: machine.forward(state), known) == saved_bytes(plain, known)


def run_edges(rank, segments, values, grads, sink=None):
    """Forward and backward of segments; ``grads`` are given for the outputs. Returns outputs and
    input gradients.
    """
    outputs = set(grads)
    engine = Interpreter(
        segments, (), outputs, dist.group.WORLD, weights=sink or WeightGradients({}), device=CPU
    )
    state = State(Common({}), training=True)
    state.values |= values
    engine.forward(state)
    results = {name: state.value(name).tolist() for name in grads}
    for name, grad in grads.items():
        state.add_grad(name, grad)
    engine.backward(state)
    return results, {name: state.take_grad(name).tolist() for name in values}


def edges(rank, world_size):
    """Ranks 0 and 1 hold x = [1, 2] and [10, 20]."""
    x, one = torch.tensor([1.0, 2.0]) * (10 if rank else 1), torch.tensor([1.0, 1.0])
    given = one * (rank + 1)
    results = {}

    def run(name, segments, values, grads):
        results[name] = run_edges(rank, segments, values, grads)

    def seg(index, fn, ins, outs):
        return Segment(0, index, fn, ins, outs, sharded=True)

    run(
        "sum",
        [
            seg(0, lambda c, x: (2 * x,), (In("x"),), (Out("y", Collective.ALL_REDUCE, True),)),
            seg(1, lambda c, y: (y * y,), (In("y"),), (Out("z"),)),
        ],
        {"x": x},
        {"z": one},
    )
    run(
        "stack",
        [
            seg(0, lambda c, x: (3 * x,), (In("x"),), (Out("y", Collective.STACK),)),
            seg(1, lambda c, y: (y[0] + y[1] * y[1],), (In("y"),), (Out("z"),)),
        ],
        {"x": x},
        {"z": one},
    )
    # A square root keeps its result for its backward: a reduction in place would spoil it.
    run(
        "kept",
        [seg(0, lambda c, x: (x.sqrt(),), (In("x"),), (Out("y", Collective.ALL_REDUCE),))],
        {"x": 4 * one},
        {"y": one},
    )
    run(
        "partial",
        [seg(0, lambda c, x: (3 * x,), (In("x", Collective.ALL_REDUCE),), (Out("y"),))],
        {"x": x},
        {"y": given},
    )
    # One gradient tensor for both inputs and the output: reduced in place it would be summed
    # thrice.
    run(
        "alias",
        [
            seg(
                0,
                lambda c, x, y: (x + y,),
                (In("x", Collective.ALL_REDUCE), In("y", Collective.ALL_REDUCE)),
                (Out("z"),),
            )
        ],
        {"x": x, "y": x},
        {"z": given},
    )
    # Parts of one gradient, which the caller holds too.
    run(
        "views",
        [
            seg(
                0,
                lambda c, x, y: (torch.cat((x, y)),),
                (In("x", Collective.ALL_REDUCE), In("y", Collective.ALL_REDUCE)),
                (Out("z"),),
            )
        ],
        {"x": x[:1], "y": x[1:]},
        {"z": given},
    )
    # The gradient of x is the one that a queued weight gradient still has to read.
    weight, y = torch.nn.Parameter(torch.ones(2, 2)), torch.tensor([[3.0, 4.0]])
    sink = WeightGradients({weight: Gradient(torch.zeros(2, 2))})
    fused = Segment(
        0,
        0,
        lambda c, x, y: (2 * (ops.linear(y, weight, None, sink) + x),),
        (In("x", Collective.ALL_REDUCE), In("y")),
        (Out("z"),),
        (weight,),
        sharded=True,
    )
    results["queued"] = run_edges(
        rank, [fused], {"x": x.view(1, 2), "y": y}, {"z": given.view(1, 2)}, sink
    )
    results["weight"] = sink.grads[weight].total.tolist()
    run(
        "readers",
        [
            seg(0, lambda c, x: (2 * x,), (In("x", Collective.ALL_REDUCE),), (Out("y"),)),
            seg(1, lambda c, x: (3 * x,), (In("x", Collective.ALL_REDUCE),), (Out("z"),)),
            seg(2, lambda c, x: (5 * x,), (In("x"),), (Out("w"),)),
        ],
        {"x": x},
        {"y": given, "z": given, "w": one},
    )
    assert torch.equal(one, torch.ones(2)) and torch.equal(given, one * (rank + 1)), (
        "a given gradient was written to"
    )
    return results


def test_edges_by_hand():
    first, second = run_ranks(edges, 2)
    for rank, results in enumerate((first, second)):
        assert results["sum"] == ({"z": [22.0**2, 44.0**2]}, {"x": [4 * 22.0, 4 * 44.0]})
        own = [10.0, 20.0] if rank else [1.0, 2.0]
        slope = [3 * 2 * 30.0, 3 * 2 * 60.0] if rank else [3.0, 3.0]
        assert results["stack"] == ({"z": [3.0 + 900, 6.0 + 3600]}, {"x": slope})
        assert results["kept"] == ({"y": [4.0, 4.0]}, {"x": [0.25, 0.25]})
        assert results["partial"] == ({"y": [3 * own[0], 3 * own[1]]}, {"x": [9.0, 9.0]})
        assert results["alias"] == (
            {"z": [2 * own[0], 2 * own[1]]},
            {"x": [3.0, 3.0], "y": [3.0, 3.0]},
        )
        assert results["views"][1] == {"x": [3.0], "y": [3.0]}
        assert results["queued"][1]["x"] == [[6.0, 6.0]]
        assert results["weight"] == [[2 * (rank + 1) * 3.0, 2 * (rank + 1) * 4.0]] * 2
        assert results["readers"][1] == {"x": [2 * 3 + 3 * 3 + 5.0] * 2}


def test_a_value_that_leads_nowhere_has_no_gradient():
    """A segment none of whose results was used is skipped, and its inputs get nothing."""
    segments = [
        Segment(0, 0, lambda c, x: (2 * x,), (In("x"),), (Out("y"),)),
        Segment(1, 0, lambda c, x: (3 * x,), (In("x"),), (Out("z"),)),
    ]
    engine, state = (
        Interpreter(segments, (), ("y", "z"), None, weights=WeightGradients({}), device=CPU),
        State(Common({}), training=True),
    )
    state.values["x"] = torch.ones(2)
    engine.forward(state)
    state.add_grad("y", torch.ones(2))
    engine.backward(state)
    assert state.take_grad("x").tolist() == [2.0, 2.0] and state.leftovers() == []


def test_leftovers_name_what_was_forgotten():
    machine = Machine(FAMILIES["gpt2"])
    state = machine.start()
    machine.forward(state)
    state.add_grad("loss", torch.ones(()))
    assert state.leftovers() == ["loss", *(f"tape of unit {unit}" for unit in range(4))]


def test_recomputation_of_all_leaves_no_value():
    """Nothing is kept for a unit that reads only what the batch gives, but values pass between its
    segments.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    segments = [
        Segment(0, 0, lambda c: (2 * weight,), (), (Out("x"),), (weight,)),
        Segment(0, 1, lambda c, x: (3 * x,), (In("x"),), (Out("y"),)),
        Segment(0, 2, lambda c, x, y: (x * y,), (In("x"), In("y")), (Out("z"),)),
    ]
    sink = WeightGradients({weight: Gradient(torch.zeros(2))})
    engine, state = (
        Interpreter(segments, [(0,)], ("z",), None, weights=sink, device=CPU),
        State(Common({}), training=True),
    )
    engine.forward(state)
    engine.take(state, "z")
    state.add_grad("z", torch.ones(2))
    engine.backward(state)
    assert state.values == {} and sink.grads[weight].total.tolist() == [24.0, 24.0]
