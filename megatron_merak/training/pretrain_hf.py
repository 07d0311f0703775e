"""A pretraining job of any HuggingFace causal language model: capture, plan, build, run, and save
it as HuggingFace.
"""

import dataclasses
from pathlib import Path

from torch import nn

from ..checkpoint.save import check_finite
from ..cluster import Cluster
from ..config import HFConfig, HFDataConfig
from ..data.build import Datasets, build_tokenizer
from ..data.loader import BatchLoader
from ..data.tokenizer import Tokenizer
from ..errors import DataError
from ..parallel.agree import together
from ..parallel.interruption import Interruption
from ..parallel.launch import World
from ..parallel.mesh import Mesh
from ..parallel.ranks import Ranks
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..plan import Plan
from ..stages.blueprint import Blueprint
from ..stages.captured import CapturedModel
from ..stages.model_config import config_of
from ..stages.optimizer_state import OptimizerOf
from .hf_batches import TokenBatches, shared_samples
from .hf_model import (
    beyond_positions,
    blueprint_of,
    build_model,
    known_tokens,
    rules_text,
    traced_of,
)
from .job import Job
from .load_check import check_load
from .session import open_session, run_session
from .strategy import ALONE, Strategy
from .token_model import TokenModel
from .trainer import Trainer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
)


def pretrain_hf(
    config: HFConfig, world: World, notices: tuple[str, ...] = (), strategy: Strategy = ALONE
) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that
    can be known.

    notices:  further lines for the first rank to print at the start.
    strategy: --data-parallel-strategy.
    """
    if config.parallel.parallel is None:
        strategy.own(config).validate(world.size)
    ranks = open_session(config, world, strategy)
    with together(ranks.control, "cpu"):
        rules_text(config.model.tensor_parallel_rules)
        model = build_model(config.model)
        complete, tokenizer = with_tokenizer(config, model)
    check_load(complete, config_of(model), ranks.control)

    def planning(
        config: HFConfig, ranks: Ranks, cluster: Cluster, again: bool = False
    ) -> PlannedTokens:
        with together(ranks.control, "cpu"):
            # steps change buffers of a model
            own_model = build_model(config.model) if again else model
        traced, batches = traced_of(own_model, config, ranks)
        own = strategy.own(config)
        with (
            SearchProgress(SEARCHING, shown=ranks.rank == 0) as progress,
            together(ranks.control, "cpu"),
        ):
            blueprint = blueprint_of(
                traced, own, world.size, cluster, progress=progress, rank=ranks.rank
            )
        return PlannedTokens(config, blueprint, batches)

    run_session(
        planning,
        complete,
        as_passed=config,
        world=world,
        ranks=ranks,
        tokenizer=tokenizer,
        notices=(*notices, *beyond_positions(model, complete.model.seq_length)),
        strategy=strategy,
    )


@dataclasses.dataclass(frozen=True)
class PlannedTokens:
    """A captured causal language model with its plan, and how its batches are made; a `Planned`."""

    config: HFConfig
    blueprint: Blueprint
    batches: TokenBatches

    @property
    def plan(self) -> Plan:
        return self.blueprint.plan

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> TokenModel:
        return TokenModel(
            self.blueprint, self.batches, self.config, mesh, optimizer_of=optimizer_of
        )

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        return HFJob(trainer, datasets)


def with_tokenizer(config: HFConfig, model: nn.Module) -> tuple[HFConfig, Tokenizer]:
    """Return the run's configuration, completed by what ``--model`` determines, and its tokenizer.
    Raises DataError.
    """
    data = config.data
    known_ids = known_tokens(model)
    ids = config.model.vocab_size
    if data.tokenizer == "NullTokenizer" or (data.tokenizer is None and data.mock_data):
        extra = data.tokenizer is not None  # a NullTokenizer adds the end of a document
        ids = known_ids - extra if ids is None else ids
        if ids + extra > known_ids:
            reason = f"the model's embedding has {known_ids} rows"
            if extra:
                reason += ", and NullTokenizer adds a token"
            raise DataError("--vocab-size", ids, reason, f"Use at most {known_ids - extra}")
    else:
        data = _own_tokenizer(data, Path(config.model.model))
        ids = None
    config = dataclasses.replace(
        config, data=data, model=dataclasses.replace(config.model, vocab_size=ids)
    )
    tokenizer = build_tokenizer(config)
    if tokenizer.vocab_size > known_ids:
        reason = (
            f"it has ids up to {tokenizer.vocab_size - 1}, and the model's embedding has "
            f"{known_ids} rows"
        )
        named = data.vocab_file or data.tokenizer_model
        flag = "--vocab-file" if data.vocab_file else "--tokenizer-model"
        raise DataError(flag, named, reason, "Use the model's own tokenizer")
    return config, tokenizer


def _own_tokenizer(data: HFDataConfig, model: Path) -> HFDataConfig:
    """Use the tokenizer in the model's directory, if none is named."""
    if data.tokenizer_model is not None or data.tokenizer not in (
        None,
        "HuggingFaceTokenizer",
    ):
        return data
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        remedy = "Give --tokenizer-model, or use NullTokenizer"
        if data.tokenizer is None:
            remedy = "Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer"
        raise DataError(
            "--tokenizer-type",
            data.tokenizer or "(missing)",
            f"{model} has no tokenizer",
            remedy,
        )
    return dataclasses.replace(
        data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model)
    )


class HFJob(Job):
    """The training loop of a job; at its end the model is saved as a HuggingFace directory."""

    def _steps(self, loader: BatchLoader, interruption: Interruption) -> None:
        model = self.trainer.model
        assert isinstance(self.config, HFConfig) and isinstance(model, TokenModel)
        if self.config.data.sft:
            shared = shared_samples(loader.dataset, self.plan.micro_batch_size)
            if shared is not None:
                model.check_apart(shared)
        super()._steps(loader, interruption)

    def finish(self) -> None:
        model = self.trainer.model
        assert isinstance(self.config, HFConfig) and isinstance(model, CapturedModel)
        directory = self.config.checkpoint.save_hf
        if directory is not None:
            check_finite(self.trainer.kinds(True), self.mesh.control, "cpu")
            tokenizer = self._tokenizer()
            self.saving.run(directory, lambda: model.save_hf(directory, tokenizer))
            self.say(f"saved {directory} for HuggingFace")

    def _tokenizer(self):
        """Return the tokenizer to save with the model."""
        data = self.config.data
        source = data.tokenizer_model or self.config.model.model
        if (
            self.mesh.rank > 0
            or data.vocab_file
            or not any((Path(source) / name).is_file() for name in TOKENIZER_FILES)
        ):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
