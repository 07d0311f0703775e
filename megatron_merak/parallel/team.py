"""The ranks that this one computes with, where a job has several teams of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Team:
    """Some of a job's ranks, which compute together. With the other ranks they share the job's store
    and nothing else.

    name:      of the team, which no other has.
    rank:      of this process, among its ranks.
    size:      number of its ranks.
    connected: whether its ranks have a process group, and GPUs where there are any; else they have
               neither.
    text:      what is said of all ranks of the job, with ``{}`` where this team's are.
    """

    name: str
    rank: int
    size: int
    connected: bool = True
    text: str = "{}"
