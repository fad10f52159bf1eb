"""A check before each operation, which ends a computation in another thread than the main one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Checked(TorchFunctionMode):
    """Calls `check` before each operation of torch in this thread; an error that it raises ends the computation."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check()
        return func(*args, **(kwargs or {}))
