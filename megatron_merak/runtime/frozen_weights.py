"""Frozen weights in memory of the host, copied to the device for the units that read them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..parallel.buffers import align
from ..parallel.host_link import HostLink, host_zeros
from ..parallel.pieces import Pieces
from .unit_parameters import UnitWeights


class FrozenWeights(UnitWeights):
    """The frozen weights of a rank; zeros until they are written on the host.

    Those that the same units read, and that have one dtype, are one piece.

    tensors: shape and dtype by name.
    reads:   unit -> the names that it reads, others are ignored; every one is read by a unit.
    device:  of the rank.

    Attributes:
    link:       to the host; set before the first pass.
    on_host:    the weights, by name.
    parameters: what segments read, by name, with values while a unit that reads it computes.
    names:      of ``parameters``.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        reads: Mapping[int, Sequence[str]],
        device: torch.device,
    ):
        super().__init__()
        self.link: HostLink | None = None
        readers: dict[str, tuple[int, ...]] = {}
        for unit, names in reads.items():
            for name in names:
                if name in tensors:
                    readers[name] = (*readers.get(name, ()), unit)
        alike: dict[torch.dtype, dict[tuple[int, ...], list[str]]] = {}
        for name, units in readers.items():
            alike.setdefault(tensors[name][1], {}).setdefault(units, []).append(name)
        self.on_host: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._pieces: list[tuple[Pieces, int]] = []
        self._stored: list[Tensor] = []
        self._numbers: dict[int, list[int]] = {}
        self._number_of: dict[str, int] = {}
        for dtype, groups in alike.items():
            self._lay_out(dtype, groups, tensors, device)
        self.names = {parameter: name for name, parameter in self.parameters.items()}

    def _lay_out(
        self,
        dtype: torch.dtype,
        groups: Mapping[tuple[int, ...], Sequence[str]],
        tensors: Mapping[str, tuple[Sequence[int], torch.dtype]],
        device: torch.device,
    ) -> None:
        offset = 0
        bounds = []
        places = {}
        for names in groups.values():
            first = offset
            for name in names:
                shape = tuple(tensors[name][0])
                elements = torch.Size(shape).numel()
                places[name] = (offset, offset + elements, shape)
                # side by side, as where they stay on the device: layers of one input are one product
                offset = align(offset + elements)
            bounds.append((first, offset))
        pieces = Pieces(bounds, places, dtype, device)
        stored = host_zeros(offset, dtype, device)
        for name, value in pieces.named.items():
            self.parameters[name] = nn.Parameter(value, False)
        for name, (start, stop, shape) in places.items():
            self.on_host[name] = stored[start:stop].view(shape)
        for at, ((units, names), (start, stop)) in enumerate(
            zip(groups.items(), bounds, strict=True)
        ):
            for unit in units:
                self._numbers.setdefault(unit, []).append(len(self._pieces))
            self._number_of |= dict.fromkeys(names, len(self._pieces))
            self._pieces.append((pieces, at))
            self._stored.append(stored[start:stop])

    def gathers(self, unit: int, name: str) -> bool:
        """Whether a weight is on the device when a unit is visited."""
        return self._number_of[name] in self.numbers(unit)

    def numbers(self, unit: int) -> Sequence[int]:
        return self._numbers.get(unit, ())

    def pieces(self, number: int) -> tuple[Pieces, int]:
        return self._pieces[number]

    def count(self) -> int:
        return len(self._pieces)

    def fill(self, number: int) -> None:
        assert self.link is not None, "set before the first pass"
        pieces, at = self._pieces[number]
        self.arriving[number] = self.link.load(pieces.piece(at).data, self._stored[number])
