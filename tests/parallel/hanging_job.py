"""A rank of a job of torchrun whose last rank misbehaves in step 3: python hanging_job.py DOOR KIND
PP DIRECTORY.
"""

import os
import signal
import sys
import time

import torch

from megatron_merak.arguments import build_parser, read
from megatron_merak.config import Config
from megatron_merak.parallel.launch import World, launch, leave
from megatron_merak.parallel.watchdog import HangLimits
from megatron_merak.runtime.executor import Executor

# What a step may take: capturing on a busy machine is outside of steps.
LIMITS = HangLimits(
    first=60.0, factor=0.0, least=8.0, elsewhere=600.0, poll=0.2, silence=2.0, beside=1.0
)
FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
    --global-batch-size 4 --train-iters 6 --lr 1e-3 --mock-data --vocab-size 50 --log-interval 1 --eval-iters 0
    --distributed-backend gloo"""


def misbehave(kind: str) -> None:
    print(f"now {time.time()}", flush=True)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "ends":
        sys.exit(0)
    elif kind == "dies":
        os._exit(0)


def arm(world: World, kind: str) -> None:
    """Let the last rank misbehave before the first op of its third step."""
    run = Executor._run

    def watched(self: Executor, entry: object) -> object:
        if world.is_last and self.last.step == 2 and entry == self.program[0]:
            time.sleep(0.5)  # the others learn where it is
            misbehave(kind)
        return run(self, entry)

    Executor._run = watched


def gpt(kind: str, pp: str) -> None:
    from megatron_merak.training.pretrain import pretrain

    words = [*FLAGS.split(), "--pipeline-model-parallel-size", pp]
    world = launch("gloo", limits=LIMITS)
    arm(world, kind)
    pretrain(read(build_parser("", Config), words, Config, {})[0], world)
    leave(world)


def hf(kind: str, pp: str, directory: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    import megatron_merak as mm

    class Slow(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if kind == "slow" and args.world.rank == 0 and state.global_step == 3:
                time.sleep(16)

    world = launch("gloo", limits=LIMITS)
    args = mm.MerakArguments(
        directory,
        use_cpu=True,
        pipeline_model_parallel_size=int(pp),
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    arm(world, kind)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(32)]
    trainer = mm.MerakTrainer(model=model, args=args, train_dataset=data, callbacks=[Slow()])
    trainer.train()
    print("trained", flush=True)


if __name__ == "__main__":
    door, *arguments = sys.argv[1:]
    gpt(*arguments[:2]) if door == "gpt" else hf(*arguments)
