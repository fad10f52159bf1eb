"""GGUF files, whose weights are de-quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_gguf(path: Path, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """A GGUF file's model with its weights de-quantised to `dtype`."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation=attn_implementation
    )
    # The weights are plain by now, but transformers refuses to save what it still calls quantised.
    net.hf_quantizer = None
    del net.config.quantization_config
    return net
