"""Two hosts on one machine: network namespaces joined by a cable whose rate is limited. They end
with their user.

The limit is a token bucket (tbf) on each end whose burst is 2 ms of the rate: it then carries 96 %
of the rate, while a smaller burst starves and a larger one lets messages through for nothing.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HOSTS = ("merak0", "merak1")
INTERFACE = "eth0"
BURST = 0.002  # seconds of the rate

# In a mount namespace of its own /run is not the machine's, so that names of namespaces are not
# either.
SET_UP = """
set -e
mount -t tmpfs none /run
ip netns add {0}
ip netns add {1}
ip link add eth0 netns {0} type veth peer name eth0 netns {1}
ip -n {0} addr add 10.77.0.1/24 dev eth0
ip -n {1} addr add 10.77.0.2/24 dev eth0
for host in {0} {1}; do
  ip -n $host link set lo up
  ip -n $host link set eth0 up
  ip netns exec $host tc qdisc add dev eth0 root tbf rate {rate}bit burst {burst} limit {limit}
done
"""


def _isolated(command: Sequence[str]) -> list[str]:
    """The command with network and mounts of its own, as a root of its own where this process is
    not root.
    """
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--mount", "--net", *command]


def _script(rate: float) -> str:
    """``rate`` in bits per second."""
    return SET_UP.format(
        *HOSTS, rate=int(rate), burst=int(BURST * rate / 8), limit=int(0.04 * rate / 8)
    )


def missing(rate: float) -> str:
    """Why there can be no such hosts here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no network namespaces"
    try:
        check = f"{_script(rate)}\nip netns exec {HOSTS[0]} true"
        done = subprocess.run(
            _isolated(["sh", "-c", check]), capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        ""
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or ["it is not allowed"])[-1]
    )


def run_on_hosts(rate: float, program: Path, arguments: Sequence[str], timeout: float) -> None:
    """Run ``program RANK ARGUMENTS`` on both hosts. Raises CalledProcessError if one of
    them fails.
    """
    words = [sys.executable, str(program)]
    lines = [_script(rate)]
    for rank, host in enumerate(HOSTS):
        quoted = " ".join(f"'{word}'" for word in [*words, str(rank), *arguments])
        lines.append(f"ip netns exec {host} {quoted} &\nrank{rank}=$!")
    lines.append("wait $rank0; first=$?; wait $rank1; second=$?; exit $((first + second))")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    # Inside a process namespace of its own nothing outlives a run that is cut short.
    isolated = _isolated(["--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines)])
    subprocess.run(isolated, env=environment, timeout=timeout, check=True)
