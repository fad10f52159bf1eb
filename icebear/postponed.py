"""Imports that hardly any command uses, postponed until something does: in the process of the command line only.

A postponed module is empty, and loads itself when it is asked for something. Only to its askers it gives the names in
the table without being loaded: as functions that load it when they are called, or as the decorators of torch.compile.
For other versions of the askers, or where a name has gone, the import is the plain one.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

VERSIONS = {"torch": "2.13.", "transformers": "5.23.", "sqlite_utils": "4.2."}
_PLACED = "extract_model_from_parallel get_balanced_memory get_max_memory infer_auto_device_map reduce"
NAMES = {  # module -> its askers, and what they ask for
    "scipy.optimize": ("transformers", "linear_sum_assignment"),  # SciPy: losses of detectors
    "accelerate": ("transformers", "PartialState dispatch_model"),  # accelerate, as the next three: a device_map
    "accelerate.hooks": ("transformers", "AlignDevicesHook add_hook_to_module"),
    "accelerate.utils": ("transformers", _PLACED),
    "accelerate.utils.modeling": ("transformers", "clean_device_map get_max_layer_size"),
    "pandas": ("sqlite_utils", "Timestamp"),  # pandas and pyarrow: a kind of value that icebear does not store
    # torch._dynamo, torch._inductor, torch.onnx, sympy: torch.compile
    "torch._dynamo": ("torch transformers", "allow_in_graph assume_constant_result disable"),
    "transformers.utils.import_utils": ("transformers", "is_torch_distributed_available"),  # see ABSENT
}
ALONE = "torch._dynamo._trace_wrapped_higher_order_op"  # transformers asks for it, and it needs no other part
ABSENT = "is_torch_distributed_available"  # torch.distributed.tensor, sympy: as if PyTorch were built without them
_LOADING = RLock()


class Postponed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        askers, names = NAMES[self.__name__]
        frame: Any = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib."):
            frame = frame.f_back
        if name in names.split() and frame.f_globals["__name__"].partition(".")[0] in askers.split():
            return (_decorator if self.__name__ == "torch._dynamo" else _Function)(self, name)
        # Every import asks for a path.
        return ModuleType.__getattribute__(self if name == "__path__" else _load(self), name)


def _load(module: ModuleType) -> ModuleType:
    with _LOADING:
        spec: Any = module.__spec__
        if isinstance(package := sys.modules.get(spec.name.rpartition(".")[0]), Postponed):
            _load(package)
        if plain := getattr(spec.loader, "plain", None):  # or it is loaded, or this thread is about to
            spec.loader = module.__loader__ = plain
            plain.exec_module(module)
            if hasattr(module, ABSENT):
                setattr(module, ABSENT, lambda: False)
    return module


class _Function:
    def __init__(self, module: ModuleType, name: str):
        self._real = lambda: vars(_load(module))[name]

    def __call__(self, *args: Any, **how: Any) -> Any:
        return self._real()(*args, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def _decorator(module: ModuleType, name: str) -> Any:
    """Return a decorator that has an effect once torch._dynamo is loaded: before, nothing can be compiled."""

    def decorate(function: Any = None, *args: Any, **how: Any) -> Any:
        if function is None:
            return lambda function: decorate(function, *args, **how)
        if not isinstance(function, FunctionType):
            return vars(_load(module))[name](function, *args, **how)

        @functools.wraps(function)
        def call(*inputs: Any, **options: Any) -> Any:
            real = vars(module).get(name)
            return (real(function, *args, **how) if real else function)(*inputs, **options)

        return call

    return decorate


class Postponing:  # for `sys.meta_path`
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec, package = None, sys.modules.get(name.rpartition(".")[0])
        if name in NAMES:
            spec = PathFinder.find_spec(name, path, target)
            if spec and _fits(name, spec):
                spec.loader = _loader(None, lambda module: setattr(module, "__class__", Postponed), spec.loader)
        elif isinstance(package, Postponed) and name != ALONE:
            _load(package)  # before its parts, as in a plain import
            if module := sys.modules.get(name):
                plain = module.__spec__  # where the importing of ModuleSpec puts itself
                spec = ModuleSpec(name, _loader(module, lambda module: setattr(module, "__spec__", plain)))
        return spec


def _loader(module: ModuleType | None, execute: Any, plain: Any = None) -> Any:
    return SimpleNamespace(create_module=lambda spec: module, exec_module=execute, plain=plain)


def _fits(name: str, spec: ModuleSpec) -> bool:
    askers, names = NAMES[name]
    text = Path(spec.origin or os.devnull).read_text(encoding="utf-8")
    lacking = [asker for asker in askers.split() if not version(asker).startswith(VERSIONS[asker])]
    lacking += [word for word in names.split() if word not in text]
    if lacking and os.environ.get("ICEBEAR_DEBUG"):
        print(f"icebear: {name} is imported at once, for lack of {', '.join(lacking)}", file=sys.stderr)
    return not lacking
