"""A task for SkyPilot."""

from typing import Any

from .job import ClusterJob, Host, check, comment, start, timed
from .yaml_text import yaml_text

_HOST = Host('"$SKYPILOT_NODE_RANK"', '"$HEAD"', "29500")


def skypilot(job: ClusterJob) -> str:
    """Return it as YAML."""
    head = f"""Submit it with: sky jobs launch FILE
It starts the task again where hosts are lost. It was written by
{job.written}"""
    return comment(head) + yaml_text(_task(job))


def _task(job: ClusterJob) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{job.gpu}:{job.ranks}"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    if job.restarts:
        resources["job_recovery"] = {"max_restarts_on_errors": job.restarts}
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes}
    if resources:
        task["resources"] = resources
    if job.shared:
        task["volumes"] = {job.shared: job.claim}
    lines = ["set -e", 'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)']
    if job.preflight:
        lines.append(check(job, _HOST))
    if job.seconds:
        lines.append(f"# Ranks save and end {job.notice} s before the time limit.")
    task["run"] = "\n".join([*lines, start(job, _HOST, *timed(job))]) + "\n"
    return task
