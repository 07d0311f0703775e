"""megatron_merak's side of the benchmark: the one file here that knows its API."""

from cases import ModelShape
from contract import Runner


def step_runner(model_shape: ModelShape, tp: int, pp: int, dp: int, bf16: bool, seed: int) -> Runner:
    """This rank of a tp x pp x dp run, built and ready (see contract.Runner for what its step receives and returns).

    The rank finds torchrun's variables in its environment, is pinned to one core and has one thread. The weights are
    weights.initial_weight(name, full shape, seed) by HuggingFace name, the recipe is cases.RECIPE, bf16 means bf16
    weights with fp32 masters; micro-batch k of data-parallel rank r is row k * dp + r of the step's tokens.
    """
    raise NotImplementedError("benchmarks/ours.py: step_runner is not connected to the trainer yet; use --only to run the peers alone")
