"""Lengths that are made from two captured ones: bit for bit a fresh capture's, and captured where
it would differ.
"""

from unittest import mock

import pytest
import torch
import transformers as hf

from megatron_merak.graph.lowering.lengths import any_length
from megatron_merak.graph.sharding.local import room_for
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.runtime import engine as runtime
from megatron_merak.segment import Collective
from megatron_merak.stages.blueprint import ProgramRole
from tests.captured_once import Captures
from tests.engines import engine_of
from tests.four_bit import adapted, four_bit, needs_bitsandbytes, save_llama
from tests.ranks import run_ranks

SMALL = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
BERT = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 64}
MAMBA2 = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "chunk_size": 8,
}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "gpt2, dropout": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=24)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4)),
    "chunks": lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**MAMBA2, state_size=4, n_groups=1)),
}


def batch(length, packed=False, rows=2, mask=False):
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 64, (1 if packed else rows, length), generator=draw)
    made = {
        "input_ids": ids,
        "labels": ids.clone(),
        "num_items_in_batch": torch.tensor(float(ids.numel())),
    }
    if mask:
        made["attention_mask"] = (
            torch.arange(length) < torch.tensor([[length], [length - 3]])
        ).long()
    if packed:
        made["position_ids"] = torch.cat([torch.arange(length - 5), torch.arange(5)]).unsqueeze(0)
    return made


def mesh_of_one():
    return build_mesh(Grid(1, 1, 1), 0, torch.device("cpu"))


def built(name, example, mesh, fresh=False, **wishes):
    torch.manual_seed(0)
    engine = engine_of(MODELS[name](), example, mesh, **wishes)
    if fresh:
        engine.blueprint.lengths.parts = lambda *given: None
    return engine


def step(engine, *batches):
    """Loss and gradient, and the loss of an evaluation."""
    loss = engine.backward(batches)[0].item()
    told = engine.evaluate(batches)
    return loss, engine.buffer.main_grad.clone(), [float(each["loss"]) for each in told or ()]


def same(ours, theirs):
    assert ours[0] == theirs[0] and ours[2] == theirs[2]
    assert torch.equal(ours[1], theirs[1])


def engines(rank, world, name, lengths, options, wishes):
    """For how many lengths of training and evaluation nothing was captured, while all are what
    fresh captures give. What both engines capture is captured once.
    """
    mesh = (
        mesh_of_one() if world == 1 else build_mesh(wishes.pop("grid"), rank, torch.device("cpu"))
    )
    batches = [batch(length, **options) for length in lengths]
    with Captures().shared():
        quick = built(name, batches[0], mesh, **dict(wishes))
        fresh = built(name, batches[0], mesh, fresh=True, **dict(wishes))
        for each in batches:
            same(step(quick, each, each), step(fresh, each, each))
    assert fresh.blueprint.lengths.derived == 0
    return quick.blueprint.lengths.derived


def of_one(name, lengths, **options):
    return engines(0, 1, name, lengths, options, {})


