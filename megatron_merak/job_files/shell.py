"""A script that is started on every host, by hand or by a scheduler that is none of the others."""

from .job import ClusterJob, Host, check, comment, start, timed

_HOST = Host('"$NODE"', '"$HEAD"', "$PORT")
_HEAD = """Start it on every host, in any order; HEAD is host 0 as the others reach it:
  HEAD=host0 NODE=0 bash FILE
  HEAD=host0 NODE=1 bash FILE
It was written by
"""
_TEXT = """#!/usr/bin/env bash
{head}set -euo pipefail

: "${{HEAD:?the name or address of host 0}}" "${{NODE:?the index of this host, from 0}}"
: "${{PORT:=29500}}" # and the next one; two jobs with one HEAD need different ones
{preflight}{limit}exec {start}
"""


def shell(job: ClusterJob) -> str:
    """Return the script."""
    limit = comment(f"Ranks save and end {job.notice} s before the time limit.")
    return _TEXT.format(
        head=comment(_HEAD + job.written),
        preflight=f"{check(job, _HOST)}\n" if job.preflight else "",
        limit=limit if job.seconds else "",
        start=start(job, _HOST, *timed(job)),
    )
