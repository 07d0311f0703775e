"""Two hosts on this machine: namespaces with a network, a name, processes and shared memory of their
own, and a cable between them which can be slow, cut or mended.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

SUBNET = "10.77.{}"


def reason_without() -> str:
    """Return why there can be no two hosts here; empty: there can."""
    if os.geteuid():
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (Debian: iproute2, util-linux)"
    name = f"merak-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns: {made.stderr.strip()}"
    words = ["ip", "link", "add", "a0", "netns", name, "type", "veth", "peer", "name", "b0"]
    linked = subprocess.run([*words, "netns", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"ip link type veth: {linked.stderr.strip()}" if linked.returncode else ""


class Host:
    """One of the two. ``name`` resolves to ``address`` on both, and is what the host calls itself."""

    def __init__(self, namespace: str, name: str, address: str, directory: Path):
        self.namespace = namespace
        self.name = name
        self.address = address
        self.directory = directory  # of what both see in place of the machine's own files
        (directory / f"boot-{name}").write_text(f"{uuid.uuid4()}\n")

    def start(self, words: list[str], log: Path, **variables: str) -> subprocess.Popen:
        """Start a command on this host; what it prints goes to a file."""
        script = (
            'mount --bind "$0/hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && '
            'mount --bind "$0/boot-$1" /proc/sys/kernel/random/boot_id && hostname "$1" && '
            'shift && exec "$@"'
        )
        # with processes and memory of its own, or ranks would find each other on one host
        apart = ["--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        inside = ["unshare", *apart, "sh", "-c", script, str(self.directory), self.name]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable"} | variables
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside, *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def pids(self) -> list[int]:
        told = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        )
        return [int(each) for each in told.stdout.split()]

    def ranks(self) -> list[int]:
        """Return the processes that torchrun has started here."""
        found = []
        for pid in self.pids():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"pretrain_gpt.py") for word in words[:3]):
                    found.append(pid)
        return found

    def kill(self) -> None:
        """End everything on this host at once, as a power cut does: its connections say nothing."""
        self.cut()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while self.pids() and time.monotonic() < end:
            time.sleep(0.05)

    def cut(self) -> None:
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def slow(self, rate: str) -> None:
        """Let the cable carry what this host sends at ``rate``, such as "80mbit"."""
        words = ["tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate]
        run("ip", "netns", "exec", self.namespace, *words, "burst", "64kbit", "latency", "400ms")

    def _link(self, state: str) -> None:
        run("ip", "-n", self.namespace, "link", "set", "cable", state)


class TwoHosts:
    """A context with two hosts, ``one`` and ``other``."""

    def __init__(self, directory: Path):
        token = secrets.token_hex(3)
        subnet = SUBNET.format(int(token, 16) % 250)
        hosts = directory / "hosts"
        addresses = [f"{subnet}.{number}" for number in (1, 2)]
        names = ["ha", "hb"]
        lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.one, self.other = (
            Host(f"merak-{token}-{name}", name, address, directory)
            for name, address in zip(names, addresses, strict=True)
        )

    def __enter__(self) -> "TwoHosts":
        for host in (self.one, self.other):
            run("ip", "netns", "add", host.namespace)
        ends = ("cable", "netns", self.one.namespace, "type", "veth", "peer", "name", "cable")
        run("ip", "link", "add", *ends, "netns", self.other.namespace)
        for host in (self.one, self.other):
            inside = ("ip", "-n", host.namespace)
            run(*inside, "addr", "add", f"{host.address}/24", "dev", "cable")
            run(*inside, "link", "set", "lo", "up")
            host.mend()
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self.one, self.other):
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
