"""Weights on several devices, weights that are offloaded to the CPU or the disk, and quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from icebear.errors import ModelError

PACKED = ("Params4bit", "Int8Params")
"""The classes of bitsandbytes' quantized weights."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def packed(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)).__name__ in PACKED


def keep_packing(net: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights, with rounded scales, at the first pass without a gradient on some
    CPUs, after which passes with and without a gradient would differ."""
    module: Any
    for module in net.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def offloaded(net: nn.Module) -> bool:
    """Return whether some weights are loaded only while their module runs; they are on ``meta`` otherwise."""
    return any(parameter.is_meta for parameter in net.parameters())


def replaceable(module: nn.Module) -> bool:
    """Return whether its weight can be replaced."""
    return not packed(module) and not any(parameter.is_meta for parameter in module.parameters())


def present(module: nn.Module) -> AbstractContextManager[Any]:
    """Load the module's own weights inside the context."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weight_of(module: Any) -> Tensor:
    """Return the weight as floating-point numbers, on the module's device. Raises `ModelError`."""
    with present(module):
        weight = module.weight
        if packed(module):
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            return dequantize_bnb_weight(weight, getattr(module, "state", None)).detach()
        if weight.dtype not in FLOATS:
            raise ModelError(
                f"icebear cannot read the weights of {type(module).__name__} ({weight.dtype}); load the model "
                "without quantization, or with --bits."
            )
        return weight.detach()


def named_weights(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights as `named_parameters`, including offloaded weights."""
    # Offloaded parameters no longer show that they are tied.
    tied = set(getattr(net, "all_tied_weights_keys", {})) if offloaded(net) else set()
    names = {name for name, _ in net.named_parameters()} - tied
    for path, module in net.named_modules():
        with present(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if name in names:
                    yield name, parameter.detach()


def input_device(net: Any) -> torch.device:
    """Return the device of the model's inputs."""
    own = next(net.parameters()).device
    if own.type != "meta":
        return own
    hooks = (getattr(module, "_hf_hook", None) for module in net.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(place for place in places if place is not None))
