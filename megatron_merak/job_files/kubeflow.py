"""A TrainJob for Kubeflow's trainer, under its runtime for PyTorch."""

from typing import Any

from .job import ClusterJob, Host, comment
from .pods import mounts, resources, script, volumes
from .yaml_text import yaml_text

_HOST = Host('"$PET_NODE_RANK"', '"$PET_MASTER_ADDR"', "$PET_MASTER_PORT")
_RUNTIME = "torch-distributed"


def kubeflow(job: ClusterJob) -> str:
    """Return it as YAML."""
    head = f"""Submit it with: kubectl apply -f FILE. It was written by
{job.written}
How often a pod is started again is said by the runtime, {_RUNTIME}; ranks start again in theirs."""
    return comment(head) + yaml_text(_train_job(job))


def _train_job(job: ClusterJob) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        "command": ["bash", "-c", script(job, _HOST)],
    }
    if job.gpus:
        trainer["resourcesPerNode"] = resources(job)
    pod = {
        "terminationGracePeriodSeconds": job.notice,
        "containers": [{"name": "node", "volumeMounts": mounts(job)}],
        "volumes": volumes(job),
    }
    # from the JobSet to its pods
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "megatron-merak.org/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": _RUNTIME}}
    if job.seconds:
        spec["activeDeadlineSeconds"] = job.seconds
    spec |= {"trainer": trainer, "runtimePatches": [patch]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": spec,
    }
