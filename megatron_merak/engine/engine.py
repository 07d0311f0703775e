"""``Engine``: a model that is trained and run under a plan, for programs with a training loop of
their own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..hf_trainer.arguments.deepspeed import decayed_by_deepspeed
from ..hf_trainer.arguments.instances import mesh_of
from ..hf_trainer.arguments.merak_arguments import MerakArguments
from ..hf_trainer.arguments.optimizers import class_and_arguments, decayed_parameters, make
from ..hf_trainer.batches.exchange import from_rank
from ..hf_trainer.batches.model_facts import ModelFacts, padding_of
from ..hf_trainer.batches.same_batches import check_everywhere
from ..hf_trainer.engine import build_engine
from ..hf_trainer.generation import Generator
from ..hf_trainer.job import ranks_of
from ..optimizer.base import StepResult
from ..optimizer.recipe import Recipe
from ..parallel.agree import alike, gather_json, raise_together, together
from ..parallel.attendance import attend
from ..parallel.interruption import Interruption
from ..parallel.launch import end_interrupted, leave
from ..plan import Plan
from ..stages.blueprint import ModelTask
from ..stages.captured import CapturedModel
from ..stages.placed import refuse_placed
from ..stages.traced import OwnLoss
from . import gradients
from .losses import LOGPROBS, Losses, LossFn, loss_of_model
from .named_weights import NamedWeights

Batch = Mapping[str, Any]
_LOOP = {  # fields of MerakArguments that would change a trainer's loop, which is not there
    "label_smoothing_factor": "Compute it in a loss_fn",
    "neftune_noise_alpha": "Add noise in the model's forward, while it trains",
    "check_for_spiky_loss": "Compare the losses that forward_backward returns",
    "check_for_large_grads": "Compare the norms that step returns",
    "error_injection_rate": "Change a loss in the loop",
    "rerun_mode": "Call forward_backward again before step, and compare",
    "warmup_ratio": "Give step the learning rate",
    "warmup_steps": "Give step the learning rate",
    "parallel": "Search by merak-plan search, and give what it stores: plan='plan.json'",
}


@dataclass(frozen=True)
class Passed:
    """What `Engine.forward_backward` returns, of the micro-batches of this replica in order, on the
    CPU.

    losses:  of each micro-batch.
    reports: what else its ``loss_fn`` returned, by name.
    """

    losses: list[float]
    reports: list[dict[str, Tensor]]


class Engine:
    """A model under the plan of ``args``: tensor, pipeline and data parallel, with its optimizer.

    model:         as for ``MerakTrainer``; it is captured, not run.
    args:          read are degrees of parallelism and sharding, precision, ``optim`` and its
                   arguments, ``max_grad_norm``, ``learning_rate``, ``weight_decay`` and ``seed``;
                   settings of a trainer's loop are not. The plan is made for
                   ``gradient_accumulation_steps`` micro-batches; other numbers run too.
    example_batch: a micro-batch, the same on every rank.
    loss_fn:       the default of ``forward_backward``; the model is cut by it and the example.
                   None: the loss of the model's forward.

    A batch is a dictionary of tensors. The model gets the entries that its forward names; numbers
    become tensors. Every new shape is captured, so pad batches to few lengths. Every method is
    collective: all ranks call it in the same order, and the ranks of a replica pass the same
    batches. This rank belongs to ``replica`` of ``replicas``.

    Raises MerakError.
    """

    def __init__(
        self,
        model: nn.Module,
        args: MerakArguments,
        example_batch: Batch,
        loss_fn: LossFn | None = None,
    ):
        for name, remedy in _LOOP.items():
            if getattr(args, name, None) not in (None, False, 0, "disabled"):
                raise ConfigError(
                    f"args.{name}", getattr(args, name), "an Engine has no loop of its own", remedy
                )
        refuse_placed(model)
        self.model = model
        self.args = args
        ranks = ranks_of(args)
        self.mesh = mesh_of(args, ranks)
        self._default = loss_of_model if loss_fn is None else loss_fn
        self._losses = Losses(model, args.bf16 or args.fp16)
        with together(self.mesh.control, "cpu"):
            self._first = self._losses.of(self._default)
            example = _plain(example_batch)
            decayed = decayed_by_deepspeed(args, model) or decayed_parameters(model)
            optimizer = make(model, args.weight_decay, decayed, class_and_arguments(args, model))
            self._recipe = Recipe(
                optimizer, model.named_parameters(remove_duplicate=False), self.mesh.device
            )
        self._captured = build_engine(
            model, example, args, ranks=ranks, mesh=self.mesh, recipe=self._recipe, loss=self._first
        )
        self._captured.share_weights()
        self._captured.blueprint.unused.left_out = True
        self._pending_loss: Tensor | None = None  # what the last backward returned, until a step
        self._trainable = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        self._frozen: list[str] = []  # of these, what was frozen at the last backward
        self._idle: set[str] = set()  # what got no gradient since the last step
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
        """Number of steps taken, including skipped ones."""
        return self._captured.iteration

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the capture, in sentences."""
        return self._captured.notes

    # Training

    def forward_backward(self, batches: Sequence[Batch], loss_fn: LossFn | None = None) -> Passed:
        """Add the gradient of these micro-batches to that of the step.

        It is the gradient of the sum of their losses, averaged over replicas: what
        ``DistributedDataParallel`` computes with a ``backward`` for each. Several calls before a
        step add up.

        batches: of this replica; all replicas have the same number of them.
        loss_fn: (outputs, batch) -> loss, [] or [1]; or (loss, {name: tensor}) to get these tensors
                 back. None: the one that the engine was given. It is traced like the model, once
                 for each shape of batch: outputs are the model's (fp32 for a 16-bit model), and the
                 batch has all its entries.
        """
        attend("forward_backward", self.mesh.control)
        loss = self._loss(loss_fn)
        batches = self._checked(batches)
        check_everywhere(batches, len(batches), self.mesh)
        if not batches:
            raise ConfigError(
                "batches", "[]", "there is nothing to compute", "Give one micro-batch or more"
            )
        frozen = self._frozen_now()
        captured = self._captured
        replicas = self.mesh.grid.dp
        adds = self._pending_loss is not None
        task = ModelTask(None if loss is self._first else loss)
        self._admit(batches, True, task)
        idle = self._without_gradient(batches, task)
        if adds:
            idle &= self._idle
        # Only now: a batch that is refused leaves the gradient of those before it.
        earlier = [own.clone() for own in captured.buffer.own_grads] if adds else []
        self._pending_loss = None
        captured.freeze(frozen, idle)
        reduced = captured.backward(batches, [1 / replicas] * len(batches), task)
        outputs = captured.reported(batches, task)
        for own, before in zip(captured.buffer.own_grads, earlier, strict=bool(earlier)):
            own.add_(before)
        self._pending_loss = reduced
        self._frozen = frozen
        self._idle = idle
        gradients.stand_in(self.model.parameters())
        reports = self._everywhere(outputs)
        losses = [float(each.pop("loss")) * replicas for each in reports]
        return Passed(losses, reports)

    def step(self, lr: float | None = None) -> StepResult:
        """Update the weights by the gradient since the last step, clipped to ``max_grad_norm``.

        lr: the learning rate, equal on all ranks; None: ``args.learning_rate``. Biases and norms do
            not decay, as under ``Trainer``; nor does what was frozen (``requires_grad``) at
            ``forward_backward``, or gets no gradient.

        The result has ``grad_norm``, before clipping, and ``skipped``: the gradient was not finite
        and nothing changed.
        """
        attend("step", self.mesh.control)
        if self._pending_loss is None:
            reason = "nothing was computed since the last step"
            raise ConfigError("step", "(no gradient)", reason, "Run forward_backward")
        lr = self._rate(lr)
        reduced = self._pending_loss
        self.zero_grad()
        rates = [(lr, group.options.get("weight_decay", 0.0)) for group in self._recipe.groups]
        return self._captured.update(rates, reduced)

    def zero_grad(self) -> None:
        """Discard the gradient since the last step."""
        self._pending_loss = None
        gradients.withdraw(self.model.parameters())

    # Inference

    def logprobs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probabilities of each batch's labels without dropout: [rows, length] fp32
        on the CPU.

        batches:     of this replica. ``labels`` are the tokens themselves, -100 where they do not
                     count; without ``labels``, those are ``input_ids`` where ``attention_mask`` is
                     not 0. Replicas may have different numbers of batches.
        temperature: logits are divided by it.

        Every rank of a replica gets the result; only the results are communicated. See
        ``token_logprobs``.
        """
        attend("logprobs", self.mesh.control)
        with together(self.mesh.control, "cpu"):
            loss = self._losses.logprobs(temperature)
        batches = self._checked(batches)
        self._admit(batches, False, ModelTask(loss, (LOGPROBS,)))
        outputs = self._captured.evaluate(batches, (LOGPROBS,), loss)
        outputs = None if outputs is None else [{LOGPROBS: each[LOGPROBS]} for each in outputs]
        return [each[LOGPROBS] for each in self._everywhere(outputs if batches else [])]

    def generate(
        self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """Return what ``model.generate`` of transformers returns for the trained weights, on every
        rank.

        Every rank of the job passes the same inputs; replicas share the rows. See
        ``MerakTrainer.generate``.
        """
        attend("generate", self.mesh.control)
        self._captured.share_statistics()
        if self._generator is None:
            facts = ModelFacts.of(self.model, self.args)
            self._generator = Generator(
                self._captured, self.model, padding_of(self.model, facts, self.args, None)
            )
        return self._generator.generate(inputs, generation_config, kwargs)

    # Weights

    def named_weights(
        self, bucket_bytes: int = 1 << 28, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over HuggingFace names and full tensors of all weights, on every rank and its
        device.

        They are gathered bucket by bucket: a rank needs memory for two buckets of ``bucket_bytes``,
        or of the largest tensor. Tied weights come once. The iterator is collective, so every rank
        must exhaust it.

        dtype: of floating-point tensors; None: that of the user's model.

        Raises ConfigError for a model with weights in 4 bits.
        """
        weights = self._weights(dtype)
        for bucket in weights.buckets(bucket_bytes):
            yield from bucket

    def weights_info(
        self, dtype: torch.dtype | None = None
    ) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of what ``named_weights`` yields, in its order."""
        return [
            (tensor.name, tensor.dtype, tensor.shape) for tensor in self._weights(dtype).tensors
        ]

    def _weights(self, dtype: torch.dtype | None) -> NamedWeights:
        self._between_steps("named_weights")
        packed = self._captured.blueprint.traced.captured.four_bit
        if packed:
            reason = f"{min(packed)} is in 4 bits, and its packed values are no weights"
            remedy = "Read the adapters that save_pretrained writes"
            raise ConfigError("named_weights", "(called)", reason, remedy)
        names = [name for name, _ in self.model.named_parameters()]
        return NamedWeights(self._captured.exported(), names, self.mesh, dtype)

    # Saving

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer state and the number of steps; ``load`` resumes from them under
        any layout.
        """
        self._between_steps("save")
        self._captured.save(directory)

    def load(self, directory: str | Path) -> None:
        """Resume from the newest checkpoint that ``save`` wrote into ``directory``."""
        self._between_steps("load")
        self._captured.load(directory)

    def save_pretrained(self, directory: str | Path, processing_class: Any = None) -> None:
        """Write the model, and its tokenizer if one is passed, as a directory for
        ``from_pretrained``.
        """
        self._between_steps("save_pretrained")
        self._captured.save_hf(directory, processing_class)

    def interruption(self) -> Interruption:
        """Return a context for a loop that saves when a signal asks the job to end.

        Inside it, ``stops()`` says after a step whether one came to any rank: its number, or 0. It
        is collective, and equal on every rank. A second signal ends the job at once. Raise
        ``megatron_merak.Interrupted`` of the number after the save, for the signal's exit status.
        """
        return Interruption(self.mesh.control, end_interrupted)

    def end(self) -> None:
        """Leave the job; the last call of a script."""
        leave(self.args.world)

    # Inside

    @property
    def captured(self) -> CapturedModel:
        """The captured model, for those who work on this library."""
        return self._captured

    def _between_steps(self, call: str) -> None:
        attend(call, self.mesh.control)
        if self._pending_loss is not None:
            reason = "the gradient of a step is not applied yet, and its memory is needed"
            raise ConfigError(call, "(called)", reason, "Call step or zero_grad first")

    def _frozen_now(self) -> list[str]:
        """Return the trained parameters that are frozen now. Raises ConfigError, on every rank, for
        a change of ``requires_grad`` that cannot be followed.
        """
        now = [name for name, p in self.model.named_parameters() if p.requires_grad]
        thawed = [name for name in now if name not in self._trainable]
        frozen = sorted(self._trainable.difference(now))
        error = None
        if thawed:
            reason = (
                "it was frozen when the engine was made, so that it has no gradient and no "
                "place in steps"
            )
            remedy = (
                "Make the engine while it is trainable, and freeze it before the first "
                "forward_backward"
            )
            error = ConfigError(thawed[0], "requires_grad=True", reason, remedy)
        elif self._pending_loss is not None and frozen != self._frozen:
            changed = min(set(frozen).symmetric_difference(self._frozen))
            reason = "it changed between two calls of forward_backward that add up to one step"
            error = ConfigError(changed, "requires_grad", reason, "Call step or zero_grad first")
        elif self._trainable and len(frozen) == len(self._trainable):
            reason = "every parameter is frozen, so that there is no gradient"
            error = ConfigError("model", "(frozen)", reason, "Leave a parameter trainable")
        if not alike([frozen, str(error)], self.mesh.control):
            raise_together(error, self.mesh.control, "cpu")
            self._check_equal("requires_grad of the model", frozen)
        if error is not None:
            raise error
        return frozen

    def _without_gradient(self, batches: Sequence[Batch], task: ModelTask) -> set[str]:
        """Return the trained parameters to which no batch of any replica gives a gradient. Raises
        ConfigError, on every rank, if none gets one.
        """
        trained = self._captured.blueprint.traced.captured.trainable
        idle = sorted(trained - self._captured.touched(batches, task))
        everywhere = set(idle)
        if not alike(idle, self.mesh.control):
            everywhere = set.intersection(*map(set, gather_json(idle, self.mesh.control, "cpu")))
        if len(everywhere) == len(trained):
            reason = "it gives none of the trainable parameters a gradient"
            remedy = (
                "Compute it from the model's outputs, without detach() and outside of "
                "torch.no_grad()"
            )
            raise ConfigError("loss", "(of this batch)", reason, remedy)
        return everywhere

    def _rate(self, lr: float | None) -> float:
        """Return the learning rate of a step. Raises ConfigError on every rank."""
        error = None
        try:
            lr = rate_of(self.args.learning_rate if lr is None else lr)
        except ConfigError as refusal:
            error = refusal
        if not alike([lr if error is None else None, str(error)], self.mesh.control):
            raise_together(error, self.mesh.control, "cpu")
            self._check_equal("lr", lr)
        if error is not None:
            raise error
        assert lr is not None
        return lr

    def _check_equal(self, what: str, value: Any) -> None:
        """Raise ConfigError, on every rank, unless all ranks have the same value."""
        values = gather_json(value, self.mesh.control, "cpu")
        other = next((rank for rank, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            reason = f"rank 0 and rank {other} have different ones"
            raise ConfigError(
                what, "(of this rank)", reason, "Let all ranks of the job have the same"
            )

    def _loss(self, loss_fn: LossFn | None) -> OwnLoss:
        with together(self.mesh.control, "cpu"):
            return self._losses.of(self._default if loss_fn is None else loss_fn)

    def _checked(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        user_model = self._captured.user_model
        if user_model is not None and user_model.shared and user_model.weights_changed():
            user_model.adopt()  # the user wrote to weights
        with together(self.mesh.control, "cpu"):
            if isinstance(batches, Mapping):
                raise ConfigError(
                    "batches", "(a dictionary)", "it is one batch", "Give a list of them"
                )
            return [_plain(batch) for batch in batches]

    def _admit(self, batches: Sequence[Batch], training: bool, task: ModelTask) -> None:
        """Capture what is new and look at what is looked up, so that an error is raised on all
        ranks.
        """
        with together(self.mesh.control, "cpu"):
            self._captured.admit(batches, training, task)
            self._captured.refuse_outside(batches, training, task)

    def _everywhere(self, outputs: list[dict[str, Tensor]] | None) -> list[dict[str, Tensor]]:
        """Return outputs of the last stage on every rank of its replica."""
        local = (
            None
            if outputs is None
            else [{name: x.detach().cpu() for name, x in each.items()} for each in outputs]
        )
        source = self._captured.output_rank(self.mesh.dp_rank)
        return from_rank(source, local, self.mesh.model, self.mesh.device)  # type: ignore[return-value]


def _plain(batch: Batch) -> dict[str, Tensor]:
    """Return the batch on the CPU, with numbers as 0-d tensors. Raises ConfigError for other
    values.
    """
    plain = {}
    for name, value in batch.items():
        if isinstance(value, bool | int | float):
            value = torch.tensor(value)
        if value is not None and not isinstance(value, Tensor):
            reason = "a captured program takes tensors and numbers"
            raise ConfigError(
                f"batch entry {name}",
                type(value).__name__,
                reason,
                "Make it a tensor, or leave it out",
            )
        if value is not None:
            plain[name] = value.cpu()  # as from a collator: what a stage reads goes to its device
    return plain


def rate_of(lr: Any) -> float:
    """Return a learning rate as a number. Raises ConfigError for what is none."""
    single = isinstance(lr, Tensor) and lr.numel() == 1
    if not single and (isinstance(lr, bool) or not isinstance(lr, int | float)):
        raise ConfigError("lr", repr(lr), "a step has one learning rate, a number", "Give a number")
    lr = float(lr)
    if not (math.isfinite(lr) and lr >= 0):
        raise ConfigError("lr", lr, "it is negative or not finite", "Give 0 or more")
    return lr
