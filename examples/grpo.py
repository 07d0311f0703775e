"""GRPO: reinforcement learning with a loop of one's own, under any layout.

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py --tensor_model_parallel_size 2

A tiny Llama is shown one digit and has to say it again and again. It starts from random weights and
learns from rewards
alone: the share of its tokens that are that digit. Each round samples a group of answers to every
prompt, compares the
rewards within a group, and takes a few clipped steps (Shao et al.,
https://arxiv.org/abs/2402.03300, without the KL term). Every rank samples all answers together with
the others and sees the same rewards; replicas train on their rows.
"""

import torch
from torch import Tensor
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments
from megatron_merak.engine import Engine, token_logprobs

DEFAULTS = {
    "output_dir": "runs/grpo",
    "max_steps": 60,  # rounds
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "logging_steps": 10,
    "use_cpu": not torch.cuda.is_available(),
}
DIGITS = 10
BEGIN = 10
EQUALS = 11
ANSWERS = 8
TOKENS = 4
EPOCHS = 2
CLIP = 0.2


def policy_loss(outputs, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective over the answers' tokens; traced once, and run where the last
    stage is.
    """
    shown = batch["labels"] != -100
    ratio = torch.exp(token_logprobs(outputs.logits, batch["labels"]) - batch["old"])
    gain = batch["advantages"][:, None]
    each = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    clipped = ((ratio - 1).abs() > CLIP) & shown
    return -(each * shown).sum() / batch["tokens"], {"clipped": clipped.sum() / shown.sum()}


def example(rows: int) -> dict[str, Tensor]:
    """A micro-batch like those that come."""
    ids = torch.zeros(rows, 3 + TOKENS, dtype=torch.int64)
    each = torch.zeros(rows)
    return {
        "input_ids": ids,
        "labels": ids,
        "old": torch.zeros(ids.shape),
        "advantages": each,
        "tokens": 1.0,
    }


def rollout(engine: Engine, prompts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequences [rows, length], labels, rewards [rows]) of a group of answers to each of some
    prompts.
    """
    digits = torch.arange(prompts) % DIGITS
    start = torch.stack(
        (torch.full_like(digits, BEGIN), digits, torch.full_like(digits, EQUALS)), 1
    )
    sequences = engine.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, num_return_sequences=ANSWERS,
        min_new_tokens=TOKENS, max_new_tokens=TOKENS, top_k=0,
    )  # fmt: skip
    labels = sequences.clone()
    labels[:, : start.shape[1]] = -100
    rewards = (sequences[:, 3:] == sequences[:, 1:2]).float().mean(1)
    return sequences, labels, rewards


def advantages_of(rewards: Tensor) -> Tensor:
    groups = rewards.view(-1, ANSWERS)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=12, eos_token_id=13, bos_token_id=BEGIN,
    )  # fmt: skip
    rows, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    engine = Engine(LlamaForCausalLM(config), args, example(rows), policy_loss)
    prompts = rows * micro_batches * engine.replicas // ANSWERS
    for number in range(1, args.max_steps + 1):
        sequences, labels, rewards = rollout(engine, prompts)
        mine = slice(engine.replica, None, engine.replicas)
        columns = {
            "input_ids": sequences[mine],
            "labels": labels[mine],
            "advantages": advantages_of(rewards)[mine],
        }
        cut = zip(*(column.split(rows) for column in columns.values()), strict=True)
        batches = [dict(zip(columns, values, strict=True)) for values in cut]
        for batch, old in zip(batches, engine.logprobs(batches), strict=True):
            batch |= {"old": old, "tokens": float(rows * micro_batches * TOKENS)}
        for _ in range(EPOCHS):
            passed = engine.forward_backward(batches)
            result = engine.step()
        if number % args.logging_steps == 0 and engine.mesh.rank == 0:
            clipped = torch.stack([report["clipped"] for report in passed.reports]).mean()
            told = f"reward {rewards.mean():.3f}  gradient norm {result.grad_norm:.3f}  clipped {clipped:.1%}"
            print(f"round {number:3d}  {told}", flush=True)
    engine.save_pretrained(args.output_dir)
    engine.end()


if __name__ == "__main__":
    main()
