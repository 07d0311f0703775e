"""A GPU without compiled kernels is an error, unless that is asked for; and no GPU test that skips
counts as passed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_merak import ops
from megatron_merak.errors import LaunchError
from megatron_merak.plan import Grid
from megatron_merak.stages.kernels import check_kernels
from tests.parity.cases import Case
from tests.rehearsal.device import Rehearsal
from tests.rehearsal.trainers import captured, gpt, mesh_of

ROOT = Path(__file__).resolve().parent.parent.parent
GPU = torch.device("cuda", 0)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setitem(ops.PROBLEMS, "_ops_cuda", "megatron_merak/_ops_cuda is not built")
    monkeypatch.delenv("MERAK_EXT", raising=False)


def test_a_gpu_without_kernels_is_refused_unless_that_is_asked_for(missing, monkeypatch):
    check_kernels(torch.device("cpu"))
    with pytest.raises(
        LaunchError, match=r"compiled kernels \(for cuda:0\): megatron_merak/_ops_cuda is not built"
    ):
        check_kernels(GPU)
    monkeypatch.setenv("MERAK_EXT", "0")
    check_kernels(GPU)
    monkeypatch.delenv("MERAK_EXT")
    monkeypatch.setitem(ops.PROBLEMS, "_ops_cuda", "")
    check_kernels(GPU)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


BUILDS = {
    "gpt": lambda mesh: gpt(Case("llama"), 2, mesh),
    "captured": lambda mesh: captured(Model(), {"x": torch.ones(4, 8)}, mesh),
}


@pytest.mark.parametrize("build", BUILDS)
def test_both_trainers_ask(build, monkeypatch):
    with mesh_of(Grid(), 0) as mesh, Rehearsal(), monkeypatch.context() as patch:
        patch.setitem(ops.PROBLEMS, "_ops_cuda", "it is not built")
        patch.delenv("MERAK_EXT", raising=False)
        with pytest.raises(LaunchError, match="it is not built"):
            BUILDS[build](mesh)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they run")
def test_a_skipped_gpu_test_fails_where_none_may_skip():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_mailbox_gpu.py",
    ]
    done = subprocess.run(
        [*command, "--no-skip"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1 and "was skipped" in done.stdout, done.stdout + done.stderr
