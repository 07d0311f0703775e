"""MerakTrainer whose replicas share optimizer state, gradients and weights: nothing but memory
shows it.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.pieces import Pieces
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{"save_steps": 2, "disable_tqdm": True, "report_to": "none", "replica_check_interval": 1},
}


class Reads(TrainerCallback):
    """What a callback sees of a weight after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **more):
        try:
            self.seen.append(model.state_dict()["model.embed_tokens.weight"].double().sum().item())
        except ConfigError as error:
            self.seen.append(error.what)


class Saves(TrainerCallback):
    """Exports all weights while the step's gradient waits for the optimizer."""

    def __init__(self, save):
        self.save, self.calls = save, 0

    def on_pre_optimizer_step(self, args, state, control, **more):
        self.calls += 1
        if state.global_step == 1:
            self.save()


WAYS = {
    "plain": {},
    "optim": {"use_distributed_optimizer": True},
    "grads": {"fsdp": "shard_grad_op"},
    "full": {"data_parallel_sharding_strategy": "optim_grads_params"},
}


def trained(directory, way, bf16, resume=None):
    reads = Reads()
    model, data = tiny_llama(3), samples(16, ragged=False)
    arguments = MerakArguments(directory, bf16=bf16, **WAYS[way], **RUN)
    trainer = MerakTrainer(model, arguments, collate, data, data[:4], callbacks=[reads])
    saves = Saves(lambda: (trainer.save_model(f"{directory}/within"), trainer.gather_model()))
    trainer.add_callback(saves)
    trainer.train(resume_from_checkpoint=resume)
    assert saves.calls == (2 if resume else 4)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{directory}/last")
    buffer, states = trainer.engine.buffer, trainer.engine.optimizer.state().values()
    flats = ((buffer.main_grad, buffer.own_grads), (buffer.data, buffer.own_data))
    flats = [states, *(own if isinstance(flat, Pieces) else [flat] for flat, own in flats)]
    kept = [sum(flat.nbytes for flat in each) for each in flats]
    gathered = (
        trainer.gather_model().state_dict()
        if trainer.args.process_index == 0
        else trainer.gather_model() and None
    )
    logs = [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logs, evaluated, reads.seen, kept, gathered and gathered["lm_head.weight"].dtype


def run(rank, world_size, directory, bf16):
    torch.set_num_threads(1)
    found = {way: trained(f"{directory}/{way}", way, bf16) for way in WAYS}
    found["moved"] = trained(f"{directory}/moved", "full", bf16, f"{directory}/plain/checkpoint-2")
    found["back"] = trained(f"{directory}/back", "plain", bf16, f"{directory}/full/checkpoint-2")
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_logs_weights_and_checkpoints_are_those_of_replicas_that_have_all(tmp_path, bf16):
    """Checkpoints of one kind of run are resumed by the other; weights that a rank does not have
    are refused.
    """
    for found in run_ranks(run, 2, str(tmp_path), bf16, timeout=250):
        plain = found.pop("plain")
        assert len(plain[0]) == 4
        for logs, evaluated, *_ in found.values():
            assert [loss for loss, _ in logs] == [loss for loss, _ in plain[0]]
            assert [norm for _, norm in logs] == pytest.approx(
                [norm for _, norm in plain[0]], rel=1e-6
            )
            assert evaluated == plain[1]
        for way, shared in (("optim", 1), ("grads", 2), ("full", 3)):
            for part, (kept, every) in enumerate(zip(found[way][3], plain[3], strict=True)):
                assert kept < 0.6 * every if part < shared else kept >= every, (way, part)
            refused = bf16 or way == "full"
            assert found[way][2] == (["LlamaForCausalLM.state_dict"] * 4 if refused else plain[2])
            assert plain[4] == found[way][4] == (torch.float32 if plain[4] else None)
    for place in ("last", "checkpoint-4", "within"):
        wanted = load_file(tmp_path / "plain" / place / "model.safetensors")
        for name in ("optim", "grads", "full", "moved", "back")[: 3 if place == "within" else None]:
            found = load_file(Path(tmp_path) / name / place / "model.safetensors")
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], value) for key, value in wanted.items()), (
                name,
                place,
            )
