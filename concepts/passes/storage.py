"""Where the values lie that a pass records, and when they move to the memory of the computer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.converters import checked
from icebear.result_files import Given, saved_as

Where = Literal["device", "pinned", "cpu"]
PARTS = 4
"""Recorded values may take one in so many parts of the free memory. The others are for the pass that records them and
for ranking, which makes copies; in the memory of the computer also for other programs, because pinned memory is not
swapped."""


def planned(size: int, device: torch.device, free: Callable[[torch.device], int]) -> Where:
    """Return where to record values of a pass: in the memory of its device, in pinned memory of the computer, to which
    a CUDA device copies while it goes on computing, or in other memory of the computer.

    size: the bytes of the values, which take at most one in `PARTS` of the free memory.
    free: returns the free bytes of a device; it is not called for a model on the CPU.
    """
    if device.type == "cpu" or PARTS * size <= free(device):
        return "device"
    if device.type == "cuda" and PARTS * size <= free(torch.device("cpu")):
        return "pinned"
    return "cpu"


def memory_at_hand(device: torch.device) -> int:
    """Return the free bytes of a device; of the CPU those that programs can have."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch has them already
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    known = Path("/proc/meminfo")
    if known.exists():
        rows = dict(line.split(":") for line in known.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SiteValues(Mapping[str, Tensor]):
    """Values by site, which move to the CPU when they are asked for, each site once."""

    def __init__(self, recorded: Mapping[str, Tensor] | None = None) -> None:
        """recorded: site -> values, on any device."""
        self._recorded = dict(recorded or {})

    def __getitem__(self, site: str) -> Tensor:
        x = self._recorded[site]
        if x.device.type != "cpu":
            x = self._recorded[site] = x.cpu()
        return x

    def unmoved(self, site: str) -> Tensor:
        """Return the values of a site where they lie, for what is computed there."""
        return self._recorded[site]

    def __contains__(self, site: object) -> bool:
        return site in self._recorded  # that of `Mapping` would move it

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorded)

    def __len__(self) -> int:
        return len(self._recorded)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)  # a copy is for a machine that may have no such device


def _read(saved: Any, _: Given) -> SiteValues:
    checked(saved, isinstance(saved, dict) and all(isinstance(x, Tensor) for x in saved.values()), dict)
    return SiteValues(saved)


saved_as(SiteValues, dict, _read)
