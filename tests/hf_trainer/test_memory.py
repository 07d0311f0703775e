"""What ranks hold under MerakTrainer, counted, beside what its plan says: adapters, Muon, packed
rows.

Between two steps every storage that a tensor has is counted, tables of positions included, against
weights, gradients and optimizer of the plan; while a step runs, what is kept for backwards against
its activations.
"""

import gc
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import is_fake
from transformers import DataCollatorWithFlattening, TrainerCallback

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.pieces import Pieces
from megatron_merak.planner.memory import rank_memory
from megatron_merak.stages.withheld import is_withheld
from tests.measured import MeasuredExecutor
from tests.ranks import run_ranks

LENGTH = 96
RUN = {
    **{
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "max_steps": 2,
    },
    **{
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
    },
}
SHAPE = {
    **{
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "pad_token_id": 0,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH},
}


def llama(kind=hf.LlamaForCausalLM, config=hf.LlamaConfig, **more):
    torch.manual_seed(0)
    return kind(config(**SHAPE | more))


def adapted(base=None, **more):
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets, lora_dropout=0.0)
    return get_peft_model(base or llama(**more), lora)


def samples(lengths):
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 512, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def stacked(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


class Case(NamedTuple):
    model: object
    changes: dict = {}
    packed: bool = False


SIX = {"per_device_train_batch_size": 6}
CASES = {
    "adamw": Case(llama),
    "lora": Case(adapted),
    "lora of tied": Case(lambda: adapted(tie_word_embeddings=True)),
    "lora in bf16": Case(adapted, {"bf16": True}),  # frozen weights in fp32 and in bf16
    "lora of bf16": Case(lambda: adapted().to(torch.bfloat16), {"bf16": True}),
    # peft's adapters are in fp32
    "lora over bf16": Case(lambda: adapted(llama().to(torch.bfloat16)), {"bf16": True}),
    "muon": Case(llama, {"optim": "muon"}),
    "muon of tied": Case(lambda: llama(tie_word_embeddings=True), {"optim": "muon"}),
    "packed": Case(llama, SIX, packed=True),
    "packed in windows": Case(
        lambda: llama(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=16), SIX, packed=True
    ),
}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 zb-h1": {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
        "gradient_accumulation_steps": 4,
    },
    "optim": {"use_distributed_optimizer": True},
    "full": {"fsdp": "full_shard"},
}


class Measure(TrainerCallback):
    """Counts from the second step on what is kept for backwards."""

    def on_step_begin(self, args, state, control, **kwargs):
        engine, count = self.trainer.engine, args.gradient_accumulation_steps
        if state.global_step == 1:
            made = engine.executor(count)
            self.executor = MeasuredExecutor(made.stages, made.schedule, made.mesh, made.pipes)
            engine.executors._executors[count, True] = self.executor


def has_memory(tensor):
    """Whether a tensor has bytes of its own in this process's memory: a wrapper, of this or of an
    earlier test, has none.
    """
    if is_withheld(tensor) or tensor.device.type != "cpu" or is_fake(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def storages():
    """Every storage that a tensor of this process has, by its address, which no other takes while
    it is held here.
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    real = [each for each in tensors if has_memory(each)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in real}


def whole(buffer):
    """Storages of a buffer whose memory is there while a unit computes."""
    flats = [flat for flat in (buffer.data, buffer.main_grad) if isinstance(flat, Pieces)]
    return {
        flat.piece(number).untyped_storage().data_ptr()
        for flat in flats
        for number in range(len(flat))
    }


def run(rank, world_size, name, directory, layout):
    """(measured, planned) bytes of this rank: between steps, and for backwards."""
    model, changes, packed = CASES[name]
    lengths = [LENGTH // 2, LENGTH // 4, LENGTH // 4] * 16 if packed else [LENGTH] * 16
    collate, data = DataCollatorWithFlattening() if packed else stacked, samples(lengths)
    before, callback = storages(), Measure()
    args = MerakArguments(directory, **RUN | changes | layout)
    trainer = callback.trainer = MerakTrainer(model(), args, collate, data, callbacks=[callback])
    trainer.train()
    left_out = before.keys() | whole(trainer.engine.buffer)
    held = sum(storage.nbytes() for place, storage in storages().items() if place not in left_out)
    planned = rank_memory(trainer.engine.plan)[trainer.mesh.pp_rank]
    between = planned.weights + planned.gradients + planned.optimizer
    return (held, between), (callback.executor.peak, planned.activations)


def check(found, what, over=0):
    """The numbers of ranks that have one plan, which is of the one that holds most. over: by how
    many bytes the plan may be above what is kept for backwards."""
    (held, between), (kept, activations) = (max(pairs) for pairs in zip(*found, strict=True))
    assert 0.95 * between <= held <= 1.05 * between + BATCHES, what
    assert kept <= activations <= kept + over, (what, kept, activations)


# bytes of ids and labels of a step's micro-batches: as large as tiny weights in bf16
BATCHES = 4 * 2 * 2 * LENGTH * 8
# Gradients of an adapter's two outputs, operands of its deferred weight gradients: the plan counts
# them from the middle of a backward on, where nothing is measured.
DEFERRED = 2 * LENGTH * (64 + 8) * 4
QUICK = ("lora", "packed")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_one_rank(name, tmp_path):
    check([run(0, 1, name, str(tmp_path), {})], name)


def several(rank, world_size, rows, directory):
    return [run(rank, world_size, name, directory, LAYOUTS[layout]) for name, layout in rows]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks(tmp_path):
    rows = [(name, layout) for name in CASES for layout in LAYOUTS]
    ranks = run_ranks(several, 2, rows, str(tmp_path), timeout=500)
    for row, *found in zip(rows, *ranks, strict=True):
        for alike in [[one] for one in found] if row[1].startswith("pp2") else [found]:
            check(alike, row, DEFERRED * (row[1] == "pp2 zb-h1"))


def test_frozen_layers_keep_no_input(tmp_path):
    """Of a layer of this model: the inputs of o_proj, gate_proj and up_proj, which nothing else
    keeps or reads.
    """
    (_, _), (adapters, _) = run(0, 1, "lora", str(tmp_path), {})
    (_, _), (full, _) = run(0, 1, "adamw", str(tmp_path), {})
    assert adapters < 0.9 * full
