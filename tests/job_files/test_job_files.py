"""The files of jobs: what hosts run is what was asked for, word by word, and schedulers know all that
is in them.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_merak.job_files.job import ClusterJob, clock, wrapped
from megatron_merak.job_files.schedulers import SCHEDULERS
from tests.several_hosts import FOLDER, PAGE, ROOT, RUN, WRITTEN, emitted, example, page

# words that a shell would take apart
ODD = ("train.py", "--save", "/a b/it's", "--lr=1e-3", '"quoted"', "$HOME", "\\", "--", "-x", "")
# What the programs of a scheduler are to these scripts: python3 tells its words instead of running.
STUBS = {
    "python3": f"#!{sys.executable}\nimport json, os, sys\n"
    "open(os.environ['TOLD'], 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n",
    "scontrol": '#!/bin/bash\n[ "$1" = show ] && printf "first\\nsecond\\n"\n',
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=1 exec "$@"\n',
}


def job(**changes: object) -> ClusterJob:
    settings = {"written": "merak-launch", "words": ODD, "nodes": 2, "ranks": 4, "gpus": True}
    return ClusterJob(**settings | {"name": "try", "image": "image:1"} | changes)


def script(kind: str, written: str) -> str:
    """The shell script that is in a file."""
    if kind == "k8s":
        container = [*yaml.safe_load_all(written)][1]["spec"]["template"]["spec"]["containers"][0]
        return container["command"][2]
    if kind == "kubeflow":
        return yaml.safe_load(written)["spec"]["trainer"]["command"][2]
    return yaml.safe_load(written)["run"] if kind == "skypilot" else written


def started(kind: str, written: str, folder: Path) -> list[list[str]]:
    """The words that host 1 gives to python3, a list for each of its runs."""
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    told = folder / "told"
    told.write_text("")
    variables = {"HEAD": "first", "NODE": "1", "SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "try"}
    variables |= {"SLURM_JOB_NODELIST": "x[1-2]", "JOB_COMPLETION_INDEX": "1"}
    variables |= {"SKYPILOT_NODE_IPS": "first\nsecond", "SKYPILOT_NODE_RANK": "1"}
    variables |= {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29400"}
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "TOLD": str(told)}
    command = ["bash", "-c", script(kind, written)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [json.loads(line) for line in told.read_text().splitlines()]


STARTED = [
    ("slurm", "first", 20000 + 2345 * 2),
    ("k8s", "try-0.try", 29500),
    ("kubeflow", "first", 29400),
    ("skypilot", "first", 29500),
    ("shell", "first", 29500),
]


def test_the_files_of_every_scheduler_are_started_here():
    assert {kind for kind, _, _ in STARTED} | {"ray"} == SCHEDULERS.keys()


@pytest.mark.parametrize(("kind", "head", "port"), STARTED)
def test_every_host_starts_what_was_asked_for(kind, head, port, tmp_path):
    host = "-m megatron_merak launch --nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr"
    written = SCHEDULERS[kind].write(
        job(preflight=True, seconds=7200, interface="ib0", save="/a b")
    )
    before, run = started(kind, written, tmp_path)
    common = [*host.split(), head, "--master-port"]
    assert before == [*common, str(port + 1), "--interface", "ib0", "preflight", "--save", "/a b"]
    assert run == [*common, str(port), "--interface", "ib0", "--max-restarts", "3", *ODD]
    (run,) = started(kind, SCHEDULERS[kind].write(job(restarts=0)), tmp_path)
    assert run == [*common, str(port), *ODD]


def test_ray_runs_what_was_asked_for():
    tree = SCHEDULERS["ray"].write(job(preflight=True, interface="ib0", seconds=7200))
    names: dict[str, object] = {}
    exec(tree[tree.index("RANKS = ") : tree.index("def rank")], names)
    first, second = map(shlex.split, names["COMMANDS"])
    assert first == ["-m", "megatron_merak", "preflight"] and second == [*ODD]
    assert (names["RANKS"], names["SECONDS"]) == (8, 7200 - 600)
    assert names["ENVIRONMENT"]["NCCL_SOCKET_IFNAME"] == "ib0"
    compile(tree, "ray_job.py", "exec")


@pytest.mark.parametrize("name", WRITTEN)
def test_examples_are_what_the_command_writes(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == example(name), "python -m tests.several_hosts writes it"
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_the_page_shows_the_examples():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.several_hosts writes it"


def test_a_file_tells_the_command_that_writes_it():
    """So that it can be written again, with a change."""
    text = (FOLDER / "job.slurm").read_text(encoding="utf-8")
    head = text[text.index("merak-launch") : text.index("\n#SBATCH")].replace(" \\\n# ", " ")
    assert emitted(head.removeprefix("merak-launch ")) == text


@pytest.mark.parametrize("options", ["", "--time 1:00:00 --preflight --image x:1", "--restarts 0"])
@pytest.mark.parametrize("kind", ["slurm", "shell"])
def test_scripts_are_shell(kind, options, tmp_path):
    options = options.replace("--image x:1", "") if kind == "shell" else options
    path = tmp_path / "job"
    assert (
        emitted(f"--emit {kind} --nodes 2 --gpus-per-node 8 {options} --output {path} -- {RUN}")
        == ""
    )
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""


def test_slurm_is_told_of_limits_containers_and_restarts():
    options = "--nodes 2 --gpus-per-node 8 --image x/y:1 --shared-dir /shared --time 2-01:00:00"
    text = emitted(f"--emit slurm {options} --notice 300 -- {RUN}")
    told = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH " in line]
    assert "--time=2-01:00:00" in told and "--signal=B:USR1@300" in told and "--requeue" in told
    assert "--gpus-per-node=8" in told and "--nodes=2" in told and "--ntasks-per-node=1" in told
    assert '--container-mounts="$PWD:$PWD,/shared:/shared"' in text and "apptainer exec" in text
    without = emitted(f"--emit slurm --nodes 8 --nproc-per-node 8 --restarts 0 -- {RUN}")
    assert "--no-requeue" in without and "scontrol requeue" not in without
    assert not [word for word in ("--signal", "--gpus", "container", "trap") if word in without]


MODELS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def known(document: dict) -> dict:
    """What the published API types keep of a document: fields that they do not have are lost."""
    from kubeflow_trainer_api import models

    return getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict()


@pytest.mark.parametrize("kind", ["k8s", "kubeflow"])
@pytest.mark.parametrize("full", [True, False])
def test_kubernetes_knows_every_field(kind, full):
    pytest.importorskip("kubeflow_trainer_api")
    changes = {"seconds": 7200, "shared": "/shared"} if full else {"gpus": False}
    documents = [*yaml.safe_load_all(SCHEDULERS[kind].write(job(**changes)))]
    assert [document["kind"] for document in documents] == (
        ["Service", "Job"] if kind == "k8s" else ["TrainJob"]
    )
    for document in documents:
        assert known(document) == document


def test_a_field_that_kubernetes_does_not_know_is_seen():
    pytest.importorskip("kubeflow_trainer_api")
    document = [*yaml.safe_load_all(SCHEDULERS["k8s"].write(job()))][1]
    document["spec"]["backofLimit"] = 1
    assert known(document) != document


def test_pods_have_what_ranks_need():
    service, indexed = yaml.safe_load_all(
        SCHEDULERS["k8s"].write(job(shared="/shared", claim="disk", seconds=7200, notice=300))
    )
    spec = indexed["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["backoffLimit"] == 3 * 2 and spec["activeDeadlineSeconds"] == 7200
    assert pod["restartPolicy"] == "Never", "a podFailurePolicy takes no other"
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["subdomain"] == service["metadata"]["name"] == indexed["metadata"]["name"]
    selected = service["spec"]["selector"]["batch.kubernetes.io/job-name"]
    assert selected == indexed["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    claimed = volumes[mounted["/shared"]]["persistentVolumeClaim"]
    assert claimed == {"claimName": "disk"}


def test_a_task_of_skypilot_has_its_parts():
    task = yaml.safe_load(SCHEDULERS["skypilot"].write(job(shared="/shared", gpu="A100")))
    assert task.keys() == {"name", "num_nodes", "resources", "volumes", "run"}
    assert task["num_nodes"] == 2 and task["volumes"] == {"/shared": "shared"}
    assert task["resources"] == {
        "accelerators": "A100:4",
        "image_id": "docker:image:1",
        "job_recovery": {"max_restarts_on_errors": 3},
    }


@pytest.mark.parametrize("full", [True, False])
def test_skypilot_takes_the_task(full):
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    changes = {"seconds": 7200, "shared": "/shared"} if full else {"gpus": False, "image": ""}
    task = yaml.safe_load(SCHEDULERS["skypilot"].write(job(**changes)))
    jsonschema.validate(task, schemas.get_task_schema())
    if "resources" in task:
        jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_commands_are_wrapped_between_flags():
    words = [f"--flag-{n} value{n}" for n in range(12)]
    lines = wrapped(["run", *" ".join(words).split()]).split(" \\\n")
    assert all(len(line) <= 100 for line in lines) and len(lines) > 1
    assert " ".join(line.strip() for line in lines) == " ".join(["run", *words])
    assert not [line for line in lines if line.strip().startswith("value")]


def test_times_are_slurm_s():
    assert [clock(n) for n in (60, 3661, 86400, 90061)] == [
        "00:01:00",
        "01:01:01",
        "1-00:00:00",
        "1-01:01:01",
    ]


def test_the_image_is_built_from_what_is_here():
    """The Dockerfile: instructions that exist, and paths that are in a clone."""
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {
        "ARG",
        "FROM",
        "ENV",
        "RUN",
        "COPY",
        "WORKDIR",
    }
    assert [line.split()[0] for line in lines][:2] == ["ARG", "FROM"]
    for line in lines:
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert name == "." or (ROOT / name).exists(), name
