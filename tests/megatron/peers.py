"""megatron-core on CPU ranks: it asks for the current GPU in the places that are replaced here, and
computes the rest itself.
"""

import contextlib
import warnings
from unittest import mock

import torch


@contextlib.contextmanager
def on_cpu():
    """Let megatron-core allocate on the CPU and draw from the CPU's generator."""
    generator = torch.default_generator

    def get_state(device="cuda", clone=False, graph_safe=False):
        return generator.get_state()

    def set_state(state, device=-1, graph_safe=False):
        generator.set_state(state)

    make = torch.tensor

    def tensor(*values, device=None, **named):
        return make(*values, device=None if device == "cuda" else device, **named)

    random = "megatron.core.tensor_parallel.random"
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for target, replacement in (
            ("torch.cuda.current_device", lambda: torch.device("cpu")),
            ("torch.tensor", tensor),
            ("torch.Tensor.cuda", lambda own, *_: own),
            ("torch.cuda.manual_seed", generator.manual_seed),
            ("torch.cuda.get_rng_state", get_state),
            (f"{random}._get_cuda_rng_state", get_state),
            (f"{random}._set_cuda_rng_state", set_state),
        ):
            stack.enter_context(mock.patch(target, replacement))
        yield


def initialised(**sizes):
    """Make the groups of megatron-core and those of the package, over the same ranks."""
    from megatron.core import parallel_state as theirs

    from megatron_merak.megatron import parallel_state as ours

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.initialize_model_parallel(**sizes)
    ours.initialize_model_parallel(**sizes)
    return theirs, ours
