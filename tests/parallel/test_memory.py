import resource
import subprocess
import sys

import pytest

from megatron_merak.parallel.memory import keep_freed_memory

FAULTS = """
import resource
import torch
from megatron_merak.parallel.memory import keep_freed_memory

keep = {keep}
assert not keep or keep_freed_memory()
def step():
    for megabytes in (64, 48, 80):
        torch.ones(megabytes * 2**18)
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(resource, "getrusage"),
    reason="glibc's malloc is on Linux",
)
def test_freed_blocks_are_taken_again_without_page_faults():
    if (
        not subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL(None).mallopt"]
        ).returncode
        == 0
    ):
        pytest.skip("no glibc")
    returned, kept = (
        int(
            subprocess.run(
                [sys.executable, "-c", FAULTS.format(keep=keep)], check=True, capture_output=True
            ).stdout
        )
        for keep in (False, True)
    )
    assert kept < 100 < returned


def test_elsewhere_it_says_no(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
