"""Models in TransformerLens' format: a state dict of its names, the fields of its configuration, a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from icebear.errors import ModelError
from icebear.models.loading.hooked_model import (
    Hooked,
    HookedConfig,
    HookedForCausalLM,
    HookedForCausalOutputs,
    HookedForOutputs,
)
from icebear.models.loading.layouts import their_name, weights_of
from icebear.models.loading.saved_tensors import read_saved
from icebear.models.text.words import Words
from icebear.paths import WEIGHTS, read_text


class Fields:
    """What stands for a pickled `HookedTransformerConfig`: an object with its fields and without its code."""


PICKLED: list[Any] = [
    (Fields, "transformer_lens.HookedTransformerConfig.HookedTransformerConfig"),
    (Fields, "transformer_lens.config.HookedTransformerConfig.HookedTransformerConfig"),
    (Fields, "transformer_lens.config.hooked_transformer_config.HookedTransformerConfig"),
    (Fields, "easy_transformer.EasyTransformerConfig.EasyTransformerConfig"),
]


def matches(source: str) -> bool:
    """Return whether a path is a file of weights, or a folder in TransformerLens' format."""
    path = Path(source)
    if path.is_file():
        return path.suffix.lower() in WEIGHTS
    entries = _json(path / "config.json")
    kind = entries.get("model_type")
    return kind == HookedConfig.model_type or (kind is None and {"n_layers", "d_model", "n_ctx"} <= set(entries))


def read(
    source: str, weights: Mapping[str, Any], config: str | Path | Mapping[str, Any] | None = None
) -> tuple[Hooked, Any, None]:
    """Return the network and the tokenizer of a folder or a file. Raises `ModelError`.

    config: the fields of the configuration or a JSON file of them, which replace the file's.
    """
    path = Path(source)
    file = path if path.is_file() else _weights_file(path)
    folder, (state, entries) = file.parent, state_of(file)
    shared = path.is_file() and bool(entries)  # the folder's configuration may be that of another file
    sources = [file.with_suffix(".json")] * path.is_file() + [folder / "config.json"] * (not shared)
    entries |= _json(next(filter(Path.is_file, sources), sources[-1]))
    if config is not None:
        entries |= config if isinstance(config, Mapping) else _entries(read_text(config, ModelError), config)
    if not entries:
        raise ModelError(
            f"{source} has weights, but no configuration; write the fields of its HookedTransformerConfig as JSON to "
            f"{sources[0]}, or to a file that you give with --config (in Python, config=)."
        )
    if entries.get("model_type", HookedConfig.model_type) != HookedConfig.model_type:
        raise ModelError(
            f"{source} is a file of a model of the kind {entries['model_type']}; give its folder, {folder}."
        )
    vocabulary = _json(folder / "vocab.json")
    words = vocabulary.get("input", vocabulary)
    net = network(HookedConfig.of(entries, source), state, words, vocabulary.get("output"), source)
    net = net.to(weights["dtype"])
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return net, PreTrainedTokenizerFast.from_pretrained(folder), None
    return net, Words(words) if words else None, None


def _weights_file(folder: Path) -> Path:
    files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in WEIGHTS]
    if len(files) != 1:
        raise ModelError(f"{folder} has {len(files)} files of weights; give the path of the one that you mean.")
    return files[0]


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
    layers = {match[1] for name in state if (match := re.search(r"blocks\.(\d+)\.", name))}
    if len(layers) != config.n_layers:
        raise ModelError(
            f"{source} has weights of {len(layers)} layers, where its configuration has n_layers = {config.n_layers}; "
            "correct the configuration, or give the file that belongs to it."
        )
    outputs = outputs if outputs is not None else words if config.d_vocab_out == config.d_vocab else {}
    causal, other_outputs = config.is_causal, outputs != words or config.d_vocab_out != config.d_vocab
    kind = HookedForOutputs if not causal else HookedForCausalOutputs if other_outputs else HookedForCausalLM
    with torch.device("meta"):  # no random weights
        net = kind(config)
    load(net, state, source)
    names = {number: word for word, number in outputs.items()}
    net.config.id2label = {number: names.get(number, str(number)) for number in range(config.d_vocab_out)}
    return net


def load(net: Hooked, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights by TransformerLens' names into a network without weights; a missing bias is zero.

    Raises `ModelError`.
    """
    wanted, weights = net.state_dict(), weights_of(state, net.config, source)
    lacking = [path for path in wanted if path not in weights and not re.search(r"\.(bias|b_in)$", path)]
    if lacking:
        raise ModelError(
            f"{source} lacks the weight {their_name(lacking[0])}; correct the configuration, or give the file that "
            "belongs to it."
        )
    for path, (name, value) in weights.items():
        wrong = (
            "which its configuration does not have"
            if path not in wanted
            else f"whose size is {tuple(value.shape)} instead of {tuple(wanted[path].shape)}"
            if value.shape != wanted[path].shape
            else "which is not of finite numbers"
            if not (value.is_floating_point() and value.isfinite().all())
            else ""
        )
        if wrong:
            raise ModelError(f"{source} has the weight {name}, {wrong}; correct the configuration, or the file.")
    zeros = {path: torch.zeros(value.shape) for path, value in wanted.items() if path not in weights}
    net.load_state_dict({path: value.float() for path, (_, value) in weights.items()} | zeros, assign=True)


def state_of(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state dict of a file, and the configuration saved with it, if there is one. Raises `ModelError`."""
    if file.suffix.lower() == ".safetensors":
        return load_file(file), {}
    saved = read_saved(file, ModelError, PICKLED)
    saved = saved if isinstance(saved, Mapping) else {}
    entries: Any = next((saved[name] for name in ("config", "cfg") if name in saved), {})
    state = next((saved[name] for name in ("model", "state_dict", "model_state_dict") if name in saved), saved)
    named = state.items() if isinstance(state, Mapping) else ()
    weights = {name: value for name, value in named if isinstance(name, str) and isinstance(value, Tensor)}
    if not weights:
        raise ModelError(f"{file} has no state dict; save one with torch.save(model.state_dict(), FILE).")
    entries = vars(entries) if isinstance(entries, Fields) else entries
    return weights, dict(entries) if isinstance(entries, Mapping) else {}


def _json(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file, none if there is no such file. Raises `ModelError`."""
    return _entries(read_text(file, ModelError), file) if file.is_file() else {}


def _entries(text: str, file: str | Path) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}); correct the file.") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{file} is not a JSON object of names and values; correct the file.")
    return entries
