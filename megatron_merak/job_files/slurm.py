"""A batch script for Slurm."""

import shlex

from .job import ClusterJob, Host, check, clock, comment, start

_HOST = Host('"$SLURM_NODEID"', '"$HEAD"', "$PORT")
_TEXT = """#!/usr/bin/env bash
{head}{options}{apptainer}set -uo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD PORT=$((20000 + SLURM_JOB_ID % 10000 * 2))
failures=$SLURM_JOB_NAME-$SLURM_JOB_ID.failures # a line for each attempt that failed
notice=
steps=

{trap}# {log} is what each host printed.
on_every_host() {{
    srun --kill-on-bad-exit=1 --open-mode=append --output="%x-%j-%n-%N.log"{container} \\
        bash -c "$1" &
    steps=$!
    while :; do
        wait "$steps"
        status=$?
        kill -0 "$steps" 2>/dev/null || return "$status" # a signal only interrupted the wait
    done
}}

{preflight}run='
exec {start}'

{condition}on_every_host "$run" && exit 0
status=$?
{again}"""
_TRAP = """# Slurm gives notice {notice} s before the time limit: the ranks save and end.
trap 'notice=yes; [ -z "$steps" ] || kill -USR1 "$steps"' USR1

"""
_AGAIN = """# Go on from the last checkpoint (--load): after a notice always, after failures {restarts} times.
if [ -z "$notice" ]; then
    echo "$status" >>"$failures"
    [ "$(wc -l <"$failures")" -le {restarts} ] || exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID" || exit "$status"
"""


def slurm(job: ClusterJob) -> str:
    """Return the script."""
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if job.gpus:
        options.append(f"--gpus-per-node={job.ranks}")
    options.append("--exclusive")
    if job.seconds:
        options += [f"--time={clock(job.seconds)}", f"--signal=B:USR1@{job.notice}"]
    options.append("--requeue" if job.restarts else "--no-requeue")
    options += ["--open-mode=append", "--output=%x-%j.log"]
    preflight = ""
    condition = ""
    if job.preflight:
        preflight = f"preflight='\nexec {_in_quotes(check(job, _HOST))}'\n"
        condition = 'on_every_host "$preflight" && '
    return _TEXT.format(
        head=comment(f"Submit it with: sbatch FILE. It was written by\n{job.written}"),
        options="".join(f"#SBATCH {option}\n" for option in options),
        apptainer=_without_pyxis(job),
        trap=_TRAP.format(notice=job.notice) if job.seconds else "",
        log=f"{job.name}-JOB-INDEX-HOST.log",
        container=_container(job),
        preflight=preflight,
        start=_in_quotes(start(job, _HOST)),
        condition=condition,
        again=_AGAIN.format(restarts=job.restarts) if job.restarts else 'exit "$status"\n',
    )


def _in_quotes(text: str) -> str:
    """Return what single quotes around it give back."""
    return text.replace("'", "'\\''")


def _container(job: ClusterJob) -> str:
    if not job.image:
        return ""
    mounts = ["$PWD:$PWD", *([f"{job.shared}:{job.shared}"] if job.shared else ())]
    flags = [f"--container-image={shlex.quote(job.image)}"]
    flags.append(f'--container-mounts="{",".join(mounts)}" --container-workdir="$PWD"')
    return "".join(f" \\\n        {flag}" for flag in flags)


def _without_pyxis(job: ClusterJob) -> str:
    if not job.image:
        return ""
    text = "Where Slurm has no pyxis, leave out --container-* below, and put this before python3:\n"
    return comment(text + f"apptainer exec --nv docker://{job.image}")
