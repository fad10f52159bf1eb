"""Folders in TransformerLens' format: config.json, weights by TransformerLens' names, vocab.json.

``python -m icebear.models.loading.hooked FILE.pt FOLDER`` converts a saved state dict.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from icebear.errors import IcebearError, ModelError
from icebear.models.loading.hooked_model import (
    Hooked,
    HookedConfig,
    HookedForCausalLM,
    HookedForCausalOutputs,
    HookedForOutputs,
)
from icebear.models.text.words import Words
from icebear.paths import write_file


def same(x: Tensor) -> Tensor:
    return x


LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    **{f"W_{name.upper()}": (f"{name}.weight", lambda x: x.transpose(1, 2).flatten(0, 1)) for name in "qkv"},
    **{f"b_{name.upper()}": (f"{name}.bias", torch.flatten) for name in "qkv"},
    "W_O": ("o.weight", lambda x: x.flatten(0, 1).T),
    "b_O": ("o.bias", same),
    "W_gate": ("gate.weight", torch.t),
    "W_in": ("up.weight", torch.t),
    "b_in": ("up.bias", same),
    "W_out": ("out.weight", torch.t),
    "b_out": ("out.bias", same),
    "W_E": ("weight", same),
    "W_pos": ("weight", same),
    "W_U": ("weight", torch.t),
    "b_U": ("bias", same),
    "w": ("weight", same),
    "b": ("bias", same),
}
"""TransformerLens' name of a weight: ours, and the change of its layout."""
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def matches(folder: str) -> bool:
    """Return whether a folder is in TransformerLens' format."""
    entries = _json(Path(folder) / "config.json")
    kind = entries.get("model_type")
    return kind == HookedConfig.model_type or (kind is None and {"n_layers", "d_model", "n_ctx"} <= set(entries))


def read(source: str, weights: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Hooked, Any, None]:
    """Return the network and the tokenizer of a folder. Raises `ModelError`."""
    folder = Path(source)
    config = HookedConfig.of(_json(folder / "config.json"), source)
    files = [file for ending in ("safetensors", "pt", "pth", "bin") for file in sorted(folder.glob(f"*.{ending}"))]
    if len(files) != 1:
        raise ModelError(
            f"{source} has {len(files)} files of weights; keep exactly one .safetensors or .pt file there."
        )
    vocabulary = _json(folder / "vocab.json")
    words = vocabulary.get("input", vocabulary)
    net = network(config, state_of(files[0])[0], words, vocabulary.get("output"), source)
    net = net.to(weights["dtype"])
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return net, PreTrainedTokenizerFast.from_pretrained(folder), None
    return net, Words(words) if words else None, None


def network(
    config: HookedConfig,
    state: Mapping[str, Tensor],
    words: Mapping[str, int],
    outputs: Mapping[str, int] | None = None,
    source: str = "The model",
) -> Hooked:
    """Return the network of weights by TransformerLens' names. Raises `ModelError`.

    words, outputs: text -> number; outputs: None for the words themselves.
    """
    outputs = outputs if outputs is not None else words if config.d_vocab_out == config.d_vocab else {}
    causal, other_outputs = config.is_causal, outputs != words or config.d_vocab_out != config.d_vocab
    names = {number: word for word, number in outputs.items()}
    config.id2label = {number: names.get(number, str(number)) for number in range(config.d_vocab_out)}
    net = (HookedForOutputs if not causal else HookedForCausalOutputs if other_outputs else HookedForCausalLM)(config)
    load(net, state, source)
    return net


def load(net: Hooked, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights by TransformerLens' names; a missing bias is zero. Raises `ModelError`."""
    wanted, weights = net.state_dict(), {}
    for path, value in state.items():
        where, _, name = path.rpartition(".")
        if name in BUFFERS:
            continue
        stem, change = LAYOUTS.get(name.lstrip("_"), (name, same))
        inside = f"{where}.{'b_in' if name == 'b_in' and net.config.gated_mlp else stem}"
        weights[inside if where == "unembed" else f"model.{inside}"] = change(value)
    unknown = [path for path in weights if path not in wanted]
    lacking = [path for path in wanted if path not in weights and not re.search(r"\.(bias|b_in)$", path)]
    if unknown or lacking:
        what = f"weights that its config.json does not have: {unknown[0]}" if unknown else f"no weights {lacking[0]}"
        raise ModelError(f"{source} has {what}; check config.json, or convert the model again.")
    net.load_state_dict({path: weights.get(path, torch.zeros_like(value)) for path, value in wanted.items()})


def state_of(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict of a file, and the configuration saved beside it, if there is one. Raises `ModelError`."""
    if file.suffix == ".safetensors":
        return load_file(file), {}
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, AttributeError) as error:
        raise ModelError(
            f"{file} has Python objects, which can run code when they are read; if you trust the file, load it with "
            "torch and save only the state dict: torch.save(model.state_dict(), FILE)."
        ) from error
    saved = saved if isinstance(saved, Mapping) else {}
    entries: Any = next((saved[name] for name in ("config", "cfg") if isinstance(saved.get(name), Mapping)), {})
    state = next((saved[name] for name in ("model", "state_dict", "model_state_dict") if name in saved), saved)
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not weights:
        raise ModelError(f"{file} has no state dict; save one with torch.save(model.state_dict(), FILE).")
    return weights, dict(entries)


def convert(file: Path, folder: Path) -> None:
    """Write a state dict to a folder that `load_model` loads. Raises `ModelError`."""
    state, entries = state_of(file)
    entries |= _json(folder / "config.json")
    if not entries:
        raise ModelError(
            f"{file} has weights, but no configuration; write the numbers, texts and truth values of "
            f"model.cfg.to_dict() as JSON to {folder / 'config.json'}, then convert the file again."
        )
    plain = {name: value for name, value in entries.items() if isinstance(value, bool | int | float | str | None)}
    config = {**plain, "model_type": HookedConfig.model_type}
    load(HookedForOutputs(HookedConfig.of(config, str(file))), state, str(file))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: x.detach().contiguous().clone() for name, x in state.items() if name.rpartition(".")[2] not in BUFFERS
    }
    write_file(folder / "model.safetensors", save(weights), ModelError)
    write_file(folder / "config.json", json.dumps(config, indent=1) + "\n", ModelError)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        sys.exit("Usage: python -m icebear.models.loading.hooked FILE.pt FOLDER")
    try:
        convert(*map(Path, arguments))
    except (IcebearError, OSError, RuntimeError) as error:
        sys.exit(f"{error}")


def _json(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file, none if there is no such file. Raises `ModelError`."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); correct the file.") from error
    return entries if isinstance(entries, dict) else {}


if __name__ == "__main__":
    main(sys.argv[1:])
