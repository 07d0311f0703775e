"""The ranks of a job that ``MerakArguments`` describe."""

import logging
from datetime import timedelta
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..parallel.ranks import Ranks
from ..training.meeting import meeting
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
    shown = args.to_dict() | {
        "num_distributed_optimizer_instances": instances,
        "data_parallel_sharding_strategy": args.sharding,
        "offload_model_states": args.offloads_model_states,
        "deepspeed": deepspeed.config_of(args),  # hosts may have different files of one name
    }
    return meeting(
        args.world,
        timedelta(seconds=args.ddp_timeout),
        {name: value for name, value in shown.items() if name not in _OWN},
        {name: path for name in FILES if (path := getattr(args, name))},
        remedy="Start all ranks with the same arguments",
        say=partial(logging.getLogger(__name__).warning, "%s"),
        preflight=(args.output_dir or "") if args.preflight else None,
        # another rank may be in a call of an earlier trainer
        call="the construction of a trainer or an Engine",
    )
