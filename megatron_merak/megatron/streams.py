"""Named streams of random numbers, on the device that Megatron-LM would draw them on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tensor_parallel.random import default_generator

MODEL_PARALLEL = "model-parallel-rng"
_DEFAULT = "default-rng"


def current_device() -> torch.device:
    """Return the device on which Megatron-LM would allocate: the current GPU, or the CPU where
    there is none.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class CudaRNGStatesTracker:
    """Named random streams. ``fork`` draws from one of them for a while."""

    use_cudagraphable_rng = False

    def __init__(self) -> None:
        self.generator = default_generator(current_device())
        self.reset()

    def is_initialized(self) -> bool:
        """Whether there is a stream."""
        return self._is_initialized

    def reset(self) -> None:
        """Forget all streams."""
        self._is_initialized = False
        self.states_: dict[str, Tensor] = {}
        self.seeds_: dict[int, str] = {}
        self._current = _DEFAULT

    def get_states(self) -> dict[str, Tensor]:
        """Return the states of the streams, by name."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Go on with streams at these states."""
        self._is_initialized = True
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream. Raises ConfigError for a name or a seed that another one has."""
        self._is_initialized = True
        if seed in self.seeds_:
            reason = f"the stream {self.seeds_[seed]} has it, and would draw the same numbers"
            raise ConfigError("seed", seed, reason, "Use another one")
        if name in self.states_:
            raise ConfigError("random stream", name, "it exists", "Use another name")
        self.seeds_[seed] = name
        before = self.generator.get_state()
        self.generator.manual_seed(seed)
        self.states_[name] = self.generator.get_state()
        self.generator.set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from a stream until the block ends. Blocks may lie in each other."""
        if name not in self.states_:
            remedy = "Call model_parallel_cuda_manual_seed, or add it"
            raise ConfigError("random stream", name, "it does not exist", remedy)
        outer = self._current
        before = self.generator.get_state()
        # The stream of an outer block may be asked for by name inside this one.
        if outer != _DEFAULT:
            self.states_[outer] = before
        self.generator.set_state(self.states_[name])
        self._current = name
        try:
            yield
        finally:
            self.states_[name] = self.generator.get_state()
            self.generator.set_state(before if outer == _DEFAULT else self.states_[outer])
            self._current = outer
