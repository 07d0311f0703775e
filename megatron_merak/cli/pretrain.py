"""The two training commands: parse the command line, find this process's position in the job, run
the job.

torch is imported after the command line has been parsed. If several ranks raise the same error, one
of them prints it, in one line.
"""

import math
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..arguments import build_parser, expanded, read
from ..config import Config, HFConfig, RunConfig
from ..errors import ConfigError, MerakError
from ..extras import installed_by
from ..megatron_flags import without_effect
from ..parallel.position import launched, launcher, position, tell
from .door import check_words, occupy_closed_streams
from .launcher import FLAG, start, without_flag
from .supervised import supervise
from .words import described, error_text, program

if TYPE_CHECKING:
    from ..parallel.launch import World
    from ..parameter_server.roles import Role
    from ..training.strategy import Strategy

Run = TypeVar("Run", bound=RunConfig)
# Runs a rank: the settings, its world, further lines to print, and its strategy.
RankJob = Callable[[Run, "World", tuple[str, ...], "Strategy"], None]

GPT = """Pretrain a GPT with data x tensor x pipeline parallelism, on CPUs or GPUs.

one process:      merak-pretrain --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
                      --micro-batch-size 4 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 1000 --log-interval 1
eight processes:  merak-pretrain --nproc-per-node 8 --tensor-model-parallel-size 2 \\
                      --pipeline-model-parallel-size 2 --global-batch-size 32 ... (the same flags)
several hosts:    torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_merak pretrain ... (the same flags)
"""
HF = """Pretrain or fine-tune any HuggingFace causal language model with data x tensor x pipeline parallelism.

from a config.json:  merak-pretrain-hf --model config.json --seq-length 128 --micro-batch-size 4 --train-iters 20 \\
                         --lr 1e-3 --mock-data --log-interval 1
from weights:        merak-pretrain-hf --nproc-per-node 8 --model DIRECTORY --data-path PREFIX \\
                         --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save-hf TRAINED ...
several hosts:       torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_merak pretrain-hf ... (the same flags)
"""
INTERRUPTED = 128 + signal.SIGINT
LIBRARIES = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "safetensors")


def gpt(arguments: Sequence[str] | None = None) -> None:
    """The command merak-pretrain, and pretrain_gpt.py."""

    def job(config: Config, world: "World", notices: tuple[str, ...], strategy: "Strategy") -> None:
        from ..training.pretrain import pretrain

        pretrain(config, world, notices, strategy)

    _command(Config, job, described(GPT, "merak-pretrain"), "pretrain", arguments=arguments)


def hf(arguments: Sequence[str] | None = None) -> None:
    """The command merak-pretrain-hf, and pretrain_hf.py."""

    def job(
        config: HFConfig, world: "World", notices: tuple[str, ...], strategy: "Strategy"
    ) -> None:
        from ..training.pretrain_hf import pretrain_hf

        pretrain_hf(config, world, notices, strategy)

    _command(HFConfig, job, described(HF, "merak-pretrain-hf"), "pretrain-hf", arguments=arguments)


def _command(
    kind: type[Run],
    job: RankJob[Run],
    description: str,
    command: str,
    arguments: Sequence[str] | None,
) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    occupy_closed_streams()  # a job goes on without a console
    try:
        config, ranks = _understood(kind, description, words)
        if ranks is None:
            _train(config, job, without_effect(words)[1])
        else:
            sys.exit(_start(config, ranks, command, words))
    except KeyboardInterrupt:
        # torchrun passes on what the terminal has sent already
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell(f"{program()}: interrupted")
        _abandon(INTERRUPTED)


def _understood(kind: type[Run], description: str, words: Sequence[str]) -> tuple[Run, int | None]:
    """Return the configuration, and the number of ranks to start or None; exit with status 2 if the
    command line is invalid."""
    parser = build_parser(description, kind)
    parser.usage = f"{program()} [{FLAG} RANKS] FLAGS"
    group = parser.add_argument_group("processes")
    text = "start this many ranks on this host; use torchrun for several hosts [unset]"
    group.add_argument(FLAG, metavar="N", default=None, help=text)
    try:
        check_words(words)
        flags = expanded(words, kind)
        config, own = read(parser, flags, kind, _decided(kind, flags))
        ranks = None if own.nproc_per_node is None else _ranks(own.nproc_per_node)
        if ranks is not None:
            _check(config, ranks)
    except MerakError as error:
        tell(error_text(error))
        sys.exit(2)
    return config, ranks


