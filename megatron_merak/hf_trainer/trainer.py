"""``MerakTrainer``: ``transformers.Trainer`` for a model under tensor, pipeline and data
parallelism.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, IterableDataset, Sampler
from transformers import (
    DataCollatorWithPadding,
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProcessorMixin,
    ProgressCallback,
    SequenceFeatureExtractor,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import (
    get_learning_rates,
    get_num_trainable_parameters,
    get_optimizer_group,
    log_metrics,
    metrics_format,
    save_metrics,
    save_state,
)
from transformers.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    TrainOutput,
    align_special_tokens,
    number_of_arguments,
    speed_metrics,
)
from transformers.utils import logging

from ..errors import ConfigError
from ..graph.capture.capture import accepts_num_items
from ..optimizer.recipe import Recipe
from ..parallel.agree import together
from ..parallel.attendance import attend
from ..parallel.launch import leave
from ..parallel.nodes import notices
from ..parallel.ranks import Ranks
from ..stages.captured import CapturedModel
from ..stages.placed import refuse_placed
from ..stages.randomness import same_afterwards
from ..training.outputs import check_directory
from .arguments.deepspeed import decayed_by_deepspeed, refuse_beside_deepspeed
from .arguments.instances import mesh_of
from .arguments.merak_arguments import MerakArguments
from .arguments.neftune import embedding_of
from .arguments.optimizers import class_and_arguments, decayed_parameters, make
from .batches.feed import Feed
from .batches.fingerprint import agreed
from .batches.leaner import in_one_row, without_masks
from .batches.model_facts import ModelFacts, padding_of
from .batches.neutral import NeutralPadding
from .batches.order import Batch
from .batches.padding import Padding
from .batches.predictions import Evaluation, EvaluationBatches
from .engine import build_engine, wishes
from .generation import Generator
from .job import ranks_of
from .overrides import (
    OPTIMIZER,
    refuse_gradients,
    refuse_inputs,
    refuse_late,
    refuse_overrides,
    refusing,
)
from .own_loss import (
    LossOfTrainer,
    compute_loss,
    has_own_loss,
    has_scripted_loss,
    is_overridden,
    label_smoother,
)
from .run import trainer_state
from .run.checkpoints_behind import refuse_override
from .run.console import saving_of, say
from .run.loop import TrainingLoop, saves_for_signals
from .run.parameter_groups import ParameterGroups
from .run.rates import LearningRate, schedule
from .run.recapture import Moments, check_model, check_reached, check_step, check_training
from .run.resumption import check_before_capture
from .run.run_directory import TRAINING_ARGUMENTS, TRAINING_STATE, RunDirectory, write_text
from .searched import choose
from .timed import restore_buffers, time_steps, values_of_buffers


def _described(name: str) -> property:
    """An attribute that determines how batches are made; setting it takes effect for the
    next ones.
    """

    def get(trainer: "MerakTrainer") -> Any:
        return vars(trainer).get(name)

    def put(trainer: "MerakTrainer", value: Any) -> None:
        vars(trainer)[name] = value
        if "feed" in vars(trainer):
            trainer._describe()

    return property(get, put)


def _model() -> property:
    """The model; another one is described anew, and captured when it is first used."""

    def get(trainer: "MerakTrainer") -> nn.Module:
        return vars(trainer)["model"]

    def put(trainer: "MerakTrainer", model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "trainer.model", type(model).__name__, "it is not a model", "Set a torch.nn.Module"
            )
        refuse_placed(model)
        vars(trainer)["model"] = model
        if "feed" in vars(trainer):
            trainer.callback_handler.model = model
            vars(trainer).pop("_parameters_used", None)
            trainer._describe()

    return property(get, put)


@refusing
class MerakTrainer:
    """A trainer with the arguments and the behaviour of ``transformers.Trainer``.

    ``model`` may have no weights (``init_empty_weights``) or remember where they are
    (``from_pretrained``); it is captured, not run. If a rank has all trained weights, the model's
    parameters share memory with them. Otherwise they are empty and using them raises ConfigError,
    until ``gather_model`` brings the trained ones to the first rank. ``train``, ``evaluate``,
    ``predict`` and ``save_model`` are collective: every rank of the job calls them. Losses, metrics
    and logs are the same on every rank; ``compute_metrics`` runs on the first one.

    Raises MerakError.
    """

    beside = ""  # a submodule that is captured with the model and is not saved with it
    # classes of the MRO whose overrides of refused names are supported
    adapted: tuple[type, ...] = ()

    log_metrics = log_metrics
    metrics_format = metrics_format
    save_metrics = save_metrics
    save_state = save_state
    get_learning_rates = get_learning_rates
    get_optimizer_group = get_optimizer_group
    get_num_trainable_parameters = get_num_trainable_parameters
    data_collator = _described("data_collator")
    processing_class = _described("processing_class")
    compute_loss_func = _described("compute_loss_func")

    model = _model()

    loss_is_scaled_for_ga: bool | None = None
    optimizer_cls_and_kwargs: tuple | None = None
    _given_optimizer: torch.optim.Optimizer | None = None
    _given_scheduler: LRScheduler | None = None
    _created_optimizer: torch.optim.Optimizer | None = None  # its groups are those of the engine
    _created_for: tuple | None = None  # the model, and its trainable parameters
    _groups: ParameterGroups | None = None
    _moments: Moments | None = None
    _scheduler: LRScheduler | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: MerakArguments | None = None,
        data_collator: Callable[[list], Mapping[str, Any]] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ):
        self.args = args = MerakArguments("tmp_trainer") if args is None else args
        refuse_inputs(model, model_init, optimizer_cls_and_kwargs, optimizers)
        refuse_overrides(type(self), MerakTrainer, self.adapted)
        self._given_optimizer, self._given_scheduler = optimizers
        self._created_optimizer = self._given_optimizer
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._ranks = ranks_of(args)
        self.mesh = mesh_of(args, self._ranks)
        logging.set_verbosity(args.get_process_log_level())
        set_seed(args.seed)
        self.model_init = model_init
        self.model = self._trained_model = self.call_model_init() if model is None else model
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.data_collator = self._default_collator() if data_collator is None else data_collator
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._check()
        self._describe()
        self.model_accepts_loss_kwargs = accepts_num_items(self.model)
        self.label_smoother = label_smoother(self.model, args.label_smoothing_factor)
        self.callback_handler = self._callback_handler(callbacks or [])
        self.control = TrainerControl()
        self.state = TrainerState()
        self.state.is_world_process_zero = self.state.is_local_process_zero = (
            self.is_world_process_zero()
        )
        self.is_in_train = False
        self.current_flos = 0
        self.first_tokens = 0
        self._compared: list[Dataset] = []  # datasets to evaluate that all ranks have alike
        self._engine: CapturedModel | None = None
        self._generator: Generator | None = None
        self.own_loss: LossOfTrainer | None = None
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        if getattr(self.model, "config", None) is not None:
            # as transformers does, for the config that is saved
            self.model.config.use_cache = args.use_cache

    def _check(self) -> None:
        args = self.args
        streamed = isinstance(self.train_dataset, IterableDataset)
        if args.parallel is not None and (self.train_dataset is None or streamed):
            kind = type(self.train_dataset).__name__
            reason = "the search captures the first batch of a train_dataset that can be read again"
            remedy = "Give one with a length, or search by merak-plan search and set plan"
            raise ConfigError("parallel", args.parallel, f"{reason}, not of {kind}", remedy)
        args.refuse_changes()
        refuse_override(self, MerakTrainer, args)
        with together(self.mesh.control, "cpu"):
            if args.should_save and args.output_dir is not None:
                check_directory("output_dir", args.output_dir, Path(args.output_dir))
        if not callable(self.data_collator):
            raise ConfigError(
                "data_collator", self.data_collator, "it cannot be called", "Give a function"
            )
        if not (self.compute_loss_func is None or callable(self.compute_loss_func)):
            raise ConfigError(
                "compute_loss_func",
                self.compute_loss_func,
                "it cannot be called",
                "Give a function",
            )
        refuse_beside_deepspeed(self, MerakTrainer)
        if args.eval_strategy != "no" and self.eval_dataset is None:
            strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
            raise ConfigError("eval_strategy", strategy, "there is no eval_dataset", "Give one")
        if args.save_strategy == "best" and args.metric_for_best_model is None:
            raise ConfigError(
                "save_strategy", "best", "metric_for_best_model is unset", "Name a metric"
            )

    def _default_collator(self) -> Callable:
        if isinstance(self.processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
            pads: Any = self.processing_class
            return DataCollatorWithPadding(pads)
        return default_data_collator

    def _callback_handler(self, callbacks: list) -> CallbackHandler:
        args = self.args
        for callback in callbacks:
            refuse_gradients(callback)
        try:
            reporters = get_reporting_integration_callbacks(args.report_to)
            chosen = [DefaultFlowCallback, *reporters, *callbacks]
            handler = CallbackHandler(chosen, self.model, self.processing_class, None, None)
        except (ValueError, ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                "report_to", args.report_to, reason, "Install it, or set report_to='none'"
            ) from error
        handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        return handler

    def _describe(self) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        sees = (
            "the loss of the script may see what stands at padding" if self._sees_padding() else ""
        )
        if self.args.neftune_noise_alpha is not None:
            sees = "the noise of neftune_noise_alpha depends on the length"
            embedding_of(self.model)  # a model without one is an error now
        self.facts = self._facts_of_model()
        padding = (
            Padding(None) if sees else padding_of(self.model, self.facts, self.args, tokenizer)
        )
        neutral = NeutralPadding(padding, self.mesh)
        named = (
            "length_buckets names the lengths of rows"
            if isinstance(self.args.buckets, tuple)
            else ""
        )
        self.feed = Feed(
            self.args,
            self.mesh,
            self.facts,
            neutral,
            collator=self.data_collator,
            tokenizer=tokenizer,
            rows=in_one_row(sees or named, padding.limit),
            masks=without_masks(sees),
        )

    def _sees_padding(self) -> bool:
        """Whether the loss may depend on padding."""
        return has_scripted_loss(self, MerakTrainer)

    # The job

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks, for agreement on the CPU."""
        return self.mesh.control

    def end(self) -> None:
        """Leave the job. The last call of a script, on every rank."""
        leave(self.args.world)

    # Model and engine

    @property
    def engine(self) -> CapturedModel:
        """This rank's part of the model; built at first use, from the first batch."""
        if self._engine is None:
            self._choose()
            self._build(0)
        assert self._engine is not None
        return self._engine

    def _build(self, epoch: int) -> None:
        """Build the engine for a run that starts at ``epoch``."""
        example = self.feed.example(self.train_dataset, self.eval_dataset, epoch)
        (example,), *_ = self.feed.prepare([example], self.counts_items)  # as it comes
        self._engine = self.create_engine(example)

    def create_engine(self, example: Batch) -> CapturedModel:
        """Capture the model, cut and shard it, load or initialize its weights. Collective."""
        began = time.time()
        name = type(self.model).__name__
        self._built_by = wishes(self.args)
        engine = self._captured(example, self._ranks)
        say(self.args, f"megatron_merak on {self.args.world}")
        say(self.args, f"{name}: captured, divided and filled in {time.time() - began:.1f} s")
        for note in notices(self.mesh.grid, self._ranks.nodes, str):
            say(self.args, note)
        for note in engine.notes:
            say(self.args, f"{name}: {note}")
        engine.share_weights()
        return engine

    def _captured(self, example: Batch, ranks: Ranks) -> CapturedModel:
        """Return this rank's part of the model under the arguments and on the mesh of now. Collective
        over ``ranks``.
        """
        named = self.model.named_parameters(remove_duplicate=False)
        recipe = Recipe(self.made_optimizer(), named, self.mesh.device)
        self.own_loss = self._loss_of_script()
        loss = None if self.own_loss is None else self.own_loss.own_loss()
        return build_engine(
            self.model,
            example,
            self.args,
            ranks=ranks,
            mesh=self.mesh,
            recipe=recipe,
            loss=loss,
        )

    def _choose(self) -> None:
        """Search what ``parallel`` leaves open, and make the mesh and the feed of that. Collective.

        At the first use, not in the constructor: a loss may read what a subclass sets after that.
        """
        args = self.args
        if args.parallel is None:
            return
        with same_afterwards(self.mesh.device):
            example = self.feed.example(self.train_dataset, None)
            (example,), *_ = self.feed.prepare([example], self.counts_items)
            own = self._loss_of_script()
            named = self.model.named_parameters(remove_duplicate=False)
            notes = choose(
                args,
                self._ranks,
                self.model,
                example,
                recipe=Recipe(self.made_optimizer(), named, self.mesh.device),
                loss=None if own is None else own.own_loss(),
                timed_steps=self._timed_steps,
            )
        self.mesh = mesh_of(args, self._ranks)
        self._describe()
        for note in notes:
            say(args, note)

    def _timed_steps(self, args: MerakArguments, ranks: Ranks, count: int) -> list[float]:
        """Return the seconds of so many steps under other arguments, all of them on the first batch.
        Nothing of the trainer is changed. Collective over ``ranks``.
        """
        own_args = self.args
        own_mesh = self.mesh
        buffers = values_of_buffers(self.model)
        try:
            self.args = args
            self.mesh = mesh_of(args, ranks)
            self._describe()
            example = self.feed.example(self.train_dataset, None)
            (first,), *_ = self.feed.prepare([example], self.counts_items)
            engine = self._captured(first, ranks)
            batches, *_ = self.feed.prepare(
                [example] * args.gradient_accumulation_steps, engine.accepts_num_items, engine
            )
            rates = ParameterGroups(self.made_optimizer(), self.model).of_engine()
            return time_steps(engine, batches, rates, count)
        finally:
            self.args = own_args
            self.mesh = own_mesh
            self._describe()
            restore_buffers(buffers)

    def _loss_of_script(self) -> LossOfTrainer | None:
        """Return what captures the script's loss; None for the model's own."""
        own = has_own_loss(self, MerakTrainer)
        return LossOfTrainer(self, is_overridden(self, MerakTrainer)) if own else None

    def gather_model(self) -> nn.Module:
        """Return the model with all trained weights on the first rank, which needs memory for them.
        Collective.

        Needed where ranks shard the weights, and again after more training. A callback may call it,
        on every rank.
        """
        attend("gather_model", self.control_group)
        check_model(self, saves=True)
        if self.engine.user_model is not None:
            self.engine.user_model.gather()
        return self.model

    # Training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train: from the newest checkpoint in ``output_dir`` (True), from a given one, or from the
        beginning.
        """
        if trial is not None:
            raise ConfigError(
                "trial", trial, "there is no search of hyperparameters", "Start one run per trial"
            )
        attend("train", self.control_group)
        directory = RunDirectory(self._output_dir, self.control_group)
        try:
            return self._train(directory, resume_from_checkpoint, ignore_keys_for_eval)
        finally:
            self.is_in_train = False
            directory.release()

    def _train(
        self, directory: RunDirectory, resume_from: str | bool | None, ignored: list[str] | None
    ) -> TrainOutput:
        self._choose()
        resume = None
        if resume_from is True or saves_for_signals(self.args):
            directory.hold()
        if resume_from:
            resume = directory.find(resume_from)
        if self.model_init is not None and self._engine is not None:
            set_seed(self.args.seed)
            self._engine = self._groups = self._moments = self._created_for = None
            self.model = self._trained_model = self.call_model_init()
        self.args.refuse_changes()
        if isinstance(self._engine, CapturedModel):
            refuse_late(self._built_by, wishes(self.args), ("lr", "weight_decay", "microbatches"))
        if isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin) and hasattr(
            self.model, "config"
        ):
            align_special_tokens(self.model, self.processing_class)
        check_training(self)
        if resume is not None:
            check_before_capture(resume / TRAINING_STATE, self.model, self.control_group)
        refuse_override(self, MerakTrainer, self.args)
        sampler = self._get_train_sampler(self.train_dataset)
        self.callback_handler.train_dataloader = self.feed.training(self.train_dataset, sampler)
        self.is_in_train = True
        if resume is not None and self._engine is None:
            self._build(int(trainer_state.read(resume, self.control_group).epoch or 0))
        check_reached(self)
        return TrainingLoop(self, directory, resume, ignored).run()

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        """Return this replica's micro-batches of a step as the engine takes them; count tokens and
        FLOPs.
        """
        if not self.model.training:
            self.model.train()  # as transformers leaves it; what is captured does not depend on it
        check_step(self)
        prepared, elements, tokens = self.feed.prepare(
            batches, self.engine.accepts_num_items, self.engine
        )
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += tokens
        self.current_flos += 6 * elements * self._parameters_used
        return prepared

    @functools.cached_property
    def _parameters_used(self) -> int:
        count = getattr(self.model, "num_parameters", None)
        return 0 if count is None else count(exclude_embeddings=True)

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return metrics of ``eval_dataset``, by default the trainer's, or of each of several under
        its name.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if dataset is None:
            raise ConfigError(
                "eval_dataset",
                None,
                "evaluation needs one",
                "Give evaluate or MerakTrainer a dataset",
            )
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, each in dataset.items():
                metrics |= self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        metrics = (
            self._predict(dataset, metric_key_prefix, loss_only, False, ignore_keys).metrics or {}
        )
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(
        self,
        test_dataset: Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions and labels of every sample, on every rank, and metrics if there are
        labels.
        """
        loss_only = self.args.prediction_loss_only
        output = self._predict(test_dataset, metric_key_prefix, loss_only, True, ignore_keys)
        self.control = self.callback_handler.on_predict(
            self.args, self.state, self.control, output.metrics
        )
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _predict(
        self,
        dataset: Dataset,
        prefix: str,
        loss_only: bool,
        everyone: bool,
        ignore_keys: list[str] | None,
    ) -> EvalLoopOutput:
        attend("evaluate or predict", self.control_group)
        self._choose()
        began = time.time()
        grid = self.mesh.grid
        self.model.eval()
        if self._engine is None and self.train_dataset is None and self.eval_dataset is None:
            self.eval_dataset = dataset
        check_model(self)
        self._compare(dataset)
        facts = self.facts if ignore_keys is None else self.facts.without(ignore_keys)
        batches = EvaluationBatches(
            self.feed.evaluation(dataset, self._get_eval_sampler(dataset)), grid.pp
        )
        self.callback_handler.eval_dataloader = batches
        evaluation = self._evaluation(batches, facts, loss_only, everyone)
        self.engine.share_statistics()
        output = evaluation.run(self.compute_metrics, prefix)
        assert output.num_samples is not None and output.metrics is not None
        steps = math.ceil(output.num_samples / (self.args.eval_batch_size * grid.dp))
        output.metrics.update(
            speed_metrics(prefix, began, num_samples=output.num_samples, num_steps=steps)
        )
        return output

    def _compare(self, dataset: Dataset) -> None:
        """Raise DataError on every rank if ranks evaluate different datasets; looks at each dataset
        once.
        """
        if self.control_group is None or any(dataset is each for each in self._compared):
            return
        agreed(dataset, self.control_group, "the dataset to evaluate")
        self._compared.append(dataset)

    def _evaluation(
        self, batches: EvaluationBatches, facts: ModelFacts, loss_only: bool, everyone: bool
    ) -> Evaluation:
        return Evaluation(
            batches,
            self.engine,
            facts,
            self.feed.neutral,
            args=self.args,
            loss_only=loss_only,
            everyone=everyone,
            after_batch=self._predicted,
            preprocess=self.preprocess_logits_for_metrics,
        )

    def _predicted(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    # Generation

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Return on every rank what ``model.generate`` of transformers returns for the trained
        weights. Collective.

        Every rank passes the same inputs ([rows, length] int64) and keywords. Sampling uses the
        first rank's torch generator. Nothing is cached: each token costs a forward of all tokens
        before it. Raises ConfigError for unsupported arguments.
        """
        attend("generate", self.control_group)
        check_model(self)
        self.engine.share_statistics()
        return self._generated(inputs, generation_config, kwargs)

    def _generated(self, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> Any:
        engine = self.engine
        if self._generator is None or self._generator.engine is not engine:
            padding = padding_of(self.model, self.facts, self.args, self.feed.tokenizer)
            self._generator = Generator(engine, self.model, padding)
        return self._generator.generate(inputs, generation_config, kwargs)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model, its tokenizer and the arguments, for ``from_pretrained`` of
        transformers.
        """
        attend("save_model", self.control_group)
        directory = Path(self._output_dir if output_dir is None else output_dir)
        check_model(self, saves=True)
        if _internal_call:  # all of the checkpoint is written again
            self._write_model(directory)
        else:
            saving = saving_of(self.args, self.control_group)
            saving.run(directory, lambda: self._write_model(directory))

    def _write_model(self, directory: Path) -> None:
        self.engine.save_hf(directory, self.feed.tokenizer, self.beside)
        text = self.args.to_json_string() + "\n"
        write_text(directory, TRAINING_ARGUMENTS, text, self.control_group)

    @property
    def _output_dir(self) -> str:
        """``args.output_dir``, for which transformers has a default."""
        assert self.args.output_dir is not None
        return self.args.output_dir

    # Loss

    @property
    def label_names(self) -> list[str]:
        """The inputs that are targets, as transformers determines them; ``args.label_names``
        overrides them.
        """
        return list(self.facts.label_names)

    @label_names.setter
    def label_names(self, value: list[str]) -> None:
        if isinstance(value, list) and value == self.label_names:
            return
        reason = "batches are built from the value of args when the trainer was constructed"
        raise ConfigError(
            f"{type(self).__name__}.label_names", value, reason, "Set args.label_names before"
        )

    @property
    def counts_items(self) -> bool:
        """Whether batches get ``num_items_in_batch``, the number of targets of the step."""
        return self.model_accepts_loss_kwargs or self.compute_loss_func is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of a batch, or (loss, outputs). Captured with the model: it runs once, before
        the first step.
        """
        return compute_loss(self, model, inputs, return_outputs, num_items=num_items_in_batch)

    # What a trainer over this one changes

    def _facts_of_model(self) -> ModelFacts:
        return ModelFacts.of(self.model, self.args, self.args.prediction_outputs)

    def note_reports(self, batches: list[Batch], prepared: list[Batch]) -> None:
        """Called after the backwards of a step; ``engine.reported`` returns the outputs of its
        micro-batches.

        batches:  as they were loaded.
        prepared: as they ran.
        """

    # Place among the ranks

    def is_world_process_zero(self) -> bool:
        return self.args.process_index == 0

    is_local_process_zero = is_world_process_zero

    # Model and data

    def call_model_init(self, trial: None = None) -> nn.Module:
        """Return a new model from ``model_init``; called at construction and by every ``train``."""
        make = self.model_init
        assert make is not None, "asked only where there is no model"
        count = number_of_arguments(make)
        if count > 1:
            raise ConfigError(
                "model_init",
                f"({count} arguments)",
                "it is called with at most one",
                "Take no more",
            )
        model = make(trial) if count else make()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "model_init",
                f"(returned {type(model).__name__})",
                "it is not a model",
                "Return a module",
            )
        return model

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """Return the sampler of training samples, of all replicas together; None: the dataset's
        order. Called on every rank.
        """
        return self.feed.training_sampler(
            self.train_dataset if train_dataset is None else train_dataset
        )

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        """Return the sampler of an evaluation; None: the dataset's order. Called on every rank."""
        return self.feed.evaluation_sampler(eval_dataset)

    # Optimizer and schedule

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Parameter groups and their rates; before training, the optimizer that was passed or
        created, or None.
        """
        return self._created_optimizer if self._groups is None else self._groups

    @optimizer.setter
    def optimizer(self, value: torch.optim.Optimizer) -> None:
        if self._groups is not None or not isinstance(value, torch.optim.Optimizer):
            raise ConfigError(
                f"{type(self).__name__}.optimizer", "(set)", OPTIMIZER.why, OPTIMIZER.instead
            )
        self._created_optimizer = value

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Any, Any]:
        """Return the optimizer class that ``args`` name, and its arguments."""
        return class_and_arguments(args, model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create an optimizer of the model's parameters, unless there is one; called when the model
        is captured.

        Optimizers like it step the shards of ranks.
        """
        if self.optimizer is None:
            model = self.model if model is None else model
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, model
            )
            decayed = decayed_by_deepspeed(self.args, model) or self.get_decay_parameter_names(
                model
            )
            self.optimizer = make(model, self.args.weight_decay, decayed, chosen)
        assert self.optimizer is not None
        return self.optimizer

    def made_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that was passed, or that ``create_optimizer`` sets.

        Another model, or other trainable parameters, get a new one.
        """
        trained = (
            id(self.model),
            [name for name, p in self.model.named_parameters() if p.requires_grad],
        )
        if self._given_optimizer is None and self._created_for != trained:
            groups = self._groups
            self._created_optimizer = None
            self._groups = None
            self.create_optimizer()
            self._created_for = trained
            self._groups = groups
        if self._created_optimizer is None:
            reason = "it did not set self.optimizer"
            raise ConfigError(
                f"{type(self).__name__}.create_optimizer", "(called)", reason, "Set it there"
            )
        return self._created_optimizer

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None before training."""
        return self._scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: LRScheduler) -> None:
        if self._groups is None or not self._groups.moves(value):
            reason = "it is not a schedule of trainer.optimizer"
            raise ConfigError(
                "lr_scheduler", type(value).__name__, reason, "Override create_scheduler"
            )
        self._scheduler = value

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that take weight decay."""
        return decayed_parameters(model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: ParameterGroups | None = None
    ) -> LRScheduler:
        """Return a schedule of ``optimizer``, by default ``self.optimizer``; called by every
        ``train``.
        """
        stepped = self.optimizer if optimizer is None else optimizer
        assert stepped is not None, "it is made before its schedule"
        scheduler = schedule(self.args, num_training_steps, stepped)
        self.lr_scheduler = scheduler
        return scheduler

    def learning_rate(self, steps: int) -> LearningRate:
        """Return the rates of a run of ``steps``: a new schedule of the groups that earlier runs
        left, as in ``Trainer``.
        """
        if self._groups is None:
            self._groups = ParameterGroups(self.made_optimizer(), self.model)
        self._scheduler = None
        scheduler = (
            self.create_scheduler(steps) if self._given_scheduler is None else self._given_scheduler
        )
        if scheduler is not None or self._scheduler is None:
            self.lr_scheduler = scheduler
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = (
            self._groups,
            self._scheduler,
        )
        chosen: Any = self._scheduler  # set beside this method's eyes
        return LearningRate(self._groups, chosen)

    # Logs and callbacks

    def store_flos(self) -> None:
        """Add the FLOPs since the last call to the state."""
        self.state.total_flos += float(self.current_flos)
        self.current_flos = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to the log history and call the callbacks."""
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                tokens = state.num_input_tokens_seen - self.first_tokens
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        state.log_history.append({**logs, "step": state.global_step})
        self.control = self.callback_handler.on_log(self.args, state, self.control, logs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        refuse_gradients(callback)
        self.callback_handler.add_callback(callback)

    def pop_callback(
        self, callback: type[TrainerCallback] | TrainerCallback
    ) -> TrainerCallback | None:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        self.callback_handler.remove_callback(callback)
