"""What the pods of a host have, whoever makes them: GPUs, shared memory, the directory of all hosts."""

from typing import Any

from .job import ClusterJob, Host, check, start

_MEMORY = "shared-memory"
_DIRECTORY = "shared-directory"


def script(job: ClusterJob, host: Host) -> str:
    """Return what the container of a host runs."""
    lines = ["set -e"]
    if job.preflight:
        lines.append(check(job, host))
    # The launcher takes the shell's place, and so gets the signals that the pod gets.
    return "\n".join([*lines, f"exec {start(job, host)}"]) + "\n"


def resources(job: ClusterJob) -> dict[str, Any]:
    """Return the GPUs of a host, as a part of the container's description."""
    return {"limits": {"nvidia.com/gpu": job.ranks}} if job.gpus else {}


def volumes(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the volumes of a pod: memory that ranks share is a file system, which a container
    limits to 64 MiB otherwise.
    """
    found: list[dict[str, Any]] = [{"name": _MEMORY, "emptyDir": {"medium": "Memory"}}]
    if job.shared:
        found.append({"name": _DIRECTORY, "persistentVolumeClaim": {"claimName": job.claim}})
    return found


def mounts(job: ClusterJob) -> list[dict[str, str]]:
    """Return where the container has its volumes."""
    found = [{"name": _MEMORY, "mountPath": "/dev/shm"}]
    if job.shared:
        found.append({"name": _DIRECTORY, "mountPath": job.shared})
    return found
