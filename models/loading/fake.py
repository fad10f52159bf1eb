"""Models without weights: tensors that have a shape, a type and a size, and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from icebear.errors import ModelError
from icebear.models.loading.conversion import fetch
from icebear.models.loading.loading import explained
from icebear.models.loading.presets import PRESETS
from icebear.models.model import Model
from icebear.models.tasks import task_of
from icebear.paths import check_model_path, local


@contextmanager
def fake_model(name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> Iterator[Model]:
    """Yield the model of a configuration; what is computed with it has no values either.

    name: a preset, a folder or a hub id of a causal language model. Raises `ModelError` for others.
    """
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    check_model_path(name)
    source = str(fetch(PRESETS[name])) if name in PRESETS else str(local(name)) if name.startswith("~") else name
    with explained(name):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    architecture = (config.architectures or [""])[0]
    is_other = architecture and not task_of(architecture, config.is_encoder_decoder).is_causal
    if is_other or type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{name} ({config.model_type}) is no causal language model, whose memory alone is estimated.")
    with FakeTensorMode():
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        yield Model(net.eval().requires_grad_(False), None, name)
