"""Devices, links and what a collective costs: the one cost table of the planner, the simulator and
the emulation.

Rates are bytes and floating-point operations per second, times are seconds. GPU peaks are the
vendor's dense figures; ``matmul_efficiency`` is the fraction of the peak that a large matrix
product reaches in practice.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from megatron_merak.cluster.device import GIB, Device, Link
from megatron_merak.cluster.nodes import NodeGroup, joined, of_all
from megatron_merak.cluster.practice import PRACTICE, Practice, practice_of
from megatron_merak.cluster.rates import rates_of
from megatron_merak.counting import counted
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.strict_json import parse


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``ranks_per_node`` devices.

    device:  of a rank, where ``nodes`` says nothing else.
    inside:  link between ranks of one node.
    between: one network card.
    nics:    network cards of a node, shared equally by its ranks; 0: each rank has its own.
    nodes:   of a cluster whose nodes differ, all of them in the order of their ranks; empty: there
             are as many as a job needs, all alike.
    """

    device: Device
    ranks_per_node: int
    inside: Link
    between: Link
    name: str = ""
    nics: int = 0
    nodes: tuple[NodeGroup, ...] = ()

    def __str__(self) -> str:
        """Return the devices' names, and the cluster's if it differs."""
        names = self.device_names
        return names if self.name in ("", names) else f"{names} ({self.name})"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The different devices of its ranks."""
        return tuple(dict.fromkeys(group.rated for group in self.nodes)) or (self.device,)

    @property
    def most_usable(self) -> int:
        """Bytes that plans use of the largest of its devices; 0: unknown."""
        return max(device.usable for device in self.devices)

    @property
    def device_names(self) -> str:
        """The names of its devices, in words."""
        *others, last = [device.name for device in self.devices]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def practice(self) -> Practice | None:
        """What training reaches of its links, and what all ranks wait for; see ``Practice``."""
        if not self.nodes:
            return self.device.practice
        return of_all(device.practice for device in self.devices)

    def device_at(self, rank: int) -> Device:
        """Return the device of a rank. Raises PlanError for one that no node has."""
        if not self.nodes:
            return self.device
        node = rank // self.ranks_per_node
        for group in self.nodes:
            if node < group.count:
                return group.rated
            node -= group.count
        raise self._too_small(rank + 1)

    def used_by(self, ranks: int) -> Self:
        """Return the cluster with the nodes that a job of so many ranks has, the first ones: where
        these are alike, one without ``nodes``. Raises PlanError for more ranks than nodes have.
        """
        left = -(-ranks // self.ranks_per_node)
        used = []
        for group in self.nodes:
            count = min(left, group.count)
            left -= count
            used += [replace(group, count=count)] if count else []
        if not self.nodes:
            return self
        if left:
            raise self._too_small(ranks)
        groups = joined(used)
        if len(groups) == 1:
            return replace(self, device=groups[0].rated, nodes=())
        return replace(self, nodes=groups)

    def _too_small(self, ranks: int) -> PlanError:
        nodes = sum(group.count for group in self.nodes)
        most = nodes * self.ranks_per_node
        reason = (
            f"the cluster{f' {self.name}' if self.name else ''} has {counted(nodes, 'node')} of "
        )
        reason += f"{self.ranks_per_node}"
        return PlanError("ranks", ranks, reason, f"Use at most {most:,}, or name more nodes")

    def with_devices(self, changed: Callable[[Device], Device]) -> Self:
        """Return the cluster with another device in place of each."""
        nodes = tuple(replace(group, device=changed(group.device)) for group in self.nodes)
        return replace(self, device=changed(self.device), nodes=nodes)

    @property
    def by_figures(self) -> Self:
        """The cluster without what training reaches of its figures: an emulated one has them
        whole.
        """
        if all(device.practice is None for device in (self.device, *self.devices)):
            return self
        return self.with_devices(lambda device: replace(device, practice=None))

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are on several nodes."""
        return len({rank // self.ranks_per_node for rank in ranks}) > 1

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link of a collective over these ranks, or of a message between two, for the
        formulas below.

        A group with k ranks on each of its nodes has the bandwidth of k ranks' network cards: its
        ranks form a ring through all nodes, and NCCL forms as many such rings as there are cards,
        each with its part of the message. The links inside bound it, as every ring uses them. Of
        the N - 1 steps around the ring, one less than there are nodes crosses the network. A node
        with fewer ranks of the group than others is the bound. The other ranks of a node are
        assumed to send at the same time, so that shared cards are divided among them.

        Source: NCCL's own model of a ring, src/graph/tuning.cc (the sum of its channels; the steps
                between nodes).
        """
        ranks_of_node = Counter(rank // self.ranks_per_node for rank in ranks)
        nodes = len(ranks_of_node)
        fewest = min(ranks_of_node.values())
        steps = len(ranks) - 1
        if nodes == 1:
            return self.inside
        cards = fewest * (self.nics / self.ranks_per_node if self.nics else 1)
        bandwidth = cards * self.between.bandwidth
        outer = nodes - 1
        if outer == steps:
            return replace(self.between, bandwidth=bandwidth)
        latency = (outer * self.between.latency + (steps - outer) * self.inside.latency) / steps
        return replace(
            self.between, latency=latency, bandwidth=min(bandwidth, self.inside.bandwidth)
        )

    def exchange_link(self, ranks: Sequence[int]) -> Link:
        """Return the link of an exchange over these ranks, in which every rank sends another part to
        each other rank, for the formulas below.

        Over several nodes a rank sends what is for other nodes through its own share of the network
        cards, where a ring would cross between two nodes once: parts for n - k of the n - 1 other
        ranks, with k ranks of the group on its node. The rest goes inside the node meanwhile, if
        there is any.
        """
        ranks_of_node = Counter(rank // self.ranks_per_node for rank in ranks)
        if len(ranks_of_node) in (1, len(ranks)):
            return self.link(ranks)
        size = len(ranks)
        cards = self.nics / self.ranks_per_node if self.nics else 1.0
        outside = (size - 1) / (size - min(ranks_of_node.values()))
        bandwidth = cards * self.between.bandwidth * outside
        return replace(self.link(ranks), bandwidth=min(bandwidth, self.inside.bandwidth))

    def to_json(self, path: str | Path) -> None:
        """Write a file that ``from_json`` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return what ``from_dict`` reads; without ``nodes`` where all are alike."""
        content = asdict(self)
        if not self.nodes:
            del content["nodes"]
        return content

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a cluster: the fields of this class; a device or link may be the name of one in the
        table. An entry of ``nodes`` has the fields of ``NodeGroup``; without a device it has that
        of the cluster.

        Raises ConfigError for a file that is missing or no JSON, unknown or missing keys, and
        impossible numbers.
        """
        try:
            if Path(path).exists() and not Path(path).is_file():
                raise OSError("it is not a regular file")
            content = parse(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                "cluster file", path, error.strerror or str(error), "Name a readable file"
            ) from error
        except ValueError as error:
            raise ConfigError(
                "cluster file", path, f"it is not JSON: {error}", "Correct it"
            ) from error
        named = {"name": Path(path).stem, **content} if isinstance(content, dict) else content
        return cls.from_dict(named, str(path))

    @classmethod
    def from_dict(cls, content: Any, where: str) -> Self:
        """Return a cluster from the JSON object that ``from_json`` describes. ``where`` names it in
        errors. Raises ConfigError.
        """
        values = _fields(cls, content, where, {"name", "nics", "nodes"})
        values["device"] = device_of(values["device"], f"{where}: device")
        values["nodes"] = _groups(values.get("nodes", ()), values["device"], f"{where}: nodes")
        for key in ("inside", "between"):
            values[key] = _row(values[key], LINKS, f"{where}: {key}")
        return cls(**values)


_OPTIONAL = (
    "dispatch",
    "fused_attention",
    "rates",
    "multiprocessors",
    "practice",
    "reserve",
    "host_bandwidth",
    "fp8_flops",
    "step_factor",
)
_ZERO_IS_FINE = (
    "memory",
    "dispatch",
    "latency",
    "nics",
    "multiprocessors",
    "host_bandwidth",
    "fp8_flops",
)
_KINDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _fields(kind: type, content: Any, where: str, optional: Collection[str] = ()) -> dict[str, Any]:
    """Return the checked values of a dataclass: names, types and ranges. Raises ConfigError."""
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    if not isinstance(content, dict):
        raise ConfigError("cluster", where, "it is not an object", f"Give {', '.join(types)}")
    for key, value in content.items():
        expected = types.get(key)
        if expected is None:
            raise ConfigError(f"{where}: key", key, "it is unknown", f"Use {', '.join(types)}")
        accepted = (int, float) if expected is float else expected
        if expected in _KINDS and (
            isinstance(value, bool) != (expected is bool) or not isinstance(value, accepted)
        ):
            raise ConfigError(
                f"{where}: {key}", repr(value), f"it is not {_KINDS[expected]}", "Correct it"
            )
        if expected in (int, float) and not (
            0 < value < math.inf or (value == 0 and key in _ZERO_IS_FINE)
        ):
            least = (
                "a finite number, at least 0" if key in _ZERO_IS_FINE else "a finite number above 0"
            )
            raise ConfigError(f"{where}: {key}", value, "it cannot be", f"Use {least}")
    missing = [key for key in types if key not in content and key not in optional]
    if missing:
        raise ConfigError(
            f"{where}: key", missing[0], "it is missing", f"Give {', '.join(missing)}"
        )
    if content.get("matmul_efficiency", 1) > 1:
        raise ConfigError(
            f"{where}: matmul_efficiency",
            content["matmul_efficiency"],
            "it exceeds 1",
            "Use at most 1",
        )
    return dict(content)


def _row(value: Any, table: Mapping[str, Any], where: str) -> Any:
    """Return a row of the table by its name, or a new one by its fields."""
    if isinstance(value, str):
        if value not in table:
            raise ConfigError(
                where,
                value,
                "it is not in the table",
                f"Use one of {', '.join(table)}, or give its fields",
            )
        return table[value]
    kind = type(next(iter(table.values())))
    return kind(**_fields(kind, value, where, _OPTIONAL))


def device_of(content: Any, where: str) -> Device:
    """Return a device from JSON: the name of one in the table, or its fields. ``where`` names it in
    errors.

    Raises ConfigError for unknown names, unknown or missing keys, and impossible numbers.
    """
    if isinstance(content, str):
        return _row(content, DEVICES, where)
    device = _row(content, DEVICES, where)
    reserve = device.reserve
    if reserve is not None and (not isinstance(reserve, int) or not 0 <= reserve < device.memory):
        reason = "it is not a number of bytes below the memory"
        raise ConfigError(f"{where}: reserve", reserve, reason, "Correct it")
    rates = device.rates
    practice = device.practice
    return replace(
        device,
        rates=None if rates is None else rates_of(rates, f"{where}: rates"),
        practice=None if practice is None else practice_of(practice, f"{where}: practice"),
    )


def _groups(content: Any, device: Device, where: str) -> tuple[NodeGroup, ...]:
    """Return groups of nodes from JSON.

    device: of those that name none.

    Raises ConfigError for unknown or missing keys, impossible numbers, and devices that no plan
    can have beside each other.
    """
    if not isinstance(content, list | tuple):
        remedy = "Write one such as [{'count': 8}, {'count': 8, 'speed': 0.85}]"
        raise ConfigError(where, repr(content)[:60], "it is not a list of groups", remedy)
    groups: list[NodeGroup] = []
    for place, row in enumerate(content):
        own = f"{where}: group {place}"
        values = _fields(NodeGroup, row, own, {"device", "speed"})
        if values.get("speed", 1) > 1:
            reason = "it is above 1"
            remedy = "Give what the nodes reach of the device's rates, such as 0.85"
            raise ConfigError(f"{own}: speed", values["speed"], reason, remedy)
        if "device" in values:
            values["device"] = device_of(values["device"], f"{own}: device")
        group = NodeGroup(**{"device": device, **values})
        _check_beside(device, group.device, own)
        _check_names([*groups, group], own)
        groups.append(group)
    return tuple(groups)


def _check_names(groups: list[NodeGroup], where: str) -> None:
    """Raise ConfigError if the last of these groups has the device's name of another one."""
    last = groups[-1].device
    for place, group in enumerate(groups):
        if group.device.name == last.name and group.device != last:
            reason = f"group {place} has another device of that name"
            remedy = "Give each its own name, by which a plan tells them apart"
            raise ConfigError(f"{where}: device", last.name, reason, remedy)


def _check_beside(one: Device, other: Device, where: str) -> None:
    """Raise ConfigError for devices that no plan can have beside each other."""
    if bool(one.memory) != bool(other.memory):
        names = (one.name, other.name)[:: 1 if other.memory else -1]
        reason = f"the memory of {names[0]} is not known, and that of {names[1]} is"
        raise ConfigError(f"{where}: device", other.name, reason, "Give the memory of both")
    if one.fused_attention != other.fused_attention:
        names = (one.name, other.name)[:: 1 if one.fused_attention else -1]
        reason = f"attention is one kernel on {names[0]}, and several on {names[1]}"
        remedy = "Plan for nodes of one kind, or give both the same fused_attention"
        raise ConfigError(f"{where}: device", other.name, reason, remedy)


# To the host's memory, in each direction: four fifths of the printed rates, which are 16, 32 and
# 64 GB/s of 16 lanes of PCIe 3, 4 and 5, and 450 GB/s of NVLink-C2C. Two GPUs share that of GB200.
_PCIE3 = 12.5e9
_PCIE4 = 25e9
_PCIE5 = 50e9
_C2C = 360e9

# device -> peaks of 16-bit and of 32-bit types, memory bandwidth, memory, share of the peak that a
# large product reaches, multiprocessors, row of ``PRACTICE``, bandwidth to the host. Peaks and bandwidths are those of
# the vendors' data sheets: V100 (2020), A100 (2021), H100 (2023), GH200 (2023), DGX B200, GB200 and
# GB300 NVL72 (2025), Instinct MI300X (2023).
_GPUS = {
    "V100": (
        125e12,
        15.7e12,
        0.9e12,
        32 * GIB,
        0.75,
        80,
        "V100",
        _PCIE3,
    ),  # 16-bit products: fp16 alone
    "V100 16GB": (125e12, 15.7e12, 0.9e12, 16 * GIB, 0.75, 80, "V100", _PCIE3),
    "A100": (312e12, 19.5e12, 2.039e12, 80 * GIB, 0.75, 108, "A100", _PCIE4),
    "A100 40GB": (312e12, 19.5e12, 1.555e12, 40 * GIB, 0.75, 108, "A100", _PCIE4),
    "H100": (989.4e12, 66.9e12, 3.35e12, 80 * GIB, 0.65, 132, "H100", _PCIE5),
    "H100 PCIe": (756.4e12, 51.2e12, 2.04e12, 80 * GIB, 0.65, 114, "H100 PCIe", _PCIE5),
    "H100 NVL": (835.5e12, 60e12, 3.94e12, 94 * GIB, 0.65, 132, "H100", _PCIE5),
    # measured: copies, and 790e12 of large products
    "H200": (989.4e12, 66.9e12, 4.3e12, 150_800_000_000, 0.8, 132, "H100", _PCIE5),
    "GH200": (989.4e12, 66.9e12, 4e12, 96_000_000_000, 0.65, 132, "H100", _C2C),
    "B200": (2250e12, 75e12, 8e12, 180_000_000_000, 0.7, 148, "B200", _PCIE5),
    "GB200": (2500e12, 80e12, 8e12, 186_000_000_000, 0.7, 148, "B200", _C2C / 2),
    "GB300": (2500e12, 80e12, 8e12, 278_000_000_000, 0.7, 148, "B200", _C2C / 2),
    "MI300X": (1307.4e12, 163.4e12, 5.3e12, 192_000_000_000, 0.5, 304, "MI300X", _PCIE5),
    # 16-bit products with fp32 sums, half the headline rate
    "RTX 3090": (71e12, 35.6e12, 936e9, 24 * GIB, 0.8, 0, None, _PCIE4),
}
# On all of these sheets the dense rate of fp8 is twice that of 16-bit types.
_WITH_FP8 = frozenset(
    {"H100", "H100 PCIe", "H100 NVL", "H200", "GH200", "B200", "GB200", "GB300", "MI300X"}
)
# The CPU row is one core of a current server with AVX-512 and its bf16 instructions: measured, so
# its efficiency is 1.
_CPU = Device(
    "cpu",
    400e9,
    240e9,
    10e9,
    memory=0,
    matmul_efficiency=1.0,
    dispatch=5e-6,
    fused_attention=False,
    host_bandwidth=5e9,  # a copy reads and writes its one memory
)
_DEVICES = (
    _CPU,
    *(
        Device(
            name,
            peak,
            float32,
            bandwidth,
            memory=memory,
            matmul_efficiency=efficiency,
            multiprocessors=multiprocessors,
            practice=None if practice is None else PRACTICE[practice],
            host_bandwidth=host_bandwidth,
            fp8_flops=2 * peak if name in _WITH_FP8 else 0.0,
        )
        for name, (
            peak,
            float32,
            bandwidth,
            memory,
            efficiency,
            multiprocessors,
            practice,
            host_bandwidth,
        ) in _GPUS.items()
    ),
)
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})

