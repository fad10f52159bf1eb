"""The time that work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time in seconds until the device has finished the work."""
    wait = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
