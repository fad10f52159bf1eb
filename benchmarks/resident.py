"""Memory of this process (Linux)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path


def peak(run: Callable[[], object]) -> None:
    """Prints the MiB that it takes at most, beyond what was there before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    run()
    print(round(resident("VmHWM") - before))


def resident(field: str) -> float:
    """MiB of VmRSS (now) or VmHWM (peak)."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
