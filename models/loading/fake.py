"""Models without weights: tensors that have a shape, a type and a size, and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from icebear.errors import ModelError
from icebear.models.loading.conversion import fetch
from icebear.models.loading.loading import explained, image_processor
from icebear.models.loading.presets import PRESETS
from icebear.models.model import Model
from icebear.models.prompt_image import PromptImage
from icebear.models.tasks import task_of
from icebear.models.text.prompt_images import image_of
from icebear.paths import check_model_path, local


@contextmanager
def fake_model(
    name: str, dtype: torch.dtype, trust_remote_code: bool = False, image: Any = None
) -> Iterator[tuple[Model, PromptImage | None]]:
    """Yield the model of a configuration, and an image as it reads it; what is computed with it has no values either.

    name: a preset, a folder or a hub id of a causal language model. image: a path, an image or pixels (C, H, W), for a
    model of images and text. Raises `ModelError` for other models, `InputError` for images that cannot be read.
    """
    import transformers
    from transformers.initialization import no_init_weights

    check_model_path(name)
    source = str(fetch(PRESETS[name])) if name in PRESETS else str(local(name)) if name.startswith("~") else name
    with explained(name):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    architecture = (config.architectures or [""])[0]
    is_other = architecture and not task_of(architecture, config.is_encoder_decoder).is_causal
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
    if is_other or auto is None:
        raise ModelError(f"{name} ({config.model_type}) is no causal language model, whose memory alone is estimated.")
    has_images, options = hasattr(config, "vision_config"), {"trust_remote_code": trust_remote_code}
    shapes = FakeTensorMode(allow_non_fake_inputs=has_images)
    mode = RealIntegers(shapes) if has_images else shapes
    with mode, no_init_weights():  # SigLIP draws weights until all are in range
        net = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
        net.tie_weights()  # `init_weights`, which is left out, does it
    processor = image_processor(source, options) if image is not None and not hasattr(image, "ndim") else None
    model = Model(net.eval().requires_grad_(False), None, name, processor)
    read = None if image is None else image_of(model, image)
    if read is not None:
        inputs = {key: shapes.from_tensor(x) if x.is_floating_point() else x for key, x in read.inputs.items()}
        read = replace(read, inputs=inputs)
    with mode:
        yield model, read


class RealIntegers(TorchDispatchMode):
    """Compute what is made of integers alone (token ids, masks, the rows and columns of an image), on which sizes hang.
    All else has no values, and none that is equal to a number."""

    def __init__(self, shapes: FakeTensorMode) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_fake = any(isinstance(x, FakeTensor) for x in tensors)
        if is_fake and func is torch.ops.aten.eq.Scalar:  # SmolVLM looks for padding, which is 0
            return torch.zeros(args[0].shape, dtype=torch.bool)
        if is_fake and func is torch.ops.aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _positions(index)])
        if tensors and not is_fake:
            return func(*args, **kwargs)
        with self.shapes:
            shaped = func(*args, **kwargs)
        is_new = not tensors and isinstance(shaped, Tensor) and not shaped.is_floating_point()
        return func(*args, **kwargs) if is_new else shaped


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Return the positions that a mask chooses."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return list(index.nonzero().unbind(1))
