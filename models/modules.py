"""The modules and parameters of a network, without names: torch makes names too, which takes three times as long."""

from __future__ import annotations

from torch import nn


def modules_of(net: nn.Module) -> list[nn.Module]:
    """Return the modules in the order of `net.modules()`."""
    modules: dict[nn.Module, None] = {}

    def add(module: nn.Module) -> None:
        modules[module] = None
        for part in module._modules.values():
            if part is not None and part not in modules:
                add(part)

    add(net)
    return list(modules)


def parameters_of(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of `net.parameters()`, a shared one once."""
    owned = (parameter for module in modules_of(net) for parameter in module._parameters.values())
    return list(dict.fromkeys(parameter for parameter in owned if parameter is not None))
