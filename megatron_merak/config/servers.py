"""Parameter servers: contradictions with other settings."""

from pathlib import Path

from ..counting import counted
from ..errors import ConfigError
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .sections import CheckpointConfig, LoggingConfig, TrainConfig
from .settings import flag_name

STRATEGY = "--data-parallel-strategy"
SNAPSHOT_INTERVAL = 100


def snapshot_directory(save: str) -> Path:
    """Return the directory of the snapshots of a job that saves to ``save``."""
    return Path(save) / "parameter_servers"


def check_servers(
    parallel: ParallelConfig,
    train: TrainConfig,
    checkpoint: CheckpointConfig,
    logging: LoggingConfig,
    optimizer: OptimizerConfig,
) -> None:
    """Raise ConfigError for settings that parameter servers do not support."""
    strategy = parallel.data_parallel_strategy
    if not parallel.served:
        return
    if strategy == "ps-sync" and parallel.ps_max_staleness is not None:
        reason = f"has no effect with {STRATEGY} ps-sync, whose gradients are never stale"
        raise ConfigError(
            "--ps-max-staleness", parallel.ps_max_staleness, reason, "Leave it out, or use ps-async"
        )
    if parallel.ps_snapshot_interval is not None and checkpoint.save is None:
        reason = "has no effect without --save, which contains the snapshots"
        raise ConfigError(
            "--ps-snapshot-interval", parallel.ps_snapshot_interval, reason, "Give --save DIRECTORY"
        )
    replicated = (
        "parameter servers keep the optimizer's state, and workers replicate weights and gradients"
    )
    steps = "workers of parameter servers use one batch size and count in --train-iters"
    refused = {
        "use_distributed_optimizer": (parallel.use_distributed_optimizer, replicated),
        "data_parallel_sharding_strategy": (
            parallel.sharding != "no_shard" and parallel.sharding,
            replicated,
        ),
        "plan": (parallel.plan, "a plan does not hold what parameter servers need"),
        "train_samples": (train.train_samples, steps),
        "rampup_batch_size": (" ".join(train.rampup_batch_size), steps),
        "step_batch_size_schedule": (train.step_batch_size_schedule, steps),
        "calculate_per_token_loss": (
            train.calculate_per_token_loss,
            "a worker does not know the token counts of the others",
        ),
        "rerun_mode": (
            train.rerun_mode != "disabled" and train.rerun_mode,
            "a step cannot be computed again from weights that other workers update",
        ),
        "log_num_zeros_in_grad": (
            logging.log_num_zeros_in_grad,
            "no rank has the gradient of all workers",
        ),
        "optimizer": (
            optimizer.optimizer != "adam" and optimizer.optimizer,
            "parameter servers update by AdamW",
        ),
        "use_precision_aware_optimizer": (
            optimizer.use_precision_aware_optimizer,
            "servers store the moments, in fp32",
        ),
        "async_save": (
            checkpoint.async_save,
            "a worker saves what it fetches from servers for that",
        ),
        "save_increment_interval": (
            checkpoint.save_increment_interval,
            "the gradient that updates the weights is on servers, not on a worker",
        ),
        "timeline": (logging.timeline, "workers have no common clock"),
    }
    for name, (value, reason) in refused.items():
        if value:
            remedy = f"Leave it out, or use {STRATEGY} allreduce"
            raise ConfigError(flag_name(name), value, f"{reason} ({STRATEGY} {strategy})", remedy)
    if parallel.distributed_backend == "emu":
        reason = f"models collectives, but {STRATEGY} {strategy} has none between workers"
        raise ConfigError(
            "--distributed-backend", "emu", reason, "Use python -m benchmarks servers to model it"
        )
    if parallel.distributed_backend == "mpi":
        reason = f"has one group of all ranks, but {STRATEGY} {strategy} needs one per worker"
        raise ConfigError("--distributed-backend", "mpi", reason, "Use gloo")


def check_workers(parallel: ParallelConfig, world_size: int) -> None:
    """Raise ConfigError if the other ranks do not form workers."""
    servers = parallel.num_parameter_servers
    replica = parallel.ranks_of_replica
    left = world_size - servers
    if left < replica:
        reason = (
            f"leaves {max(left, 0)} of {world_size} ranks, and a worker takes {replica} "
            "(tensor x pipeline parallel)"
        )
        raise ConfigError(
            "--num-parameter-servers", servers, reason, _fewer_servers(servers, replica, world_size)
        )
    if left % replica:
        near = [n for n in (servers + left % replica - replica, servers + left % replica) if n >= 0]
        reason = (
            f"leaves {left} of {world_size} ranks, not a multiple of the {replica} ranks of "
            "a worker"
        )
        raise ConfigError(
            "--num-parameter-servers", servers, reason, f"Use {' or '.join(map(str, near))}"
        )


def _fewer_servers(servers: int, replica: int, world_size: int) -> str:
    """Return numbers of servers that leave workers of ``replica`` ranks, or a number of ranks."""
    fits = range(world_size % replica, world_size - replica + 1, replica)
    more = f"start {replica + servers} ranks"
    if not fits:
        return more.capitalize()
    near = f"at most {fits[-1]}" if replica == 1 and fits[-1] else " or ".join(map(str, fits[-2:]))
    return f"Use {near}, or {more}"


def worker_note(parallel: ParallelConfig, workers: int) -> str:
    """Return what a plan made by `of_worker` does not say."""
    servers = counted(parallel.num_parameter_servers, "parameter server")
    where = servers if parallel.num_parameter_servers else "servers beside the workers' ranks"
    return (
        f"The plan is that of one of {counted(workers, 'worker')} ({STRATEGY} "
        f"{parallel.data_parallel_strategy}): "
        f"its times are without the exchange with {where}, which keep the optimizer's state that "
        "its memory counts."
    )
