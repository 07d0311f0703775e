"""A measured device in a file, which ``benchmarks/calibrate.py`` writes and plans use."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_merak.cluster.table import Cluster, Device, device_of
from megatron_merak.errors import ConfigError
from megatron_merak.strict_json import parse

VERSION = 1
FLAG = "--device-profile"
_KEYS = ("version", "device", "measured_on", "date", "torch")
_REMEDY = "Measure it again by benchmarks/calibrate.py"


@dataclass(frozen=True)
class Profile:
    """A device with measured rates.

    measured_on: the driver's name of it.
    date, torch: of the measurement.
    """

    device: Device
    measured_on: str
    date: str
    torch: str

    def to_json(self, path: str | Path) -> None:
        """Write a file that ``read_profile`` reads."""
        content = {"version": VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
    if wrong := sorted({*content} ^ {*_KEYS}):
        raise ConfigError(
            FLAG,
            path,
            f"the key {wrong[0]} is {'unknown' if wrong[0] in content else 'missing'}",
            _REMEDY,
        )
    device = device_of(content["device"], f"{path}: device")
    if device.rates is None or not device.rates.products:
        raise ConfigError(FLAG, path, "it holds no measured product", _REMEDY)
    return Profile(device, *(str(content[key]) for key in _KEYS[2:]))


def profiled(cluster: Cluster, path: str | None) -> Cluster:
    """Return the cluster with the device of the file at ``path``; unchanged without a path.

    Raises ConfigError as ``read_profile`` does, and for a profile of another device.
    """
    if path is None:
        return cluster
    profile = read_profile(path)
    if profile.device.name != cluster.device.name:
        reason = (
            f"it was measured on {profile.device.name}, and this plan is for {cluster.device.name}"
        )
        raise ConfigError(
            FLAG,
            path,
            reason,
            "Measure this device by benchmarks/calibrate.py, or leave the flag out",
        )
    return replace(cluster, device=profile.device)
