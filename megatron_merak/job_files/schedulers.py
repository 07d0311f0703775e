"""Every scheduler by name: what writes its files, and which options they have a use for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .job import ClusterJob
from .kubeflow import kubeflow
from .kubernetes import kubernetes
from .ray import ray
from .shell import shell
from .skypilot import skypilot
from .slurm import slurm


@dataclass(frozen=True)
class Scheduler:
    """How the files of a job are written.

    write:  returns their text.
    title:  how it is called in sentences.
    takes:  options that not all of them have a use for.
    needs:  options without which it starts nothing.
    labels: whether the name of a job must be one of the DNS.
    """

    write: Callable[[ClusterJob], str]
    title: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    labels: bool = False


SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    {
        "slurm": Scheduler(slurm, "Slurm", ("--image", "--shared-dir")),
        "k8s": Scheduler(
            kubernetes,
            "Kubernetes",
            ("--image", "--shared-dir", "--claim"),
            needs=("--image",),
            labels=True,
        ),
        "kubeflow": Scheduler(
            kubeflow,
            "Kubeflow",
            ("--image", "--shared-dir", "--claim"),
            needs=("--image",),
            labels=True,
        ),
        "skypilot": Scheduler(
            skypilot,
            "SkyPilot",
            ("--image", "--shared-dir", "--claim", "--gpu"),
            labels=True,
        ),
        "ray": Scheduler(ray, "Ray", ("--shared-dir",)),
        "shell": Scheduler(shell, "a script for every host", ("--shared-dir",)),
    }
)