_LINKS = (
    Link("loopback", 170e-6, 1.7e9),  # gloo between two cores, measured
    Link("ethernet-1g", 100e-6, 0.119e9),
    Link("ethernet-100g", 20e-6, 11e9),
    # x16 through host memory: GeForce drivers allow no access to a peer's
    Link("pcie4", 10e-6, 12e9),
    Link("pcie5", 10e-6, 40e9),
    # four fifths of the printed rate, of one direction: 150, 300, 450 and 900 GB/s
    Link("nvlink2", 5e-6, 120e9),
    Link("nvlink3", 4e-6, 240e9),
    Link("nvlink4", 4e-6, 360e9),
    Link("nvlink5", 4e-6, 720e9),
    Link("infinity-fabric", 6e-6, 310e9),  # of 448: seven links to seven peers
    Link("infiniband-edr", 10e-6, 11.5e9),
    Link("infiniband-hdr", 10e-6, 23e9),
    Link("infiniband-ndr", 10e-6, 46e9),
    Link("infiniband-xdr", 10e-6, 92e9),
)
LINKS: Mapping[str, Link] = MappingProxyType({link.name: link for link in _LINKS})

# profile -> device, ranks in a node, the link inside, a network card, cards of a node (0: one a
# rank)
_CLUSTERS = {
    "cpu": ("cpu", 64, "loopback", "ethernet-100g", 1),
    "laptop": ("cpu", 1, "loopback", "ethernet-1g", 0),
    "rtx3090": ("RTX 3090", 8, "pcie4", "ethernet-100g", 1),
    "dgx-v100": ("V100", 8, "nvlink2", "infiniband-edr", 4),
    "dgx-a100": ("A100", 8, "nvlink3", "infiniband-hdr", 0),
    "dgx-h100": ("H100", 8, "nvlink4", "infiniband-ndr", 0),
    "h100-pcie": ("H100 PCIe", 8, "pcie5", "infiniband-ndr", 4),
    "dgx-h200": ("H200", 8, "nvlink4", "infiniband-ndr", 0),
    # nodes of these three are domains of NVLink
    "dgx-gh200": ("GH200", 256, "nvlink4", "infiniband-ndr", 0),
    "gb200-nvl72": ("GB200", 72, "nvlink5", "infiniband-ndr", 0),
    "gb300-nvl72": ("GB300", 72, "nvlink5", "infiniband-xdr", 0),
    "dgx-b200": ("B200", 8, "nvlink5", "infiniband-ndr", 0),
    "mi300x": ("MI300X", 8, "infinity-fabric", "infiniband-ndr", 0),
}
CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        name: Cluster(DEVICES[device], ranks, LINKS[inside], LINKS[between], name=name, nics=nics)
        for name, (device, ranks, inside, between, nics) in _CLUSTERS.items()
    }
)


