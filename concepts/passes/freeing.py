"""Memory of long passes that goes back to the system when it is freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress

MMAP_THRESHOLD = -3
"""glibc's name of the parameter."""
MEGABYTE = 1 << 20


def free_at_once() -> None:
    """Let glibc map each tensor of a megabyte or more by itself, for the rest of the process.

    By default it keeps what is freed, in pieces that later tensors do not fit: thrice the memory of a backward pass
    of 2,048 tokens that recomputes its layers. It takes a fifth more time. Other systems are left as they are.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, MEGABYTE)
