"""Joins and leaves the job of a launcher, and selects this rank's device. For the rank itself see
`position`.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ..cluster import Cluster, find_cluster
from ..config.backends import BACKENDS
from ..counting import counted
from ..errors import LaunchError, MerakError
from . import emulated, mpi_group, peer_group, shared_memory, staged
from .clock import Clock, LogicalClock, WallClock
from .listening import loopback_interface, new_secret, open_server
from .meeting import ATTEMPT, job_keys, name_attempt
from .position import (
    LAUNCHER,
    SECRET,
    launcher,
    local_rank,
    position,
    ranks_here,
    rendezvous,
    tell,
)
from .position import number as _number
from .process import Environment, Setup, end_with_launcher, set_up
from .pulse import Pulse
from .rendezvous import ADDRESS, PORT, Rendezvous
from .shared_segment import SegmentSettings
from .team import Team
from .watchdog import HangLimits, Watchdog, running

DEFAULT_TIMEOUT = 10  # minutes, of collectives
_PATIENCE = 60.0  # seconds that a rank waits for the others at exit
_LAST_WORKS = 0.2  # seconds to wait for the threads of collectives to finish
_ANSWER = 30.0  # seconds for the store of a launcher to answer: it was there before the ranks
_LOOK_AGAIN = 0.5  # seconds between two attempts
MPI = "mpi"


@dataclass(frozen=True)
class World:
    """This process in its job; ``size`` is 1, without a process group, when no launcher started it.

    rank, size:  of the job; of this rank's team, where the job has several.
    device:      of this rank.
    cluster:     the emulated cluster; None for real hardware.
    clock:       the modelled time on ``cluster``, or wall time.
    collectives: backend of the tensor- and data-parallel groups; None: the job's own.
    setup:       the settings of this process.
    ranks_here:  number of ranks on this host, 0 where unknown.
    local_rank:  index of this rank on its host, -1 where unknown.
    team:        the ranks that this one computes with; None: all of the job.
    store:       of this attempt of the job, shared by all its ranks; None for a single process, and
                 in a job that somebody else joined.
    watchdog:    names hangs; None for a single process, and in a job of several teams, which goes
                 on without one that has died.
    """

    rank: int
    size: int
    device: torch.device
    cluster: Cluster | None = None
    clock: Clock = field(default_factory=WallClock, compare=False)
    collectives: str | None = None
    setup: Setup = field(default_factory=Setup, compare=False)
    ranks_here: int = field(default=0, compare=False)
    local_rank: int = field(default=-1, compare=False)
    team: Team | None = None
    store: dist.Store | None = field(default=None, compare=False)
    watchdog: Watchdog | None = field(default=None, compare=False)

    @property
    def pulse(self) -> Pulse:
        """Where this rank notes what it does; nobody reads it without a watchdog."""
        return Pulse() if self.watchdog is None else self.watchdog.pulse

    def __str__(self) -> str:
        groups = self.collectives or (
            "emulated" if self.cluster else dist.get_backend() if self.size > 1 else ""
        )
        sums = f", tensor- and data-parallel collectives by {groups}" if groups else ""
        return f"{self._ranks()}{sums}\n{self.setup}"

    def _ranks(self) -> str:
        ranks = counted(self.size, f"{self.device.type.upper()} rank")
        return ranks if self.team is None else self.team.text.format(ranks)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a node, of the emulated cluster or as given by the launcher; 0 where
        unknown.
        """
        return self.cluster.ranks_per_node if self.cluster else self.ranks_here

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank, which has the loss and prints the training log, as in
        Megatron-LM.
        """
        return self.rank == self.size - 1


def _device(backend: str, size: int) -> torch.device:
    on_cpu = not torch.cuda.is_available() if backend == "auto" else not BACKENDS[backend].of_gpus
    if on_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            "--distributed-backend",
            backend,
            "there is no CUDA device",
            "Use --distributed-backend gloo",
        )
    own = _number(launcher().local_rank, "0" if size == 1 else "")
    count = torch.cuda.device_count()
    if backend == staged.NAME:
        return torch.device("cuda", own % count)
    if own >= count:
        remedy = (
            f"Start at most {count} ranks on this host, or let them share by "
            f"--distributed-backend {staged.NAME}"
        )
        raise LaunchError(
            "local rank", own, f"this host has {counted(count, 'CUDA device')}", remedy
        )
    return torch.device("cuda", own)


def _check_rendezvous(backend: str) -> None:
    """Raise LaunchError where ranks could not find each other."""
    by = launcher()
    if backend == MPI and not by.by_mpi:
        reason = f"MPI numbers the ranks itself, and {by.name} started them"
        raise LaunchError(
            "--distributed-backend", MPI, reason, "Start them with mpirun, or use gloo"
        )
    place = rendezvous()
    if backend == MPI and not (place.host and place.port):
        return  # the first rank says it by MPI
    for name, known in ((ADDRESS, place.host), (PORT, place.port)):
        if not known:
            reason = "ranks could not find each other"
            remedy = (
                f"Name the first rank's host and a free port of it: mpirun -x {ADDRESS}=HOST "
                f"-x {PORT}=PORT, or -genv NAME VALUE with MPICH"
                if by.by_mpi
                else "Start ranks with torchrun"
            )
            raise LaunchError(f"environment variable {name}", "(unset)", reason, remedy)


def _environment() -> Environment:
    malloc = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
    return Environment(
        ranks_here(), not _threads_by_torchrun(), any(name in os.environ for name in malloc)
    )


def _threads_by_torchrun() -> bool:
    """Whether OMP_NUM_THREADS is torchrun's default: torchrun itself has no such variable, and set
    it to 1.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        return (
            b"\0OMP_NUM_THREADS=" not in b"\0" + Path(f"/proc/{os.getppid()}/environ").read_bytes()
        )
    except OSError:
        return False