def reserving(cluster: Cluster, reserve_gb: float | None) -> Cluster:
    """Return the cluster with so many GiB of each device left for what plans do not count (see
    ``Device.usable``); unchanged for None, and where the memory is not known.

    Raises ConfigError for all of the memory or more.
    """
    if reserve_gb is None or not cluster.device.memory:
        return cluster
    reserve = int(reserve_gb * GIB)
    for device in dict.fromkeys((cluster.device, *cluster.devices)):
        if reserve_gb * GIB >= device.memory:
            reason = f"{device.name} has {device.memory / GIB:.0f} GiB"
            raise ConfigError("--memory-reserve-gb", reserve_gb, reason, "Leave some for the model")
    return cluster.with_devices(lambda device: replace(device, reserve=reserve))


def find_device(name: str) -> Device:
    """Return the table's row for a name such as "cpu", "H100" or "NVIDIA A100-SXM4-80GB"; PlanError
    if there is none.
    """
    words = set(re.findall("[A-Z0-9]+", name.upper()))
    rows = [device for device in _DEVICES if set(device.name.upper().split()) <= words]
    if not rows:
        raise PlanError("device", name, "its rates are unknown", f"Use one of {', '.join(DEVICES)}")
    return max(rows, key=lambda device: len(device.name.split()))


