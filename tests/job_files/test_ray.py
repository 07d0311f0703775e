"""The program for Ray, run by a Ray of this machine: the losses are those of torchrun's ranks."""

import os
import subprocess
import sys

import pytest

from tests.several_hosts import ROOT, emitted
from tests.tools.test_launch_hosts import SMALL, losses

# A Ray with as many CPUs as workers, whatever this machine has.
DRIVER = """
import runpy, sys
import ray
ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False)
runpy.run_path("job.py", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.parametrize("workers", [2, 4])
def test_ray_trains_as_torchrun_does(workers, tmp_path):
    pytest.importorskip("ray.train", reason="ray is not installed")
    run = SMALL.replace("--pipeline-model-parallel-size 2", "") if workers == 2 else SMALL
    run = f"{run} --train-iters 4"
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

    def printed(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    options = f"--emit ray --nodes {workers // 2} --nproc-per-node 2 --shared-dir {tmp_path}"
    (tmp_path / "job.py").write_text(emitted(f"{options} -- {run}"))
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    alone = losses(printed(*torchrun, "-m", "megatron_merak", *run.split()))
    assert len(alone) == 4 and losses(printed("-c", DRIVER, str(workers))) == alone
