"""Show which parts of megatron_merak are active on this machine, and why the others are not.

    merak-doctor            a table
    merak-doctor --json     the same as JSON
    merak-doctor --flight-recorder /tmp/nccl_trace_rank_
                            what torch recorded when a collective ran out of time, in words

The exit status is 1 if a compiled part cannot be used, unless MERAK_EXT=0 disables compiled parts.
"""

import argparse
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from .._native import REMEDY
from ..config.command_line import CommandParser
from ..counting import counted
from ..errors import MerakError
from .door import command
from .words import described, error_text, program

ROWS = {
    "python": "Python",
    "torch": "PyTorch",
    "cpu": "processor",
    "gpus": "GPUs",
    "_C": "host-side cores",
    "_ops_cpu": "CPU kernels",
    "_ops_cuda": "CUDA kernels",
    "products": "weight gradients",
    "attention": "attention",
    "apex": "NVIDIA apex",
}


def findings() -> dict[str, tuple[bool | None, str]]:
    """Part -> whether it is active (None: a plain fact), and in words what it is or why it
    is not.
    """
    if importlib.util.find_spec("torch") is None:
        absent = "it is not installed. Install a build for this machine: pip install torch"
        return {"python": (None, platform.python_version()), "torch": (False, absent)}
    import torch

    from .. import _native

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning says what this table says
        from ..ops import PROBLEMS, adds_in_product
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    parts: dict[str, tuple[bool | None, str]] = {
        "python": (None, platform.python_version()),
        "torch": (
            None,
            f"{torch.__version__}, {torch.get_num_threads()} threads{_cuda_versions()}",
        ),
        "cpu": (None, torch.backends.cpu.get_cpu_capability()),
        "gpus": (None, ", ".join(gpus) or "none"),
        "_C": (
            not _native.host_problem(),
            _native.host_problem() or "index builders, simulation, search, shared memory",
        ),
    }
    for name, problem in PROBLEMS.items():
        parts[name] = (not problem, problem or f"loaded from {_native.library(name) or name}")
    device = torch.device("cuda" if gpus else "cpu")
    fused = adds_in_product(device)
    parts["products"] = (
        None,
        f"of bf16 are added to fp32 sums {'by' if fused else 'after'} the product on {device.type}",
    )
    parts["attention"] = (
        None,
        f"causal, bf16, heads of 128 features on {device.type}: {attention_kernel(device)}",
    )
    return parts


def _cuda_versions() -> str:
    import torch

    cudnn = torch.backends.cudnn.version()
    return f", CUDA {torch.version.cuda or 'none'}, cuDNN {'none' if cudnn is None else cudnn}"


def attention_kernel(device) -> str:
    """Which of its kernels torch takes for training on sequences of 4096."""
    import torch
    from torch.nn.attention import SDPBackend

    heads = torch.empty(1, 2, 4096, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(heads, heads, heads, None, 0.0, True)).name.lower()


def _explain(place: Path) -> int:
    from ..report.flight_recorder import explained, read_dumps

    try:
        dumps = read_dumps(place)
    except MerakError as error:
        print(f"{program()}: {error_text(error)}", file=sys.stderr)
        return 1
    print(f"{counted(len(dumps), 'rank')} recorded collectives")
    for line in explained(dumps):
        print(line)
    return 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    text = described(__doc__, "merak-doctor")
    parser = CommandParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: part -> active, detail"
    )
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="DUMPS",
        help="directory of the dumps of torch's flight recorder, or what their names begin with: "
        "tell which ranks did not begin a collective that others wait in",
    )
    options = parser.parse_args(arguments)
    if options.flight_recorder is not None:
        return _explain(options.flight_recorder)
    parts = findings()
    if options.json:
        print(
            json.dumps(
                {
                    part: {"active": active, "detail": detail}
                    for part, (active, detail) in parts.items()
                }
            )
        )
    else:
        for part, (active, detail) in parts.items():
            mark = {None: "", True: "active", False: "off"}[active]
            print(f"{ROWS[part]:<18} {mark:<7} {detail}")
    needed = [part for part in ("torch", "_C", "_ops_cpu") if part in parts]
    broken = [
        part for part in needed if parts[part][0] is False and parts[part][1] != "MERAK_EXT=0"
    ]
    if broken and "torch" not in broken and not options.json:
        print(f"\nFor the parts that are off: {REMEDY}.")
    return int(bool(broken))
