"""A measured machine in a file, which merak-probe writes and plans use."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_merak.cluster.device import Device, Link
from megatron_merak.cluster.link_times import (
    BETWEEN,
    INSIDE,
    LinkTime,
    fitted,
    link_times_of,
)
from megatron_merak.cluster.slowed import slowed
from megatron_merak.cluster.table import Cluster, device_of
from megatron_merak.errors import ConfigError
from megatron_merak.strict_json import parse

VERSION = 2
FLAG = "--device-profile"
_KEYS = ("version", "device", "links", "ranks", "host_copy", "measured_on", "date", "torch")
_FACTOR = "step_factor"  # missing: of no run
_REMEDY = "Measure it again by merak-probe"


@dataclass(frozen=True)
class Profile:
    """A device with measured rates, and what was measured between ranks.

    links:       times of messages and collectives, by size; none where one rank measured.
    ranks:       of a host that measured at the same time.
    host_copy:   bytes per second of a copy from the device into memory of the host that stays
                 where it is; 0 on a CPU. No plan reads it: offloading copies both ways at once, see
                 ``Device.host_bandwidth``.
    measured_on: the driver's name of the device.
    date, torch: of the measurement.
    step_factor: by how much steps of runs took longer than predicted with this profile, see
                 ``merak-plan calibrate``.
    """

    device: Device
    links: tuple[LinkTime, ...]
    ranks: int
    host_copy: float
    measured_on: str
    date: str
    torch: str
    step_factor: float = 1.0

    def link(self, where: str) -> Link | None:
        """Return the link "inside" a node or "between" nodes; None where none was measured."""
        return fitted(self.links, where)

    def to_json(self) -> str:
        """Return the text of a file that ``read_profile`` reads."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


def read_profile(path: str | Path) -> Profile:
    """Read a profile. Raises ConfigError for a file that cannot be read, is of another version, or
    has invalid values.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a regular file")
        content = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            FLAG, path, error.strerror or str(error), "Name a readable file"
        ) from error
    except ValueError as error:
        raise ConfigError(FLAG, path, f"it is not JSON: {error}", _REMEDY) from error
    if not isinstance(content, dict) or "version" not in content:
        raise ConfigError(FLAG, path, "it is no profile of a device", _REMEDY)
    if content["version"] != VERSION:
        reason = f"it is of version {content['version']}, and this library reads version {VERSION}"
        raise ConfigError(FLAG, path, reason, _REMEDY)
    if wrong := sorted({*content} - {_FACTOR} ^ {*_KEYS}):
        raise ConfigError(
            FLAG,
            path,
            f"the key {wrong[0]} is {'unknown' if wrong[0] in content else 'missing'}",
            _REMEDY,
        )
    device = device_of(content["device"], f"{path}: device")
    if device.rates is None or not device.rates.products:
        raise ConfigError(FLAG, path, "it holds no measured product", _REMEDY)
    links = link_times_of(content["links"], f"{path}: links")
    factor = content.get(_FACTOR, 1.0)
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
        raise ConfigError(
            f"{path}: {_FACTOR}", repr(factor), "it is not a number above 0", "Correct it"
        )
    for key, least in (("ranks", 1), ("host_copy", 0)):
        value = content[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= least:
            reason = f"it is not a number of at least {least}"
            raise ConfigError(f"{path}: {key}", repr(value), reason, _REMEDY)
    texts = (content[key] for key in _KEYS[5:])
    measured_on, date, torch = map(str, texts)
    return Profile(
        device,
        links,
        int(content["ranks"]),
        content["host_copy"],
        measured_on=measured_on,
        date=date,
        torch=torch,
        step_factor=factor,
    )


def profiled(cluster: Cluster, path: str | None) -> Cluster:
    """Return the cluster with the device of the file at ``path``, and the links that were measured,
    all of them slower by its ``step_factor``; unchanged without a path.

    Raises ConfigError as ``read_profile`` does, and for a profile of another device.
    """
    if path is None:
        return cluster
    profile = read_profile(path)
    device = profile.device
    planned = list(dict.fromkeys(group.device.name for group in cluster.nodes))
    planned = planned or [cluster.device.name]
    if planned != [device.name]:
        reason = f"it was measured on {device.name}, and this plan is for {' and '.join(planned)}"
        raise ConfigError(
            FLAG,
            path,
            reason,
            "Measure this device by merak-probe, or leave the flag out",
        )
    reached = _reached(device, {time.where for time in profile.links})
    measured = replace(
        cluster.with_devices(lambda _: reached),
        inside=profile.link(INSIDE) or cluster.inside,
        between=profile.link(BETWEEN) or cluster.between,
    )
    return slowed(measured, profile.step_factor)


def _reached(device: Device, measured: Collection[str]) -> Device:
    """Return the device without the shares of links that training reaches where the links' own
    times are known.
    """
    practice = device.practice
    if practice is None:
        return device
    known = {where: 1.0 for where in (INSIDE, BETWEEN) if where in measured}
    return replace(device, practice=replace(practice, **known))
