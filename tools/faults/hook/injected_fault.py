"""One fault in this process, if it is the chosen rank: what it is (`FAULTS`), and when it comes
(`arm`).

The program that runs here is not changed and need not know: updates of weights are counted by a
hook of torch's optimizers, or by the first call of a step of megatron_merak's; calls that touch the
disk by Python's audit events. Standard library only, and nothing is imported before it is needed:
this is in every process of the command.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MERAK_INJECTED_FAULT"
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_TORCH = "torch.optim.optimizer"
_MERAK = "megatron_merak.optimizer.base"
_DISK_EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
_FOREVER = 1 << 20  # seconds


@dataclass(frozen=True)
class Order:
    """What is to happen.

    fault:     a key of `FAULTS`.
    rank:      the rank that has it.
    directory: of files that say that it came.
    step:      the update of weights, from 1, in which it comes; 0: it does not wait for one.
    seconds:   to wait behind that.
    disk_call: how many calls that touch the disk follow that before it comes; 0: it does not wait
               for any.
    times:     in how many processes of that rank, one after the other, it comes.
    target:    the directory that is filled or removed.
    lasts:     seconds that a fault lasts which can end: DISK_FULL, SIGSTOP; 0: for ever. Of SLOW:
               what each step takes.
    bit:       of a 32-bit number, from 0, that BIT_FLIP turns.
    seed:      of the choice of an element.
    """

    fault: str
    rank: int
    directory: str
    step: int = 0
    seconds: float = 0.0
    disk_call: int = 0
    times: int = 1
    target: str = ""
    lasts: float = 0.0
    bit: int = 30
    seed: int = 0


@dataclass
class Place:
    """Where the fault comes: what it may need to know.

    order:   what is to happen.
    weights: returns the tensors of the optimizer whose step it is; None outside of a step.
    """

    order: Order
    weights: Callable[[], list] | None = None


def _signal(number: signal.Signals) -> Callable[[Place], None]:
    def act(place: Place) -> None:
        if number is signal.SIGSTOP and place.order.lasts:
            _continued_later(place.order.lasts)
        os.kill(os.getpid(), number)

    return act


def _signal_launcher(number: signal.Signals) -> Callable[[Place], None]:
    return lambda place: os.kill(os.getppid(), number)


def _continued_later(seconds: float) -> None:
    """Fork a child that lets this process go on after a while."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)


def _segfault(place: Place) -> None:
    ctypes.string_at(0)


def _lock_gil(place: Place) -> None:
    ctypes.PyDLL(None).sleep(_FOREVER)


def _sleep(place: Place) -> None:
    time.sleep(_FOREVER)


def _raise(place: Place) -> None:
    raise RuntimeError("injected fault")


def _raise_in_main_thread(place: Place) -> None:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(RuntimeError))


def _exit(place: Place) -> None:
    sys.exit(0)


def _exit_at_once(place: Place) -> None:
    os._exit(0)


def _chosen(place: Place) -> tuple[Any, int]:
    """Return a flat tensor of weights, and an element of it."""
    if place.weights is None:
        raise SystemExit(f"{place.order.fault} comes in a step: give --step")
    tensors = [tensor for tensor in place.weights() if tensor.numel()]
    draw = random.Random(place.order.seed)
    tensor = draw.choice(tensors).detach().view(-1)
    return tensor, draw.randrange(tensor.numel())


def _nan(place: Place) -> None:
    tensor, element = _chosen(place)
    tensor[element] = float("nan")


def _bit_flip(place: Place) -> None:
    import torch

    tensor, element = _chosen(place)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    bits = tensor[element : element + 1].view(kinds[size])
    bit = max(place.order.bit - 32 + 8 * size, 0)
    mask = 1 << bit if bit < 8 * size - 1 else -(1 << bit)
    bits ^= mask


def _spike(place: Place) -> None:
    assert place.weights is not None
    for tensor in place.weights():
        tensor.detach().mul_(30)


