"""A pretraining job of any HuggingFace causal language model: capture, plan, build, run, and save it as HuggingFace."""

import dataclasses
import datetime
from pathlib import Path

from torch import nn

from ..checkpoint.save import check_finite
from ..config import DataConfig, HFConfig, of_worker
from ..data.build import Datasets, build_datasets, build_tokenizer
from ..data.tokenizer import Tokenizer
from ..errors import DataError
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import build_mesh, control_group
from ..parallel.nodes import find_nodes, located
from ..parallel.same_software import check_same_software
from ..planner.make import grid_of
from ..stages.captured import CapturedModel
from ..stages.devices import cluster_of
from ..stages.optimizer_state import OptimizerOf
from .console import print_fitted
from .hf_model import build_model, known_tokens
from .job import Job, agree, opening
from .outputs import check_outputs
from .run_job import run_job
from .served import mesh_of_worker
from .token_model import TokenModel
from .trainer import Trainer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def pretrain_hf(config: HFConfig, world: World, notices: tuple[str, ...] = ()) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that can be known.

    notices: further lines for the first rank to print at the start.
    """
    role = world.role
    workers = 1 if world.role is None else world.role.workers
    of_worker(config, workers).validate(world.size)
    model = build_model(config.model)
    as_passed = config
    config, tokenizer = with_tokenizer(config, model)
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    control = control_group(world.size, timeout)
    check_same_software(control, world.device)
    agree(config, control)
    own = of_worker(config, workers)
    nodes = find_nodes(world, control)
    grid = grid_of(own, world.size)
    mesh = build_mesh(
        grid,
        world.rank,
        world.device,
        timeout=timeout,
        clock=world.clock,
        collectives=world.collectives,
        control=control,
        instances=own.parallel.num_distributed_optimizer_instances,
        pulse=world.pulse,
    )
    mesh = mesh if role is None else mesh_of_worker(mesh, config, role)
    with together(mesh.control, "cpu"):
        check_outputs(config, world.is_last)
        datasets = build_datasets(config, tokenizer, world.size if role is None else role.size)
    with together(mesh.control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), nodes)

    def make(optimizer_of: OptimizerOf) -> HFJob:
        trained = TokenModel(model, config, mesh, cluster, optimizer_of=optimizer_of)
        if world.rank == 0 and mesh.worker == 0:
            print_fitted(opening(config, trained.plan, world, nodes, notes=(*notices, *trained.notes)))
        return HFJob(trained, Trainer(config, trained), datasets)

    run_job(make, config, world, as_passed)


def with_tokenizer(config: HFConfig, model: nn.Module) -> tuple[HFConfig, Tokenizer]:
    """Return the run's configuration, completed by what ``--model`` determines, and its tokenizer. Raises DataError."""
    data = config.data
    known_ids = known_tokens(model)
    ids = config.model.vocab_size
    if data.tokenizer_type == "NullTokenizer" or (data.tokenizer_type is None and data.mock_data):
        extra = data.tokenizer_type is not None  # a NullTokenizer adds the end of a document
        ids = known_ids - extra if ids is None else ids
        if ids + extra > known_ids:
            reason = f"the model's embedding has {known_ids} rows" + ", and NullTokenizer adds a token" * extra
            raise DataError("--vocab-size", ids, reason, f"Use at most {known_ids - extra}")
    else:
        data = _own_tokenizer(data, Path(config.model.model))
        ids = None
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, vocab_size=ids))
    tokenizer = build_tokenizer(config)
    if tokenizer.vocab_size > known_ids:
        reason = f"it has ids up to {tokenizer.vocab_size - 1}, and the model's embedding has {known_ids} rows"
        raise DataError("--tokenizer-model", data.tokenizer_model, reason, "Use the model's own tokenizer")
    return config, tokenizer


def _own_tokenizer(data: DataConfig, model: Path) -> DataConfig:
    """Use the tokenizer in the model's directory, if none is named."""
    if data.tokenizer_model is not None:
        return data
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        remedy = "Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer"
        raise DataError("--tokenizer-type", data.tokenizer_type or "(missing)", f"{model} has no tokenizer", remedy)
    return dataclasses.replace(data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))


class HFJob(Job):
    """The training loop of a job; at its end the model is saved as a HuggingFace directory."""

    def __init__(self, model: CapturedModel, trainer: Trainer, datasets: Datasets):
        super().__init__(trainer, datasets)
        self.model = model

    def finish(self) -> None:
        assert isinstance(self.config, HFConfig)
        directory = self.config.checkpoint.save_hf
        if directory is not None:
            check_finite(self.trainer.kinds(True), self.mesh.control, "cpu")
            tokenizer = self._tokenizer()
            self.saving.run(directory, lambda: self.model.save_hf(directory, tokenizer))
            self.say(f"saved {directory} for HuggingFace")

    def _tokenizer(self):
        """Return the tokenizer to save with the model."""
        source = self.config.data.tokenizer_model or self.config.model.model
        if self.mesh.rank > 0 or not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
