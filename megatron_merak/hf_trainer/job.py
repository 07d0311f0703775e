"""The ranks of a job that ``MerakArguments`` describe."""

import datetime
import logging
from typing import Any

from ..errors import ConfigError
from ..parallel.agree import gather_json
from ..parallel.ranks import Ranks, meet
from ..preflight.stage import passed
from ..training.same_files import check_same_files
from .arguments import deepspeed
from .arguments.fields import FILES
from .arguments.instances import instances_of
from .arguments.merak_arguments import MerakArguments

# a rank's own affair
_OWN = frozenset({"local_rank", "log_level", "log_level_replica", "disable_tqdm"})


def ranks_of(args: Any) -> Ranks:
    """Return the ranks of the job, which were all given the same arguments. Collective over all
    ranks.

    Raises ConfigError on every rank unless all have the same MerakArguments.
    """
    if not isinstance(args, MerakArguments):
        raise ConfigError(
            "args", type(args).__name__, "it has no degrees of parallelism", "Make MerakArguments"
        )
    instances = instances_of(args)
    timeout = datetime.timedelta(seconds=args.ddp_timeout)
    # another rank may be in a call of an earlier trainer
    ranks = meet(args.world, timeout, call="the construction of a trainer or an Engine")
    shown = args.to_dict() | {
        "num_distributed_optimizer_instances": instances,
        "data_parallel_sharding_strategy": args.sharding,
        "deepspeed": deepspeed.config_of(args),  # hosts may have different files of one name
    }
    all_arguments = gather_json(
        {k: v for k, v in shown.items() if k not in _OWN}, ranks.control, "cpu"
    )
    for rank, other in enumerate(all_arguments):
        for name, value in other.items():
            if value != (first := all_arguments[0][name]):
                raise ConfigError(
                    name,
                    value,
                    f"rank {rank} has it, rank 0 has {first}",
                    "Start all ranks with the same arguments",
                )
    if args.preflight:
        told = passed(ranks, args.output_dir or "")
        if ranks.rank == 0:
            logging.getLogger(__name__).warning("%s", told)
    check_same_files({name: path for name in FILES if (path := getattr(args, name))}, ranks.control)
    return ranks