def find_cluster(name: str) -> Cluster:
    """Return a cluster by its name, by its JSON file, or the usual one around a device of that
    name.

    The usual one: 8 GPUs joined by NVLink and InfiniBand, a rack of GPUs, or the cores of one host. Raises
    ConfigError for a file that cannot be read, PlanError for an unknown name.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name.endswith(".json"):
        return Cluster.from_json(name)
    try:
        device = find_device(name)
    except PlanError as error:
        choices = ", ".join(dict.fromkeys((*CLUSTERS, *DEVICES)))
        raise PlanError(
            "cluster", name, "there is no such one", f"Use one of {choices}, or a file *.json"
        ) from error
    own = [row for row in CLUSTERS.values() if row.device is device]
    family = device.name.split()[0]
    usual = [row for row in CLUSTERS.values() if row.device.name.split()[0] == family]
    return replace([*own, *usual][0], device=device)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float:
    """Return the dense peak (no sparsity) that MFU is relative to; PlanError for a device that is
    not in the table.
    """
    return find_device(device_name).flops(dtype)


def all_reduce(ranks: int, message: float, link: Link) -> float:
    """Ring: every rank ends with the sum of ``message`` bytes. Seconds."""
    return 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * message / link.bandwidth


def all_gather(ranks: int, shard: float, link: Link) -> float:
    """Ring: every rank contributes ``shard`` bytes and ends with all of them. Seconds."""
    return (ranks - 1) * (link.latency + shard / link.bandwidth)


def reduce_scatter(ranks: int, shard: float, link: Link) -> float:
    """Ring: every rank ends with the sum of one ``shard``. Seconds."""
    return all_gather(ranks, shard, link)


def broadcast(ranks: int, message: float, link: Link) -> float:
    """Pipelined tree; nothing to do for one rank. Seconds."""
    return 0.0 if ranks == 1 else send(message, link)


def send(message: float, link: Link) -> float:
    """One message from one rank to another. Seconds."""
    return link.latency + message / link.bandwidth
