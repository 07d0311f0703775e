"""The names that scripts import from megatron.core: ``parallel_state`` (also as ``mpu``),
``tensor_parallel`` and ``ModelParallelConfig``, with Megatron-LM's arguments and layouts.

A script that has ``from megatron.core import parallel_state, tensor_parallel`` imports them from
``megatron_merak.megatron`` instead, and changes nothing else. They run on CPUs as well.
"""

from . import parallel_state, tensor_parallel
from .config import ModelParallelConfig

mpu = parallel_state

__all__ = ["ModelParallelConfig", "mpu", "parallel_state", "tensor_parallel"]
