"""ONNX graphs inside packages as safetensors that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from icebear.errors import ModelError, need
from icebear.models.loading.presets import Preset

DINOV2_SMALL: dict[str, Any] = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_hidden_layers": 12,
    "image_size": 518,  # of which the position table is; other sizes are interpolated
    "patch_size": 14,
    "use_mask_token": False,  # which no image needs; the package lacks it
}
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 256},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,  # bicubic
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
"""What the authors of DINOv2 do with an image."""


POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
"""The names, in the graph of the package, of the position of [CLS] and of those of 37 x 37 patches."""


def from_dinov2_onnx(parts: Sequence[Path], folder: Path, preset: Preset) -> None:
    """Write the encoder of a graph that was exported from transformers' Dinov2Model. Raises `ModelError`."""
    (graph,) = parts
    stored = onnx_weights(graph)
    start = "backbone."
    weights = {name.removeprefix(start): x for name, x in stored.items() if name.startswith(start)}
    if not set(POSITIONS) <= set(stored):
        raise ModelError(f"The package of {preset.name} has changed: its graph lacks the positions of patches.")
    width = DINOV2_SMALL["hidden_size"]
    weights["embeddings.position_embeddings"] = torch.cat([stored[name].reshape(1, -1, width) for name in POSITIONS], 1)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    for file, entries in (("config.json", DINOV2_SMALL), ("preprocessor_config.json", IMAGE_PROCESSOR)):
        (folder / file).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """Return the dequantized float32 weights of an ONNX graph that was exported from PyTorch, by parameter name.

    A matrix has no name in the graph and is transposed; it gets the name of the multiplication that uses it.
    """
    need("images")
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: torch.tensor(to_array(tensor)) for tensor in graph.initializer}
    node_of = {output: node for node in graph.node for output in node.output}
    matrices = {}
    for node in graph.node:
        if node.op_type in ("MatMul", "MatMulInteger"):
            source = node_of.get(node.input[1])  # a matrix itself, or one that is dequantized
            matrix = source.input[0] if source is not None and source.op_type == "DequantizeLinear" else node.input[1]
            matrices[matrix] = node.name[1:].rpartition("/")[0].replace("/", ".") + ".weight"
    weights = {}
    for name, value in stored.items():
        plain = name.removesuffix("_quantized")
        if plain != name:
            zero, scale = stored[f"{plain}_zero_point"], stored[f"{plain}_scale"]
            value = (value.float() - zero.float()) * scale
        if name in matrices:
            weights[matrices[name]] = value.T.contiguous()
        elif not name.endswith(("_scale", "_zero_point")):
            weights[plain] = value
    return weights
