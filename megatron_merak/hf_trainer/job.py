"""The ranks and process groups of a job that ``MerakArguments`` describe."""

import datetime
from typing import Any

from ..errors import ConfigError
from ..parallel.agree import gather_json
from ..parallel.attendance import attend
from ..parallel.mesh import Mesh, build_mesh, control_group
from ..parallel.same_software import check_same_software
from ..training.same_files import check_same_files
from .arguments import deepspeed
from .arguments.fields import FILES
from .arguments.instances import grid_of, instances_of
from .arguments.merak_arguments import MerakArguments

_OWN = frozenset({"local_rank", "log_level", "log_level_replica", "disable_tqdm"})  # a rank's own affair


def mesh_of(args: Any) -> Mesh:
    """Return the mesh of groups that the arguments describe. Collective over all ranks.

    Raises ConfigError on every rank unless all have the same MerakArguments.
    """
    if not isinstance(args, MerakArguments):
        raise ConfigError("args", type(args).__name__, "it has no degrees of parallelism", "Make MerakArguments")
    world = args.world
    instances = instances_of(args)
    timeout = datetime.timedelta(seconds=args.ddp_timeout)
    control = control_group(world.size, timeout)
    attend("the construction of a trainer or an Engine", control)  # another rank may be in a call of an earlier one
    check_same_software(control, world.device)
    shown = args.to_dict() | {
        "num_distributed_optimizer_instances": instances,
        "data_parallel_sharding_strategy": args.sharding,
        "deepspeed": deepspeed.config_of(args),  # hosts may have different files of one name
    }
    all_arguments = gather_json({k: v for k, v in shown.items() if k not in _OWN}, control, "cpu")
    for rank, other in enumerate(all_arguments):
        for name, value in other.items():
            if value != (first := all_arguments[0][name]):
                raise ConfigError(
                    name, value, f"rank {rank} has it, rank 0 has {first}", "Start all ranks with the same arguments"
                )
    check_same_files({name: path for name in FILES if (path := getattr(args, name))}, control)
    where = (world.rank, world.device, timeout, world.clock, world.collectives, control)
    return build_mesh(grid_of(args), *where, instances, pulse=world.pulse)
