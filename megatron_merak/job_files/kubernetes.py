"""An indexed Job for Kubernetes, and the Service that gives its pods names."""

from typing import Any

from .job import ClusterJob, Host, comment
from .pods import mounts, resources, script, volumes
from .yaml_text import yaml_text

_PORT = "29500"
_WRONG_FLAGS = 2  # status of a command line that no start again would mend


def kubernetes(job: ClusterJob) -> str:
    """Return both as YAML."""
    head = f"""Submit it with: kubectl apply -f FILE. It was written by
{job.written}
A pod that is asked to end has {job.notice} s to complete its step and save. One that is lost is
started again, and the others wait for it. What host N printed:
kubectl logs -l batch.kubernetes.io/job-name={job.name},batch.kubernetes.io/job-completion-index=N"""
    return comment(head) + yaml_text(_service(job), _job(job))


def _service(job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods find each other before they are ready
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }


def _job(job: ClusterJob) -> dict[str, Any]:
    host = Host('"$JOB_COMPLETION_INDEX"', f"{job.name}-0.{job.name}", _PORT)
    container: dict[str, Any] = {
        "name": "launcher",
        "image": job.image,
        "command": ["bash", "-c", script(job, host)],
    }
    if job.gpus:
        container["resources"] = resources(job)
    container["volumeMounts"] = mounts(job)
    spec: dict[str, Any] = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        # All pods may fail at once: each then counts.
        "backoffLimit": job.restarts * job.nodes,
    }
    if job.seconds:
        spec["activeDeadlineSeconds"] = job.seconds
    spec["podFailurePolicy"] = {
        "rules": [
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": "launcher",
                    "operator": "In",
                    "values": [_WRONG_FLAGS],
                },
            },
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        ]
    }
    spec["template"] = {
        "spec": {
            "subdomain": job.name,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.notice,
            "containers": [container],
            "volumes": volumes(job),
        }
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": spec,
    }