def _fill_disk(place: Place) -> None:
    """Write until no byte is left on the file system of the target."""
    path = Path(place.order.target) / ".filler"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    block = bytes(1 << 20)
    while block:
        try:
            os.write(descriptor, block)
        except OSError:
            block = block[: len(block) // 2]
    os.close(descriptor)
    if place.order.lasts:
        timer = threading.Timer(place.order.lasts, path.unlink)
        timer.daemon = True
        timer.start()


def _remove_directory(place: Place) -> None:
    shutil.rmtree(place.order.target, ignore_errors=True)


def _cut_link(place: Place) -> None:
    """Shut down every TCP connection of this process, in both directions."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed meanwhile, or it listens


def _gpu_error(place: Place) -> None:
    import torch

    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 20, device="cuda")] += 1
    torch.cuda.synchronize()


def _gpu_sleep(place: Place) -> None:
    import torch

    torch.cuda._sleep(1 << 60)


def _slow(place: Place) -> None:
    time.sleep(place.order.lasts or 1.0)


# By name, as far as they have one there, of nvidia-resiliency-ext.
FAULTS: dict[str, tuple[str, Callable[[Place], None]]] = {
    "SIGKILL": ("the process is killed", _signal(signal.SIGKILL)),
    "SIGTERM": ("the process is told to end", _signal(signal.SIGTERM)),
    "SIGINT": ("Ctrl-C reaches the process", _signal(signal.SIGINT)),
    "SIGHUP": ("the process loses its terminal", _signal(signal.SIGHUP)),
    "SIGUSR1": ("Slurm's warning before its time is over", _signal(signal.SIGUSR1)),
    "SIGSTOP": ("the process is stopped, and its connections stay open", _signal(signal.SIGSTOP)),
    "LAUNCHER_SIGTERM": ("the rank's launcher is told to end", _signal_launcher(signal.SIGTERM)),
    "LAUNCHER_SIGKILL": ("the rank's launcher is killed", _signal_launcher(signal.SIGKILL)),
    "OS_ABORT": ("the process aborts", lambda place: os.abort()),
    "SEGFAULT": ("the process reads address 0", _segfault),
    "LOCK_GIL": ("a thread keeps Python's lock for ever", _lock_gil),
    "SLEEP": ("the training thread sleeps for ever", _sleep),
    "WORKLOAD_EXC": ("an exception in the training thread", _raise),
    "ASYNC_EXC": ("an exception in the main thread, from another one", _raise_in_main_thread),
    "EXIT": ("sys.exit(0)", _exit),
    "EXIT_AT_ONCE": ("the process ends with status 0, without Python's shutdown", _exit_at_once),
    "NAN": ("a weight becomes NaN", _nan),
    "BIT_FLIP": ("a bit of a weight flips", _bit_flip),
    "SPIKE": ("all weights of the rank are multiplied by 30", _spike),
    "DISK_FULL": ("the file system of --target is full", _fill_disk),
    "DIRECTORY_GONE": ("--target is removed", _remove_directory),
    "CUT_LINK": ("all TCP connections of the process are shut down", _cut_link),
    "SLOW": ("from then on each step takes --lasts seconds longer", _slow),
    "GPU_ERROR": ("a kernel reads out of bounds", _gpu_error),
    "GPU_SLEEP": ("a kernel never ends", _gpu_sleep),
}
IN_A_STEP = ("WORKLOAD_EXC", "EXIT", "SLEEP", "NAN", "BIT_FLIP", "SPIKE", "SLOW")


class _Fault:
    """The fault of this process, once it is armed."""

    def __init__(self, order: Order):
        self.order = order
        self.steps = 0
        self.disk_calls = -1  # below 0: they are not counted yet
        self.came = False
        self.process = os.getpid()

    def step(self, weights: Callable[[], list]) -> None:
        """A step of the program: in it are the tensors that ``weights`` returns."""
        if os.getpid() != self.process:
            return
        self.steps += 1
        if self.order.fault == "SLOW" and self.came:
            FAULTS["SLOW"][1](Place(self.order, weights))
        elif self.steps == self.order.step:
            self._reached(Place(self.order, weights))

    def _reached(self, place: Place) -> None:
        if self.order.disk_call:
            self.disk_calls = 0
        elif self.order.seconds and self.order.fault not in IN_A_STEP:
            self.later(place)
        else:
            time.sleep(self.order.seconds)
            self.come(place)

    def later(self, place: Place) -> None:
        timer = threading.Timer(self.order.seconds, self.come, (place,))
        timer.daemon = True
        timer.start()

    def audit(self, event: str, arguments: tuple) -> None:
        """An event of Python's: count it if it touches the disk."""
        if self.disk_calls < 0 or self.came or os.getpid() != self.process:
            return
        if event == "open":
            flags = arguments[2] or 0
            writes = isinstance(arguments[0], str | bytes | os.PathLike) and flags & (
                os.O_WRONLY | os.O_RDWR
            )
            if not writes or os.fsdecode(arguments[0]).startswith(("/dev/", "/proc/")):
                return
        elif event not in _DISK_EVENTS:
            return
        self.disk_calls += 1
        if self.disk_calls == self.order.disk_call:
            self.come(Place(self.order))

    def come(self, place: Place) -> None:
        if self.came:
            return
        self.came = True
        if not self._first():
            return
        FAULTS[self.order.fault][1](place)

    def _first(self) -> bool:
        """Whether it has not come often enough; then leave a file that says that it does now."""
        for number in range(self.order.times):
            path = f"{self.order.directory}/came-{number}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            said = os.stat(f"{self.order.directory}/output").st_size
            facts = {"time": time.time(), "said": said, "pid": os.getpid(), "step": self.steps}
            os.write(descriptor, json.dumps(facts).encode())
            os.close(descriptor)
            return True
        return False


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been imported.

    then: functions by the name of a module.
    """

    def __init__(self, then: dict[str, Callable[[Any], None]]):
        self.then = then

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders have for a module of ``then``, with a loader that
        calls.
        """
        if name not in self.then:
            return None
        act = self.then.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_act(module: Any) -> None:
            run(module)
            act(module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


def _of_torch(fault: _Fault) -> Callable[[Any], None]:
    def hook(optimizer: Any, args: tuple, kwargs: dict) -> None:
        if _MERAK not in sys.modules:  # its optimizers may have torch's inside
            groups = optimizer.param_groups
            fault.step(lambda: [weight for group in groups for weight in group["params"]])

    return lambda module: module.register_optimizer_step_pre_hook(hook)


def _of_merak(fault: _Fault) -> Callable[[Any], None]:
    def patch(module: Any) -> None:
        begin = module.Optimizer.begin

        def counted(self: Any) -> float:
            fault.step(lambda: [self.buffer.data])
            return begin(self)

        module.Optimizer.begin = counted

    return patch


def arm() -> None:
    """Prepare the fault that the environment orders, if this process is the rank that has it."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    order = Order(**json.loads(text))
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    if ranks and int(ranks[0]) != order.rank:
        return
    if ranks:
        os.environ.pop(VARIABLE)  # processes that this one starts are not the rank
    elif order.rank or not order.step:
        return  # a process without a rank trains alone, or is the launcher: that one takes no step
    if order.fault == "SIGINT" and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # it is in what a shell starts with "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    fault = _Fault(order)
    if order.disk_call:
        sys.addaudithook(fault.audit)
    if order.step:
        sys.meta_path.insert(0, _AfterImport({_TORCH: _of_torch(fault), _MERAK: _of_merak(fault)}))
    elif order.disk_call:
        fault.disk_calls = 0
    else:
        fault.later(Place(order))