def launch(
    backend: str = "auto",
    timeout_minutes: float = DEFAULT_TIMEOUT,
    deterministic: bool = False,
    emulate: str | None = None,
    fp32_matmul: str = "auto",
    use_cpu: bool = False,
    team: Team | None = None,
    limits: HangLimits | None = None,
) -> World:
    """Select the device, set up the process and join the job. Raises LaunchError before anything is
    sent.

    deterministic: use only bitwise reproducible kernels; torch raises where there is none.
    emulate:       the cluster that the backend "emu" models; for errors see ``find_cluster``.
    fp32_matmul:   see ``set_up``.
    use_cpu:       do not use GPUs.
    team:          the ranks to join, of a job of several teams; None: all of them.
    limits:        how long the job may stand still; None: by ``timeout_minutes``.
    """
    check_available(backend)
    rank, size = position()
    job_rank = rank
    job_size = size
    environment = _environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher(os.environ.get(LAUNCHER))
    if team is not None:
        rank = team.rank
        size = team.size
        use_cpu = use_cpu or not team.connected
    cluster, clock = _emulation(backend, emulate, rank, size)
    device = torch.device("cpu") if use_cpu else _device(backend, size)
    store = None
    if team is not None or size > 1:
        _check_rendezvous(backend)
        with _ended_by_ctrl_c():
            place = _by_mpi(rank, size) if backend == MPI else rendezvous()
            store = _job_store(job_rank, job_size, timedelta(minutes=timeout_minutes), place)
        _listen_on_one_host_only(environment.ranks_here == job_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if team is not None and not team.connected:
        return World(
            rank,
            size,
            device,
            setup=set_up(device, fp32_matmul, environment),
            team=team,
            store=store,
        )
    watchdog = None
    if size > 1:
        job = _job_backend(backend, device)
        # With a bound device, ranks outside of a new group split its communicator; for groups of a
        # backend of our own they would be the only ones to do so.
        bound = device if job == "nccl" and backend != peer_group.NAME else None
        timeout = timedelta(minutes=timeout_minutes)
        with _ended_by_ctrl_c():
            assert store is not None, "there are several ranks"
            group = "all ranks" if team is None else team.name
            dist.init_process_group(
                job,
                timeout=timeout,
                world_size=size,
                rank=rank,
                store=dist.PrefixStore(group, store),
                device_id=bound,
            )
            if team is None:
                limits = limits or HangLimits.of_timeout(60 * timeout_minutes, 60 * DEFAULT_TIMEOUT)
                watchdog = _watch(rank, size, store, limits)
            atexit.register(_end, watchdog)
            if job != "nccl":
                # All connect before any can fail; else some would report a lost connection, not the
                # error.
                dist.barrier()
    setup = set_up(device, fp32_matmul, environment)
    collectives = own_collectives(backend, device, size)
    return World(
        rank,
        size,
        device,
        cluster=cluster,
        clock=clock,
        collectives=collectives,
        setup=setup,
        ranks_here=environment.ranks_here,
        local_rank=local_rank(),
        team=team,
        store=store,
        watchdog=watchdog,
    )


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end this process at once meanwhile, as SIGTERM does.

    Python's handler runs when torch returns, which waits for ranks that have ended by the same
    Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (
        handler is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _watch(rank: int, size: int, store: dist.Store, limits: HangLimits) -> Watchdog:
    watchdog = Watchdog(rank, size, store, limits, report=tell, end=abandon)
    watchdog.start()
    return watchdog


def check_available(backend: str) -> None:
    """Raise LaunchError for a backend whose library is missing."""
    if backend == MPI:
        mpi_group.check_installed()


def _by_mpi(rank: int, size: int) -> Rendezvous:
    """Return where ranks meet, which the first one says by MPI unless the user or the launcher
    does, after registering the backend. Raises LaunchError. Collective.
    """
    mpi = mpi_group.load()
    mpi_group.check_place(mpi, rank, size, launcher().name)
    mpi_group.register(mpi)
    place = rendezvous()
    if rank == 0 and not (place.host and place.port):
        with socket.socket() as free:
            free.bind(("", 0))
            place = Rendezvous(place.host or socket.gethostname(), free.getsockname()[1])
    return Rendezvous(*mpi.COMM_WORLD.bcast(tuple(place)))


def _job_store(rank: int, size: int, timeout: timedelta, place: Rendezvous) -> dist.Store:
    """Return a key-value store of this attempt of the job, of its launcher or of rank 0, at a
    place. Raises LaunchError.

    Collective over all ranks, but for those of a launcher that starts single ranks again.
    """
    host, port, job = place
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    creates = rank == 0 and not of_launcher
    try:
        if of_launcher:
            _check_answers(host, port, min(_ANSWER, timeout.total_seconds()))
        store = _open_store(host, port, creates, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        reason = f"no store answers there ({str(error).splitlines()[0]})"
        remedy = "Start ranks with torchrun"
        if of_launcher:
            remedy = "Its launcher has ended: start the job again"
        elif job:
            remedy = f"Name a free port of that host in {PORT}, or another host in {ADDRESS}"
        raise LaunchError("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", reason, remedy) from error
    attempt = os.environ.get(ATTEMPT)
    if attempt is None:
        # two jobs may derive one port
        attempt = name_attempt(
            dist.PrefixStore(f"megatron_merak {job}".rstrip(), store), rank, size, timeout, say=tell
        )
    return job_keys(store, attempt)


def _check_answers(host: str, port: int, patience: float) -> None:
    """Raise OSError if nobody accepts connections at an address.

    torch waits for a store that is not there as long as for a collective, with pages of warnings.
    """
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), patience).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(_LOOK_AGAIN)


def _open_store(host: str, port: int, creates: bool, timeout: timedelta) -> dist.TCPStore:
    """Open the store at an address; if this rank creates it, it listens there only."""
    if creates:
        one_host = _environment().ranks_here == position()[1]
        try:
            return open_server(host, port, one_host, tell, timeout=timeout)
        except OSError:
            pass  # a script may have opened it before, in this process
    return dist.TCPStore(
        host,
        port,
        is_master=creates,
        timeout=timeout,
        wait_for_workers=False,
        # a script that makes a group of its own, by torch's means, gets this store too
        multi_tenant=True,
    )


def _listen_on_one_host_only(one_host: bool) -> None:
    """Let gloo listen on the loopback interface if all ranks are on this host and the user has
    chosen none.
    """
    loopback = loopback_interface() if one_host else None
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def job_secret(store: dist.Store) -> bytes:
    """Return the secret of this job: its launcher's, or, where that gave none, one that a rank puts
    into the store.
    """
    given = os.environ.get(SECRET) or store.compare_set(SECRET, "", new_secret()).decode()
    return given.encode()


def adopt(
    backend: str = "auto",
    fp32_matmul: str = "auto",
    use_cpu: bool = False,
    limits: HangLimits | None = None,
) -> World:
    """Return this process's world in a job whose default process group exists already; set it up as
    ``launch`` does.

    backend:     a ``--distributed-backend``; raises LaunchError for one that this job does not
                 support.
    fp32_matmul: see ``set_up``.
    use_cpu:     do not use GPUs, even where the job could.
    limits:      how long the job may stand still; None: those of the default timeout. A process has
                 one watchdog: one that runs already keeps its limits.
    """
    if backend == MPI and (job := dist.get_backend()) not in (MPI, mpi_group.NAME):
        raise LaunchError(
            "backend", MPI, f"the job is one of {job}", "Leave it out, or start the job with MPI"
        )
    # init_process_group() without a backend creates several, and get_backend() is then "undefined".
    of_devices = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    on_cpu = (
        use_cpu or not torch.cuda.is_available() or of_devices.get("cuda", "gloo") in ("gloo", MPI)
    )
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    collectives = own_collectives(backend, device, dist.get_world_size())
    environment = _environment()
    _listen_on_one_host_only(environment.ranks_here == dist.get_world_size())
    setup = set_up(device, fp32_matmul, environment)
    rank = dist.get_rank()
    size = dist.get_world_size()
    watchdog = running()
    if watchdog is None and size > 1 and dist.get_backend() != MPI:
        store = dist.distributed_c10d._get_default_store()
        if _over_tcp(store):  # a file would grow with every sign of life
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            watchdog = _watch(
                rank,
                size,
                dist.PrefixStore(f"megatron_merak {attempt}", store),
                limits or HangLimits(),
            )
            atexit.register(_end_joined, watchdog)
    return World(
        rank,
        size,
        device,
        collectives=collectives,
        setup=setup,
        watchdog=watchdog,
        ranks_here=environment.ranks_here,
        local_rank=local_rank(),
    )


def _over_tcp(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def _job_backend(backend: str, device: torch.device) -> str:
    """Return the backend of the default process group, after registering it."""
    if backend == staged.NAME:
        staged.register()
        return backend
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return BACKENDS[backend].job


def own_collectives(backend: str, device: torch.device, size: int) -> str | None:
    """Return ``World.collectives`` for a ``--distributed-backend``, after registering it.

    On CPUs "auto" uses shared memory where the compiled library is available; groups that span
    several hosts use gloo. Raises LaunchError for a GPU backend on another device.
    """
    requested = backend == shared_memory.NAME
    if backend == "auto" and device.type == "cpu" and size > 1 and shared_memory.compiled():
        backend = shared_memory.NAME
    if backend == shared_memory.NAME:
        shared_memory.register(SegmentSettings(ranks_here=ranks_here()), one_host=requested)
    elif backend == peer_group.NAME:
        if device.type != "cuda":
            raise LaunchError(
                "backend", backend, "the job runs on CPUs", f"Use {shared_memory.NAME} or gloo"
            )
        peer_group.register(device)
    else:
        return None
    return backend


def _emulation(
    backend: str, emulate: str | None, rank: int, size: int
) -> tuple[Cluster | None, Clock]:
    if backend != "emu":
        return None, WallClock()
    if emulate is None:
        raise LaunchError(
            "--emulate", "(missing)", "--distributed-backend emu models a cluster", "Name it"
        )
    cluster = find_cluster(emulate).by_figures.used_by(size)
    clock = LogicalClock(cluster, cluster.device_at(rank))
    emulated.register(clock)
    return cluster, clock


def leave(world: World) -> None:
    """Leave the job: no rank closes its connections while another one still uses them."""
    if world.size == 1 or not dist.is_initialized():
        return
    watchdog = world.watchdog
    if watchdog is not None:
        watchdog.farewell()
    try:
        dist.barrier()
    except RuntimeError:
        line = None if watchdog is None else watchdog.gone()
        if line is None:
            raise
        tell(line)
        abandon(1)
    if watchdog is not None:
        watchdog.stop()
    _destroy()
    if watchdog is not None:
        watchdog.leave_store()
    atexit.unregister(_end)


def _destroy() -> None:
    dist.destroy_process_group()
    _await_last_works()


def _await_last_works() -> None:
    """Let the threads of collectives finish, before the interpreter shuts down.

    A gloo thread may still need the GIL to release the tensors of its last work. If it requests the
    GIL while the interpreter shuts down, it is killed and aborts the process (SIGABRT).
    """
    time.sleep(_LAST_WORKS)


def _say_farewell(watchdog: Watchdog) -> None:
    error = getattr(sys, "last_value", None)
    watchdog.farewell("has ended" if error is None else "has failed")
    # Connections of a process that ends are closed, so this rank may fail before its watchdog knows
    # why.
    if (
        isinstance(error, RuntimeError)
        and not watchdog.obeys
        and (line := watchdog.gone()) is not None
    ):
        tell(line)


def _end_joined(watchdog: Watchdog) -> None:
    """Exit handler of a script that made its process group itself."""
    _say_farewell(watchdog)
    _await_last_works()


def _end(watchdog: Watchdog | None) -> None:
    """Exit handler of a script that did not `leave`: open connections would abort the interpreter's
    shutdown.
    """
    if dist.is_initialized() and watchdog is not None:
        _say_farewell(watchdog)
    if hasattr(sys, "last_value"):  # an uncaught exception, which has been printed
        abandon(sys.last_value.status if isinstance(sys.last_value, MerakError) else 1)
    if dist.is_initialized():
        if watchdog is not None:
            # a barrier would meet other collectives of ranks that go on
            if not watchdog.wait_for_all(_PATIENCE):
                abandon(1)
            watchdog.stop()
        try:
            dist.barrier(async_op=True).wait(timedelta(seconds=_PATIENCE))
        except RuntimeError:
            abandon(1)  # other ranks have ended, or wait for this one elsewhere
        _destroy()
    else:  # the script has destroyed it
        if watchdog is not None:
            watchdog.stop()
        _await_last_works()
    if watchdog is not None:
        watchdog.leave_store()


def end_interrupted(number: int) -> NoReturn:
    """End this process at once, because of a second signal."""
    tell("interrupted again: nothing more is saved")
    abandon(128 + number)


def abandon(status: int) -> NoReturn:
    """End this process at once, without waiting for the other ranks.

    After an error some of them may be blocked elsewhere, and open connections would abort the
    interpreter's shutdown.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has left, or its disk is full
            stream.flush()
    os._exit(status)
