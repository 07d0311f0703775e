"""A step by step account of an engine and of one process that does the same to the same model,
eagerly.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from megatron_merak.engine import Engine, token_logprobs
from megatron_merak.errors import MerakError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments

# With an epsilon of 1, AdamW's step is nearly the gradient times a constant: what is wrong with one
# shows in weights.
RATE, DECAY, EPSILON, CLIP = 0.5, 0.1, 1.0, 1.0


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=2, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def arguments(directory: str, **changes: Any) -> MerakArguments:
    optimizer = {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "adam_epsilon": EPSILON,
        "max_grad_norm": CLIP,
    }
    return MerakArguments(
        str(directory), use_cpu=True, report_to="none", **{**optimizer, **changes}
    )


def batch_of(seed: int, rows: int = 3, length: int = 9) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (rows, length), generator=draw)
    labels = ids.clone()
    labels[:, :2] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "gains": torch.randn(rows, generator=draw),
        "beta": 0.5,
    }


def likelihood(outputs, batch) -> Tensor:
    return -token_logprobs(outputs.logits, batch["labels"]).sum() / 10


def policy(outputs, batch) -> tuple[Tensor, dict[str, Tensor]]:
    """As a script would write it, without this package's function."""
    shown = batch["labels"][:, 1:] != -100
    targets = batch["labels"][:, 1:].clamp(min=0)[..., None]
    each = torch.log_softmax(outputs.logits[:, :-1], -1).gather(-1, targets)[..., 0] * shown
    return -(each * batch["gains"][:, None]).mean() * batch["beta"], {
        "each": each,
        "mean": each.mean(),
    }


def none(outputs, batch) -> float:
    return 1.0


# Of each step the calls before it: seeds of micro-batches, and their loss.
STEPS = (([(1, 2), likelihood],), ([(3, 4), policy],), ([(5, 6), likelihood], [(7,), policy]))


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(ours), torch.as_tensor(theirs), rtol=2e-6, atol=2e-6, check_dtype=False
    )


class Reference:
    """One process, ``torch.optim.AdamW``, the gradients of all replicas."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model)
        named = dict(self.model.named_parameters())
        groups = [
            {
                "params": [p for name, p in named.items() if ("norm" in name) == norms],
                "weight_decay": decay,
            }
            for norms, decay in ((False, DECAY), (True, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPSILON)

    def outputs(self, batch: dict[str, Any]) -> Any:
        return self.model(input_ids=batch["input_ids"])

    def backward(
        self, seeds, loss_fn, replicas: int
    ) -> dict[int, list[tuple[float, dict[str, Tensor]]]]:
        """Per replica and micro-batch, its loss and reports."""
        found: dict[int, list] = {}
        for replica in range(replicas):
            for seed in seeds:
                batch = batch_of(10 * seed + replica)
                result = loss_fn(self.outputs(batch), batch)
                loss, reports = result if isinstance(result, tuple) else (result, {})
                (loss / replicas).backward()
                found.setdefault(replica, []).append((loss.item(), reports))
        return found

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


def compare(
    rank: int, world: int, directory: str, tp: int, pp: int, changes: dict[str, Any]
) -> list[str]:
    """Train an engine and the reference, and hold everything that the engine says against it.
    Returns what ranks that differ are told."""
    divides = bool({"expert_model_parallel_size", "expert_tensor_parallel_size"} & changes.keys())
    model: PreTrainedModel = tiny_mixture() if divides else tiny_llama()
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    reference = Reference(model)
    args = arguments(directory, gradient_accumulation_steps=2, **degrees, **changes)
    engine = Engine(model, args, batch_of(0), likelihood)
    for name, tensor in engine.named_weights(bucket_bytes=5000):
        assert torch.equal(tensor, reference.model.state_dict()[name]), name
    assert engine.replicas == world // (tp * pp)
    for calls in STEPS:
        for seeds, loss_fn in calls:
            wanted = reference.backward(seeds, loss_fn, engine.replicas)[engine.replica]
            passed = engine.forward_backward(
                [batch_of(10 * seed + engine.replica) for seed in seeds], loss_fn
            )
            close(passed.losses, [loss for loss, _ in wanted])
            for ours, (_, theirs) in zip(passed.reports, wanted, strict=True):
                assert ours.keys() == theirs.keys()
                for name, value in theirs.items():
                    close(ours[name], value.detach())
        compare_logprobs(engine, reference)  # while a gradient waits for its step
        result = engine.step()
        close(result.grad_norm, reference.step())
        assert not result.skipped
        for name, tensor in engine.named_weights():
            close(tensor, reference.model.state_dict()[name])
    prompts = batch_of(7)["input_ids"]
    given = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 3, "pad_token_id": 0}
    assert torch.equal(
        engine.generate(prompts, **given), reference.model.generate(prompts, **given)
    )
    resume(engine, directory)
    return [] if tp * pp == 1 else differ(engine)


def compare_logprobs(engine: Engine, reference: Reference) -> None:
    batches = [batch_of(90 + engine.replica), batch_of(80)]
    for found, batch in zip(engine.logprobs(batches, temperature=0.7), batches, strict=True):
        logits = reference.outputs(batch).logits / 0.7
        wanted = torch.log_softmax(logits, -1)[:, :-1].gather(
            -1, batch["labels"][:, 1:].clamp(min=0)[..., None]
        )[..., 0]
        assert (found[:, :2] == 0).all() and found.shape == batch["labels"].shape
        close(found[:, 1:], (wanted * (batch["labels"][:, 1:] != -100)).detach())


def resume(engine: Engine, directory: str) -> None:
    """Weights are the bits that were saved; transformers reads the same ones."""
    engine.save(f"{directory}/state")
    engine.save_pretrained(f"{directory}/model")
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.forward_backward([batch_of(1)])
    engine.step()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())
    engine.load(f"{directory}/state")
    saved = AutoModelForCausalLM.from_pretrained(f"{directory}/model").state_dict()
    for name, tensor in engine.named_weights():
        assert torch.equal(tensor, before[name]) and torch.equal(tensor, saved[name]), name
    for name, tensor in engine.named_weights(dtype=torch.bfloat16, bucket_bytes=1):
        assert torch.equal(tensor, saved[name].to(torch.bfloat16)), name
    told = engine.weights_info(torch.bfloat16)
    assert told == [(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in before.items()]
    assert engine.steps == len(STEPS)


def differ(engine: Engine) -> list[str]:
    """What ranks of a replica are told that pass batches, losses or prompts of their own; the
    engine goes on.
    """
    rank, told = engine.mesh.rank, []
    for call in (
        lambda: engine.forward_backward([batch_of(rank)]),
        lambda: engine.forward_backward([batch_of(1)], none if rank else likelihood),
        lambda: engine.generate(batch_of(rank)["input_ids"], max_new_tokens=2),
        lambda: engine.logprobs([batch_of(1)]) if rank else engine.step(),
    ):
        try:
            call()
        except MerakError as error:
            told.append(str(error))
    engine.forward_backward([batch_of(1)])
    engine.step()
    return told
