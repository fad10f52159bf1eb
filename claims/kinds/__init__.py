"""The kinds of claims, one in each file. `KINDS` has all of them by name."""

from importlib import import_module
from pkgutil import iter_modules

from icebear.claims.kind import Kind

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
KINDS: dict[str, type[Kind]] = {
    one.kind: one
    for module in _MODULES
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, Kind) and "kind" in vars(one)
}
"""Name -> class."""