SLOW = pytest.mark.slow
CASES = [
    ("llama", {"packed": True}),
    pytest.param("bert", {"mask": True}, marks=SLOW),
    pytest.param("gpt2, dropout", {}, marks=SLOW),
    pytest.param("llama", {"mask": True}, marks=SLOW),
    pytest.param("t5", {}, marks=SLOW),
    pytest.param("mixtral", {}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_length_after_two_is_made_bit_for_bit(name, options):
    """Both longer ones and ones between and below, in training and evaluation."""
    assert of_one(name, (20, 28, 41, 13), **options) == 2 * 2


@pytest.mark.long
def test_a_length_that_the_model_treats_otherwise_is_captured():
    """A window of 24 hides something of rows of 24 or more only."""
    assert of_one("window", (30, 36, 24, 23)) == 2


@needs_bitsandbytes
def test_weights_in_4_bits_are_read_at_lengths_that_are_made(tmp_path, monkeypatch):
    """How they are stored is a named tuple in the code."""
    base = save_llama(tmp_path, num_hidden_layers=1)
    monkeypatch.setitem(MODELS, "four bits", lambda: adapted(four_bit(base)))
    assert of_one("four bits", (20, 28, 41)) == 2


@SLOW
def test_lengths_that_are_padded_to_chunks_are_captured():
    assert of_one("chunks", (16, 24, 32, 20)) == 0


@SLOW
def test_rows_are_a_length_too():
    mesh = mesh_of_one()
    quick, fresh = (built("llama", batch(16), mesh, fresh) for fresh in (False, True))
    for rows in (2, 5, 3, 1, 7):
        same(step(quick, batch(16, rows=rows)), step(fresh, batch(16, rows=rows)))
    assert quick.blueprint.lengths.derived == 4  # not of one row, which broadcasts


@pytest.mark.slow
def test_ranks_make_their_own_parts():
    for grid in (Grid(tp=2), Grid(pp=2)):
        assert run_ranks(engines, 2, "llama", (20, 28, 41), {}, {"grid": grid}, timeout=200) == [
            2,
            2,
        ]


@pytest.mark.long
def test_lengths_that_ranks_share_alike_are_derived_from_each_other():
    """Two ranks cannot share odd ones, and compute these in full."""
    lengths = (20, 41, 28, 53, 36, 25)  # the last two are derived
    wishes = {"grid": Grid(tp=2, pp=2), "sequence_parallel": True}
    assert run_ranks(engines, 4, "llama", lengths, {}, wishes, timeout=200) == [2 * 2] * 4


@pytest.mark.long
def test_lengths_that_ranks_cut_from_both_ends_are_derived_from_each_other():
    """22 is cut in order, since two ranks have no four chunks of it."""
    lengths = (20, 28, 22, 36)  # the last one is derived
    wishes = {"grid": Grid(cp=2), "cp_comm_type": "all_gather"}
    assert run_ranks(engines, 2, "llama", lengths, {}, wishes, timeout=200) == [2] * 2


EXPERTS = {"expert_model_parallel_size": 2}
FACTOR = "moe_expert_rank_capacity_factor"


def mixture_of_replicas(rank, length, **wishes):
    mesh = build_mesh(Grid(dp=2), rank, torch.device("cpu"), expert_group=2)
    return built("mixtral", batch(length), mesh, **EXPERTS, **wishes)


def rooms(rank, world, lengths, factor):
    """How many lengths were derived, and the numbers of rows that are sent to a rank."""
    model = mixture_of_replicas(rank, lengths[0], **{FACTOR: factor})
    found = {}
    launch = runtime.launch

    def noted(tensor, kind, *args):
        if kind is Collective.EXCHANGE and tensor.is_floating_point():
            found[tensor.shape[1]] = None
        return launch(tensor, kind, *args)

    with mock.patch.object(runtime, "launch", noted):
        for length in lengths:
            model.backward([batch(length)])
    return model.blueprint.lengths.derived, list(found)


def test_room_for_rows_of_a_length_that_is_made_is_that_of_a_capture():
    """Room for 43.2 and 46.8 rows is rounded up, and so not affine in the length."""
    lengths, factor = (12, 13, 30), 1.8
    rooms_of_captures = [room_for(2 * 2 * length, 2, factor) for length in lengths]
    assert rooms_of_captures == [44, 47, 108]
    assert run_ranks(rooms, 2, lengths, factor) == [(1, rooms_of_captures)] * 2


def replicas(rank, world, ways):
    """What each of several steps gives, and an evaluation of a batch that one replica has; and in
    which steps all rows had room, and behind the evaluation.
    """
    found = []
    for way in ways:
        model = mixture_of_replicas(rank, 12, **way)
        steps = []
        padded = []
        for lengths in ((12, 12), (12, 16), (16, 12), (16, 16)):
            loss = model.backward([batch(lengths[rank])])[0].item()
            steps.append((loss, model.buffer.main_grad.clone()))
            padded.append(model.programs[0].padded)
        told = model.evaluate([] if rank else [batch(16)])
        padded.append(model.programs[0].padded)
        found.append((steps, [float(each["loss"]) for each in told or ()], padded))
    return found


def test_replicas_with_batches_of_other_lengths_exchange_rows_as_they_come():
    for ragged, padded in run_ranks(replicas, 2, [{}, {FACTOR: 2.0}], timeout=120):
        for ours, theirs in zip(padded[0], ragged[0], strict=True):
            assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
        assert padded[1] == ragged[1]
        assert padded[2] == [True, False, False, True, True]


def parts_of(name, length):
    made = built(name, batch(length), mesh_of_one())
    return made.blueprint.parts(
        made.blueprint.traced.prepared(batch(length)), ProgramRole(True, ("loss",)), 0, made.mesh
    )[0]


def test_parts_of_other_work_are_not_taken_for_lengths():
    llama = parts_of("llama", 20)
    assert any_length(llama, 20, parts_of("llama", 28), 28) is not None
    assert any_length(llama, 20, parts_of("window", 28), 28) is None
    assert any_length(parts_of("window", 20), 20, parts_of("window", 28), 28) is None
    # numbers that 7 does not divide
    assert any_length(llama, 20, parts_of("llama", 28), 27) is None
