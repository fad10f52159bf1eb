"""GGUF files, whose weights are de-quantised: once a file, which takes about half a minute for 135 million."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from icebear.cache import cache_folder, cached, ensure


def converted(path: Path, dtype: torch.dtype) -> Path:
    """A folder of the file's model and tokenizer as transformers saves them; kept in the cache by what the file says,
    wherever it is."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{digest[:32]}-{str(dtype).removeprefix('torch.')}"
    if cached(folder):
        return folder
    net, tokenizer = load_gguf(path, dtype)

    def make(folder: Path) -> None:
        net.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    return ensure(folder, make, what=path.name, room=size)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A GGUF file's model with its weights de-quantised to `dtype`, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    # The weights are plain by now, but transformers refuses to save what it still calls quantised.
    net.hf_quantizer = None
    del net.config.quantization_config
    return net, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
