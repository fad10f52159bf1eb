"""What a model does on fixed texts of ours: how far its neurons go, and what its norms divide by.

The texts are part of icebear, so that a claim or a limit is the same on every machine; they are measured once a model
(some seconds to minutes) and kept in the cache.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icebear.cache import cache_folder
from icebear.concepts.models.linear import norm_divisor
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.neurons import AllNeurons
from icebear.concepts.passes.stream import Stream
from icebear.errors import InputError
from icebear.paths import write_file

TEXTS = (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8").splitlines()
"""162 lines: prose, facts, dialogue, code, numbers, eight languages; our own, and public domain."""
LONGEST = 64
"""Tokens of a text that are read."""
BATCH = 4
QUANTILES = (0.1, 0.5, 0.9)
KEPT_FROM = 10_000_000
"""Parameters; a smaller model is measured again each time, because that takes no longer than reading a file."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Measured at all tokens but sinks."""

    low: Tensor
    """(L, F) the least activation of each FFN neuron, or 0 if all are above."""
    high: Tensor
    """(L, F) the largest one, or 0 if all are below."""
    divisors: dict[str, tuple[float, float, float]]
    """Path of a norm -> 10th, 50th and 90th percentile of what it divides by."""

    def share(self, place: tuple[int, int], value: float) -> float | None:
        """An activation of the FFN neuron (layer, index) as a multiple of the furthest that it was seen to go to that
        side of zero: up to 1 is inside. None where it never went there."""
        end = (self.high if value > 0 else self.low)[place].item()
        return abs(value / end) if end else 0.0 if value == 0 else None


_MEASURED: WeakKeyDictionary[Model, Calibration] = WeakKeyDictionary()


def calibrate(model: Model) -> Calibration:
    """Of a model of a known family. What is measured inside `steer` is that of the steered model, and not kept."""
    if model in _MEASURED:
        return _MEASURED[model]
    with model.lock:  # one thread measures and the others wait; and hooks that are seen are this thread's
        if model in _MEASURED:
            return _MEASURED[model]
        if _edited(model):
            return _measured(model)
        large = sum(parameter.numel() for parameter in model.net.parameters()) >= KEPT_FROM
        found = _read(_file(model)) if large else None
        if found is None:
            found = _measured(model)
            if large:
                _write(_file(model), found)
        _MEASURED[model] = found
        return found


def _edited(model: Model) -> bool:
    """Whether hooks are there that may change values. Those that transformers leaves, once attention weights were asked
    for, only look."""
    kinds = ((part._forward_hooks, part._forward_pre_hooks) for part in model.net.modules())
    hooks = (hook for both in kinds for kind in both for hook in kind.values())
    return not all(getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)


def _measured(model: Model) -> Calibration:
    logging.getLogger("icebear").info(
        "Calibrating activation ranges of %s on %d texts (one-time, cached)", model.name, len(TEXTS)
    )
    low, high = torch.zeros(2, model.layers, model.width("ffn"))
    divided: dict[str, list[Tensor]] = {}
    for batch in _batches(model):
        neurons, stream = AllNeurons(model, batch, ("ffn",)), Stream(model, batch)
        seen: dict[str, tuple[int, Tensor]] = {}
        with model.lock, torch.no_grad(), neurons.reading(model), stream.reading(model), _dividing(model, seen):
            model.final_stream(batch)
        kept = torch.zeros(len(batch.ids), batch.spans[1].stop, dtype=torch.bool, device=model.device)
        for row in range(len(kept)):
            kept[row, batch.columns(row)] = True
            kept[row, [batch.columns(row)[place] for place in stream.sinks(row)]] = False
        for layer in range(model.layers):
            here = kept[:, neurons.span(layer)]
            found = neurons.activation["ffn"][:, layer, neurons.span(layer)][here.cpu()].float()  # (tokens, F)
            if len(found):
                low[layer] = torch.minimum(low[layer], found.amin(0))
                high[layer] = torch.maximum(high[layer], found.amax(0))
        for path, (layer, values) in seen.items():
            divided.setdefault(path, []).append(values[kept[:, batch.span_of(model, layer)]].cpu())
    quantiles = {path: torch.cat(parts).quantile(torch.tensor(QUANTILES)) for path, parts in divided.items()}
    return Calibration(low, high, {path: tuple(found.tolist()) for path, found in quantiles.items()})  # type: ignore[misc]


def _batches(model: Model) -> Iterator[Batch]:
    """The texts; for a model without a tokenizer random tokens, for one that looks at images noise."""
    generator = torch.Generator().manual_seed(0)
    if not model.task.reads_text:
        config = model.net.config
        size = (config.image_size,) * 2 if isinstance(config.image_size, int) else tuple(config.image_size)
        yield model.encode(list(torch.randn(BATCH, config.num_channels, *size, generator=generator)))
        return
    if model.tokenizer is None:
        shape = (4 * BATCH, min(LONGEST, model.context_length))
        rows = torch.randint(model.output_size, shape, generator=generator).tolist()
    else:
        rows = [ids for ids in (model.token_ids(text, LONGEST) for text in TEXTS) if len(ids) > 1]
    rows.sort(key=len)
    for start in range(0, len(rows), BATCH):
        yield model.read(rows[start : start + BATCH])


@contextmanager
def _dividing(model: Model, seen: dict[str, tuple[int, Tensor]]) -> Iterator[None]:
    """Keeps what the norms between a neuron and the unembedding divide by: path -> (layer, (B, T))."""

    def before(path: str, layer: int, norm: Any, args: tuple) -> None:
        seen[path] = layer, norm_divisor(norm, args[0])[..., 0]

    sites = [site for site in ("ffn", "attn") if site in model.sites]
    layers = range(model.layers)
    places = {path: layer for layer in layers for site in sites for path in model.norms_behind(layer, site)}
    with ExitStack() as undo:
        for path, layer in places.items():
            hook = partial(before, path, layer)
            undo.callback(model.net.get_submodule(path).register_forward_pre_hook(hook).remove)
        yield


# --- kept in the cache ----------------------------------------------------------------------------------


def _file(model: Model) -> Path:
    texts = hashlib.sha256("\n".join(TEXTS).encode()).hexdigest()[:8]
    return cache_folder() / "calibration" / f"{model.fingerprint}-{model.dtype_name}-{texts}.safetensors"


def _read(file: Path) -> Calibration | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
        low, high = found.pop("low"), found.pop("high")
    except (OSError, SafetensorError, KeyError):
        return None
    return Calibration(low, high, {path: tuple(values.tolist()) for path, values in found.items()})  # type: ignore[misc]


def _write(file: Path, found: Calibration) -> None:
    """A cache that cannot be written costs time, no more."""
    from safetensors.torch import save

    values = {path: torch.tensor(quantiles) for path, quantiles in found.divisors.items()}
    with suppress(OSError, InputError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, save({"low": found.low, "high": found.high, **values}))
