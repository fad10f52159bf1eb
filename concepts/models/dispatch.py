"""Where weights are: of a dispatched model on several devices, or on the CPU or on disk until they are used; packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from icebear.errors import ModelError

PACKED = ("Params4bit", "Int8Params")
"""Weights as bitsandbytes keeps them."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def packed(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)).__name__ in PACKED


def keep_packing(net: nn.Module) -> None:
    """bitsandbytes would pack 4-bit weights anew, and round their scales, at the first forward pass without a gradient
    on some CPUs: a pass would no longer be what a pass with a gradient is."""
    module: Any
    for module in net.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def offloaded(net: nn.Module) -> bool:
    """Whether some weights come only when their module runs. They are on ``meta`` before and after, and for hooks."""
    return any(parameter.is_meta for parameter in net.parameters())


def replaceable(module: nn.Module) -> bool:
    """Whether its weight can be exchanged for another one."""
    return not packed(module) and not any(parameter.is_meta for parameter in module.parameters())


def present(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside, the module's own weights are there."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weight_of(module: Any) -> Tensor:
    """As floating-point numbers, where the module has it; outlives its coming and going. Raises `ModelError`."""
    with present(module):
        weight = module.weight
        if packed(module):
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            return dequantize_bnb_weight(weight, getattr(module, "state", None)).detach()
        if weight.dtype not in FLOATS:
            raise ModelError(
                f"icebear cannot read the weights of {type(module).__name__} (as {weight.dtype}); load the model "
                "without quantisation, or with --bits."
            )
        return weight.detach()


def named_weights(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `named_parameters`, with weights that are offloaded."""
    # Names of parameters that are others' too, which offloaded ones no longer show.
    tied = set(getattr(net, "all_tied_weights_keys", {})) if offloaded(net) else set()
    names = {name for name, _ in net.named_parameters()} - tied
    for path, module in net.named_modules():
        with present(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if name in names:
                    yield name, parameter.detach()


def input_device(net: Any) -> torch.device:
    """Where the model reads."""
    own = next(net.parameters()).device
    if own.type != "meta":
        return own
    hooks = (getattr(module, "_hf_hook", None) for module in net.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(place for place in places if place is not None))
