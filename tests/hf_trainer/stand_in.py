"""The unmodified model in place of the engine, so that the trainer around it can be told from the
engine's faults.

Every rank runs the whole eager model; tensor and pipeline ranks of a replica repeat its work,
replicas share gradients.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.checkpoint.save import check_finite
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.graph.capture.capture import accepts_num_items
from megatron_merak.hf_trainer.arguments.optimizers import decayed_parameters
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.optimizer.base import StepResult


class EagerEngine:
    """The surface of ``CapturedModel`` that a MerakTrainer uses, on the eager model."""

    buffer, scaler, is_causal, captures = None, None, False, (0, 0)

    def __init__(self, model, args, mesh):
        self.model, self.args, self.mesh, self.iteration, self.dtype = (
            model,
            args,
            mesh,
            0,
            "float32",
        )
        self.accepts_num_items = accepts_num_items(model)
        decayed = frozenset(decayed_parameters(model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in named if name in decayed],
                "weight_decay": args.weight_decay,
            },
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        betas = (args.adam_beta1, args.adam_beta2)
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=betas, eps=args.adam_epsilon, fused=True
        )
        # per step, per micro-batch, the first token of every row
        self.seen: list[list[list[int]]] = []
        self.shapes: set[tuple[int, ...]] = set()

    def read(self, batch):
        return batch

    def first_not_finite(self, batches):
        return ""

    def freeze(self, names):
        """A frozen parameter of the eager model has no gradient."""

    def backward(self, batches):
        self.model.train()
        self.seen.append([batch["input_ids"][:, 0].tolist() for batch in batches])
        self.shapes |= {tuple(batch["input_ids"].shape) for batch in batches}
        scale = 1 if "num_items_in_batch" in batches[0] else len(batches) * self.mesh.grid.dp
        total = torch.zeros(())
        for batch in batches:
            loss = self.model(**batch).loss / scale
            loss.backward()
            total += loss.detach()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.mesh.dp is not None:
            for tensor in [total, *(p.grad for p in parameters)]:
                dist.all_reduce(tensor, group=self.mesh.dp)
        return total

    def update(self, rates, told):
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.args.max_grad_norm or float("inf"))
        for group, own in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = own
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1
        return StepResult(norm.item(), False, told.item())

    @torch.no_grad()
    def evaluate(self, batches, outputs=("loss",), loss=None):
        self.model.eval()
        found = [self.model(**batch) for batch in batches]
        if self.mesh.pp_rank != self.mesh.grid.pp - 1:
            return None
        left_out = {name.removeprefix("!") for name in outputs if name.startswith("!")} | {"loss"}
        return [
            {
                name: x
                for name, x in output.items()
                if name in outputs or ("*" in outputs and name not in left_out)
            }
            for output in found
        ]

    def admit(self, batches, training, task):
        pass

    def refuse_outside(self, batches, training, task=None):
        """The eager model raises by itself."""

    def difference(self, one, others):
        """Of the eager model's loss and gradients; every rank has all of them."""
        self.model.eval()
        losses, grads = [], []
        for batch in (one, *others):
            losses.append(self.model(**batch).loss)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            grads.append(
                torch.autograd.grad(
                    losses[-1], parameters, allow_unused=True, materialize_grads=True
                )
            )
        alike = torch.allclose(losses[0], sum(losses[1:]), rtol=1e-5)
        for first, *rest in zip(*grads, strict=True):
            alike = alike and torch.allclose(first, sum(rest), rtol=1e-3, atol=1e-6)
        return "" if alike else "the loss or a gradient"

    def output_rank(self, replica):
        return self.mesh.grid.rank(dp=replica, pp=self.mesh.grid.pp - 1)

    def check_finite(self):
        check_finite(
            {
                "model": [
                    Shard(n, tuple(p.shape), None, (), p) for n, p in self.model.named_parameters()
                ]
            },
            None,
            "cpu",
        )

    def share_statistics(self):
        pass

    def save(self, root, extra):
        self.check_finite()
        moments = self.optimizer.state_dict()["state"]
        flat = {f"{name}.{key}": value[key] for name, value in moments.items() for key in value}
        if self.mesh.rank == 0:
            Path(root).mkdir(parents=True, exist_ok=True)
            save_file(
                {k: v.clone() for k, v in self.model.state_dict().items()},
                Path(root) / "model.safetensors",
            )
            save_file(flat, Path(root) / "moments.safetensors")
            (Path(root) / "extra.json").write_text(
                json.dumps({"iteration": self.iteration, "extra": extra})
            )

    def load(self, root, iteration=None, verify=True, check=lambda extra: None):
        saved = json.loads((Path(root) / "extra.json").read_text())
        check(saved["extra"])
        self.model.load_state_dict(load_file(Path(root) / "model.safetensors"))
        state = self.optimizer.state_dict()
        for name, value in load_file(Path(root) / "moments.safetensors").items():
            number, _, key = name.partition(".")
            state["state"].setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(state)
        self.iteration = saved["iteration"]
        return saved["extra"]

    def save_hf(self, directory, processing_class=None, omitted=""):
        if self.mesh.rank == 0:
            with disk_errors(Path(directory), "Make room"):
                self.model.save_pretrained(directory)


class EagerTrainer(MerakTrainer):
    def create_engine(self, example):
        self.example = example
        return EagerEngine(self.model, self.args, self.mesh)


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, pad_token_id=0, attention_dropout=0.0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def samples(count: int, ragged: bool = True, seed: int = 1) -> list[dict[str, list[int]]]:
    """Token lists that begin with the sample's number + 1, so that a batch tells what it is made
    of.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(5, 13, (), generator=generator)) if ragged else 8
        tokens = [number + 1, *torch.randint(1, 64, (length - 1,), generator=generator).tolist()]
        rows.append({"input_ids": tokens, "labels": tokens})
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded at the end, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)

    def stack(name, filler):
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    ids = stack("input_ids", 0)
    mask = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": stack("labels", -100)}
