"""Find the neurons that a language model uses, show what they mean, and steer them.

Each public name is imported when it is first used: ``from icebear import load_model, attribute``.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'icebear' has no attribute {name!r}")
    return getattr(import_module(str(_MODULES[name])), name)


def __dir__() -> list[str]:
    return __all__
