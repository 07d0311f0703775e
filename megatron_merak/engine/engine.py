"""``Engine``: what a training loop of one's own needs of a model that is divided over ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..hf_trainer.arguments.deepspeed import decayed_by_deepspeed
from ..hf_trainer.arguments.merak_arguments import MerakArguments
from ..hf_trainer.arguments.optimizers import class_and_arguments, decayed_parameters, make
from ..hf_trainer.batches.exchange import from_rank
from ..hf_trainer.batches.model_facts import ModelFacts, padding_of
from ..hf_trainer.batches.same_batches import check_everywhere
from ..hf_trainer.engine import build_engine
from ..hf_trainer.generation import Generator
from ..hf_trainer.job import mesh_of
from ..optimizer.base import StepResult
from ..optimizer.recipe import Recipe
from ..parallel.agree import together
from ..parallel.attendance import attend
from ..parallel.launch import leave
from ..parallel.nodes import find_nodes
from ..plan import Plan
from ..stages.blueprint import Task
from ..stages.captured import CapturedModel
from ..stages.placed import refuse_placed
from ..stages.traced import OwnLoss
from .losses import LOGPROBS, Losses, LossFn, loss_of_model
from .named_weights import NamedWeights

Batch = Mapping[str, Any]
_LOOP = {  # fields of MerakArguments that would change a trainer's loop, which is not there
    "label_smoothing_factor": "Compute it in a loss_fn",
    "neftune_noise_alpha": "Add noise in the model's forward, while it trains",
    "warmup_ratio": "Give step the learning rate",
    "warmup_steps": "Give step the learning rate",
}


@dataclass(frozen=True)
class Passed:
    """Of each micro-batch of this replica, in order: its loss, and what else its ``loss_fn`` returned, on the CPU."""

    losses: list[float]
    reports: list[dict[str, Tensor]]


class Engine:
    """A model under the plan of ``args``: tensor, pipeline and data parallel, with its optimizer. Raises MerakError.

    model: as of ``MerakTrainer``; it is captured, not run. args: degrees of parallelism and sharding, precision,
    ``optim`` and its arguments, ``max_grad_norm``, ``learning_rate``, ``weight_decay`` and ``seed`` are read;
    ``gradient_accumulation_steps`` is the number of micro-batches that the plan is made for, and other numbers run,
    too. What is for a trainer's loop is not read. example_batch: a micro-batch, the same on every rank. loss_fn: of the
    first ``forward_backward``; it decides, with the example, how the model is cut. None: the loss of the model's
    forward.

    A batch is a dictionary of tensors. The model gets the entries that its forward names; numbers become tensors. Every
    shape that is new is captured, so pad batches to few lengths. Every method is collective: all ranks call it, in the
    same order, and the ranks of a replica pass the same batches. ``replica`` of ``replicas`` is this rank's.
    """

    def __init__(self, model: nn.Module, args: MerakArguments, example_batch: Batch, loss_fn: LossFn | None = None):
        for name, remedy in _LOOP.items():
            if getattr(args, name, None):
                raise ConfigError(f"args.{name}", getattr(args, name), "an Engine has no loop of its own", remedy)
        refuse_placed(model)
        self.model, self.args, self.mesh = model, args, mesh_of(args)
        self._default = loss_of_model if loss_fn is None else loss_fn
        self._losses = Losses(model, args.bf16 or args.fp16)
        with together(self.mesh.control, "cpu"):
            self._first = self._losses.of(self._default)
            example = _plain(example_batch)
            decayed = decayed_by_deepspeed(args, model) or decayed_parameters(model)
            made = make(model, args.weight_decay, decayed, class_and_arguments(args, model))
            self._recipe = Recipe(made, model.named_parameters(remove_duplicate=False), self.mesh.device)
        nodes = find_nodes(args.world, self.mesh.control)
        self._captured = build_engine(model, example, args, self.mesh, self._recipe, self._first, nodes)
        self._captured.share_weights()
        self._told: Tensor | None = None  # of the last backward since a step
        self._generator: Generator | None = None

    @property
    def plan(self) -> Plan:
        return self._captured.plan

    @property
    def replica(self) -> int:
        return self.mesh.dp_rank

    @property
    def replicas(self) -> int:
        return self.mesh.grid.dp

    @property
    def steps(self) -> int:
        """Steps done, those skipped included."""
        return self._captured.iteration

    @property
    def notes(self) -> tuple[str, ...]:
        """What the capture brought to light, in sentences."""
        return self._captured.notes

    # Training

    def forward_backward(self, batches: Sequence[Batch], loss_fn: LossFn | None = None) -> Passed:
        """Add the gradient of these micro-batches to that of the step: of the sum of their losses, averaged over
        replicas, as ``DistributedDataParallel`` has it after a ``backward`` for each.

        batches: of this replica; every replica has as many. loss_fn: (outputs, batch) -> loss, [] or [1], or (loss,
        {name: tensor}) to have these tensors reported; the one given to the engine by default. It is traced, as the
        model is, once for each shape of batch: outputs are the model's (in fp32 where that computes in 16 bits), and
        the batch has all its entries. Several calls before a step add up.
        """
        attend("forward_backward", self.mesh.control)
        loss = self._loss(loss_fn)
        batches = self._checked(batches)
        check_everywhere(batches, len(batches), self.mesh)
        if not batches:
            raise ConfigError("batches", "[]", "there is nothing to compute", "Give one micro-batch or more")
        captured, replicas = self._captured, self.mesh.grid.dp
        earlier = [] if self._told is None else [own.clone() for own in captured.buffer.own_grads]
        self._told = None
        task = Task(None if loss is self._first else loss)
        self._admit(batches, True, task)
        told = captured.backward(batches, [1 / replicas] * len(batches), task)
        found = captured.reported(batches, task)
        for own, before in zip(captured.buffer.own_grads, earlier, strict=bool(earlier)):
            own.add_(before)
        self._told = told
        passed = self._everywhere(found)
        losses = [float(each.pop("loss")) * replicas for each in passed]
        return Passed(losses, passed)

    def step(self, lr: float | None = None) -> StepResult:
        """Update the weights by ``args.optim`` with the gradient since the last step, clipped to ``max_grad_norm``.

        lr: the learning rate; None: ``args.learning_rate``. Biases and norms have no decay, as under ``Trainer``.
        Returns ``grad_norm``, before clipping, and ``skipped``: the gradient was not finite and nothing changed.
        """
        attend("step", self.mesh.control)
        if self._told is None:
            reason = "nothing was computed since the last step"
            raise ConfigError("step", "(no gradient)", reason, "Run forward_backward")
        lr = self.args.learning_rate if lr is None else lr
        told, self._told = self._told, None
        rates = [(lr, group.options.get("weight_decay", 0.0)) for group in self._recipe.groups]
        return self._captured.update(rates, told)

    def zero_grad(self) -> None:
        """Forget the gradient since the last step."""
        self._told = None

    # Inference

    def logprobs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[Tensor]:
        """Of each batch of this replica the log-probabilities of its labels, [rows, length] fp32 on the CPU, on every
        rank of the replica; see ``token_logprobs``. Without dropout.

        batches: with ``labels``, the tokens themselves and -100 where they do not count; without them those are
        ``input_ids``, where ``attention_mask`` is not 0. temperature: what logits are divided by. Replicas may have
        different numbers of batches. Only the results travel.
        """
        attend("logprobs", self.mesh.control)
        with together(self.mesh.control, "cpu"):
            question = self._losses.logprobs(temperature)
        batches = self._checked(batches)
        self._admit(batches, False, Task(question, (LOGPROBS,)))
        found = self._captured.evaluate(batches, (LOGPROBS,), question)
        found = None if found is None else [{LOGPROBS: each[LOGPROBS]} for each in found]
        return [each[LOGPROBS] for each in self._everywhere(found if batches else [])]

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """What ``model.generate`` of transformers returns for the trained weights, on every rank; see
        ``MerakTrainer.generate``. Every rank of the job passes the same inputs; replicas share the rows."""
        attend("generate", self.mesh.control)
        self._captured.share_statistics()
        if self._generator is None:
            facts = ModelFacts.of(self.model, self.args)
            self._generator = Generator(self._captured, self.model, padding_of(self.model, facts, self.args, None))
        return self._generator.generate(inputs, generation_config, kwargs)

    # Weights

    def named_weights(
        self, bucket_bytes: int = 1 << 28, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Names, as HuggingFace has them, and whole tensors of all weights, on every rank and its device.

        They come bucket by bucket: no rank needs memory for more than ``bucket_bytes`` of them, twice, unless a single
        tensor has more. dtype: of floating tensors; None: that of the model that was given. Tied weights come once. The
        iterator is collective, so every rank goes to its end.
        """
        weights = self._weights(dtype)
        for bucket in weights.buckets(bucket_bytes):
            yield from bucket

    def weights_info(self, dtype: torch.dtype | None = None) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of what ``named_weights`` brings, in its order."""
        return [(whole.name, whole.dtype, whole.shape) for whole in self._weights(dtype).wholes]

    def _weights(self, dtype: torch.dtype | None) -> NamedWeights:
        self._between_steps("named_weights")
        names = [name for name, _ in self.model.named_parameters()]
        return NamedWeights(self._captured.exported(), names, self.mesh, dtype)

    # Saving

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer state and the count of steps; ``load`` resumes them under any layout."""
        self._between_steps("save")
        self._captured.save(directory)

    def load(self, directory: str | Path) -> None:
        """Go on from what ``save`` wrote last into ``directory``."""
        self._between_steps("load")
        self._captured.load(directory)

    def save_pretrained(self, directory: str | Path, processing_class: Any = None) -> None:
        """Write the model, and its tokenizer if given, as a directory that transformers' ``from_pretrained`` opens."""
        self._between_steps("save_pretrained")
        self._captured.save_hf(directory, processing_class)

    def end(self) -> None:
        """Leave the job; the last call of a script."""
        leave(self.args.world)

    # Inside

    @property
    def captured(self) -> CapturedModel:
        """What runs the plan, for those who work on this library."""
        return self._captured

    def _between_steps(self, call: str) -> None:
        attend(call, self.mesh.control)
        if self._told is not None:
            reason = "the gradient of a step is not applied yet, and its memory is needed"
            raise ConfigError(call, "(called)", reason, "Call step or zero_grad first")

    def _loss(self, loss_fn: LossFn | None) -> OwnLoss:
        with together(self.mesh.control, "cpu"):
            return self._losses.of(self._default if loss_fn is None else loss_fn)

    def _checked(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        held = self._captured.user_model
        if held is not None and held.shared and held.weights_changed():
            held.adopt()  # weights that were written since
        with together(self.mesh.control, "cpu"):
            if isinstance(batches, Mapping):
                raise ConfigError("batches", "(a dictionary)", "it is one batch", "Give a list of them")
            return [_plain(batch) for batch in batches]

    def _admit(self, batches: Sequence[Batch], training: bool, task: Task) -> None:
        """Capture what is new, so that what fails does so on all ranks."""
        with together(self.mesh.control, "cpu"):
            self._captured.admit(batches, training, task)

    def _everywhere(self, found: list[dict[str, Tensor]] | None) -> list[dict[str, Tensor]]:
        """What the last stage has found, on every rank of its replica."""
        here = None if found is None else [{name: x.detach().cpu() for name, x in each.items()} for each in found]
        source = self._captured.output_rank(self.mesh.dp_rank)
        return from_rank(source, here, self.mesh.model, self.mesh.device)  # type: ignore[return-value]


def _plain(batch: Batch) -> dict[str, Tensor]:
    """The batch on the CPU, its numbers as tensors, []. Raises ConfigError for other things."""
    found = {}
    for name, value in batch.items():
        if isinstance(value, bool | int | float):
            value = torch.tensor(value)
        if value is not None and not isinstance(value, Tensor):
            reason = "a captured program takes tensors and numbers"
            raise ConfigError(f"batch entry {name}", type(value).__name__, reason, "Make it a tensor, or leave it out")
        if value is not None:
            found[name] = value.cpu()  # as from a collator: what a stage reads goes to its device
    return found