def _start(config: RunConfig, ranks: int, command: str, words: Sequence[str]) -> int:
    """Start the ranks and return their exit status; with parameter servers the job survives failed
    ranks.
    """
    if not config.parallel.served:
        # a step and a checkpoint may take as long as a collective may
        saves = config.checkpoint.save is not None
        patience = math.ceil(60 * config.parallel.distributed_timeout_minutes) if saves else None
        return start(ranks, command, words, patience)
    return supervise(ranks, command, without_flag(words), config.parallel.num_parameter_servers)


def check_command(command: str, words: Sequence[str], ranks: int) -> RunConfig:
    """Return the configuration of a command line of "pretrain" or "pretrain-hf". Raises a
    MerakError if it cannot run on ``ranks`` ranks.
    """
    kind: type[RunConfig] = Config if command == "pretrain" else HFConfig
    flags = expanded(words, kind)
    config = read(build_parser("", kind), flags, kind, _decided(kind, flags))[0]
    _check(config, ranks)
    return config


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            FLAG, text, "it is not a number of ranks", "Give a whole number of at least 1"
        )
    by = launcher().name
    if launched() or position()[1] > 1:
        raise ConfigError(
            FLAG,
            text,
            f"{by} has already started this process",
            f"Give {FLAG} only to torchrun, or only to this command"
            if launched()
            else f"Let {by} start one process, or every rank",
        )
    return int(text)


def _decided(kind: type[RunConfig], words: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a stored plan, or the search for one, decides."""
    names = [argument.partition("=")[0] for argument in words]
    if "--plan" in names:
        from ..training.plan_file import decided

        return decided(kind, words)
    if "--parallel" in names:
        from ..training.searched import PIN, stand_ins

        return stand_ins(words, PIN)
    return {}


def _check(config: RunConfig, size: int) -> None:
    """Raise a MerakError if the configuration does not fit a job of ``size`` ranks."""
    if config.parallel.plan is not None:
        from ..training.plan_file import check_plan_ranks

        check_plan_ranks(config, size)
    if config.parallel.parallel is not None:
        from ..training.searched import check

        check(config)
    else:
        config.validate(size)


def _train(config: Run, job: RankJob[Run], notices: tuple[str, ...]) -> None:
    rank: int | str = "?"
    try:
        rank, size = position()
        _check(config, size)
        from ..parallel.interruption import Interrupted
        from ..parallel.launch import launch, leave
        from ..parameter_server.roles import role_of

        parallel = config.parallel
        train = config.train
        role = role_of(parallel, rank, size)
        world = launch(
            parallel.distributed_backend,
            parallel.distributed_timeout_minutes,
            train.deterministic_mode,
            parallel.emulate,
            fp32_matmul=train.fp32_matmul_precision,
            team=None if role is None else role.team,
        )
        status = 0
        try:
            if role is not None and role.only_serves:
                from ..parameter_server.serving import serve

                serve(config, world, role)
            else:
                job(config, world, notices, _strategy(config, world, role))
        except Interrupted as stop:
            status = stop.status
            if stop.text:
                tell(f"{program()}: {stop.text}")
    except MerakError as error:
        if error.trace:
            tell(error.trace)
        tell(f"rank {rank}: {error}", alike=str(error))
        _abandon(error.status)
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        tell(f"{program()}: {error.name} is not installed. Install it: {installed_by()}.")
        _abandon(1)
    leave(world)
    if status:
        sys.exit(status)


def _strategy(config: RunConfig, world: "World", role: "Role | None") -> "Strategy":
    """Return the strategy of a rank that trains. role: None without parameter servers."""
    if role is None:
        from ..training.strategy import ALONE

        return ALONE
    from ..parameter_server.worker import Worker

    return Worker(config, world, role)


def _abandon(status: int) -> NoReturn:
    """End this process without waiting for the other ranks; end it immediately if they may be
    connected.
    """
    launch = sys.modules.get("megatron_merak.parallel.launch")
    if launch is not None:
        launch.abandon(status)
    sys.exit(status)
