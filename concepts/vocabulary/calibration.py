"""The activation ranges of a model's neurons, and the divisors of its norms, on fixed texts.

The texts are part of icebear, so that limits are the same on every machine. Each model is measured once (seconds to
minutes), and the result is cached.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icebear.cache import cache_folder
from icebear.concepts.cached import Damaged, made_by, read_tensors, save_tensors
from icebear.concepts.passes.inputs import Stream
from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.sites import is_hooked
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.parts.linear import norm_divisor
from icebear.models.text import images
from icebear.records import WRITERS

log = logging.getLogger("icebear")

TEXTS = (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8").splitlines()
"""162 lines: prose, facts, dialogue, code, numbers, eight languages; our own, and public domain."""
LONGEST = 64
"""Longer texts are cut to this many tokens."""
BATCH = 4


@dataclass(frozen=True, eq=False)
class Calibration:
    """Activation ranges and norm divisors, measured at all tokens except sinks."""

    low: Tensor
    """(L, F) the smallest activation of each FFN neuron, or 0 if all are positive."""
    high: Tensor
    """(L, F) the largest activation of each FFN neuron, or 0 if all are negative."""
    means: dict[str, Tensor]
    """(L, N) the mean activation of each neuron of the sites that write to the residual stream."""
    divisors: dict[str, tuple[float, float, float]]
    """From the path of a norm to the 10th, 50th and 90th percentile of its divisor."""
    made_with: dict[str, Any]
    """The model, the versions, the device and the threads that measured it."""

    @property
    def about(self) -> str:
        """Who measured it, in one line."""
        versions = ", ".join(f"{name} {number}" for name, number in self.made_with["versions"].items())
        threads, dtype = self.made_with["threads"], self.made_with["model"]["dtype"]
        return f"{versions}; {threads} thread{'s' * (threads != 1)}, {dtype} on {self.made_with['device']}"

    def share(self, layer_index: tuple[int, int], value: float) -> float | None:
        """Return an activation of the FFN neuron (layer, index) as a multiple of the end of its activation range on the
        same side of zero; None if the range has no such side."""
        end = (self.high if value > 0 else self.low)[layer_index].item()
        return abs(value / end) if end else 0.0 if value == 0 else None


_MEASURED: WeakKeyDictionary[Model, Calibration] = WeakKeyDictionary()


def calibrate(model: Model) -> Calibration:
    """Calibrate a model of a known family. Inside `steer`, the steered model is measured and not cached."""
    if model in _MEASURED:
        return _MEASURED[model]
    with model.lock:  # one thread measures; the others wait, so that all hooks are this thread's
        if model in _MEASURED:
            return _MEASURED[model]
        if is_hooked(model):
            return _calibration(model)
        calibration = cached_calibration(model)
        if calibration is None:
            calibration = _calibration(model, "one-time, cached")
            _write(_file(model), calibration)
        _MEASURED[model] = calibration
        return calibration


def mean_activations(model: Model) -> dict[str, Tensor]:
    """Return `Calibration.means`; inside `steer` those of the steered model."""
    with model.lock:
        return (_calibration(model) if is_hooked(model) else calibrate(model)).means


def _calibration(model: Model, note: str = "under its edits, not cached") -> Calibration:
    on = f"{len(TEXTS)} texts" if model.task.reads_text else f"{BATCH} images of noise"
    log.info("Calibrating activation ranges of %s on %s (%s)", model.name, on, note)
    sites = writing_sites(model)
    low, high = torch.zeros(2, model.layers, model.ffn_width)
    sums = {site: torch.zeros(model.layers, model.width(site), dtype=torch.float64) for site in sites}
    counts = torch.zeros(model.layers, 1)
    divided: dict[str, list[Tensor]] = {}
    for batch in _batches(model):
        neurons, stream = Values(model, batch, sites), Stream(model, batch)
        seen: dict[str, tuple[int, Tensor]] = {}
        with model.lock, torch.no_grad(), neurons.reading(model), stream.reading(model), _dividing(model, seen):
            model.final_stream(batch)
        counted = torch.zeros(len(batch.ids), batch.spans[1].stop, dtype=torch.bool, device=model.device)
        for row in range(len(counted)):
            counted[row, batch.columns(row)] = True
            counted[row, [batch.columns(row)[position] for position in stream.sinks(row)]] = False
        for layer in range(model.layers):
            is_counted = counted[:, neurons.span(layer)].cpu()
            counts[layer] += is_counted.sum()
            for site in sites:
                recorded = neurons.activation[site][:, layer, neurons.span(layer)].cpu()  # (B, T, N)
                values = recorded[is_counted].float()  # (tokens, N)
                sums[site][layer] += values.double().sum(0)
                if len(values) and site == "ffn":
                    low[layer] = torch.minimum(low[layer], values.amin(0))
                    high[layer] = torch.maximum(high[layer], values.amax(0))
        for path, (layer, values) in seen.items():
            divided.setdefault(path, []).append(values[counted[:, batch.span_of(model.stack_of(layer))]].cpu())
    quantiles = {path: torch.cat(parts).quantile(torch.tensor((0.1, 0.5, 0.9))) for path, parts in divided.items()}
    return Calibration(
        low,
        high,
        {site: (x / counts.clamp(min=1)).float() for site, x in sums.items()},
        {path: tuple(three.tolist()) for path, three in quantiles.items()},  # type: ignore[misc]
        made_by(model),
    )


def writing_sites(model: Model) -> list[str]:
    """Return the sites whose neurons write to the residual stream."""
    return [site for site in WRITERS if site in model.sites]


def _batches(model: Model) -> Iterator[Batch]:
    """Yield the texts; images of noise for an image classifier."""
    if not model.task.reads_text:
        yield model.encode(list(noise(model)))
        return
    rows = token_rows(model)
    for part in model.batches_by_length(rows, BATCH):
        yield model.read([rows[number] for number in part])


def noise(model: Model, shape: Sequence[int] = ()) -> Tensor:
    """Return seeded random images (BATCH, C, H, W) for a classifier of images. shape: (C, H, W), if not the model's."""
    shape = shape or (model.config.num_channels, *images.usual_size(model))
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))


def token_rows(model: Model) -> list[list[int]]:
    """Return the token ids of the texts; random ones for a model whose tokenizer does not know their words."""
    if not model.task.reads_text:
        raise InputError(f"{model.name} reads images, so nothing is measured on texts; choose a model that reads text.")
    texts = TEXTS if model.reads_any_text else []
    rows = [ids for ids in (model.token_ids(text, LONGEST) for text in texts) if len(ids) > 1]
    special = set(model.special_ids())
    if any(set(ids[1:]) - special for ids in rows):
        return rows
    shape = (4 * BATCH, min(LONGEST, model.context_length))
    return torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).tolist()


@contextmanager
def _dividing(model: Model, seen: dict[str, tuple[int, Tensor]]) -> Iterator[None]:
    """Record the divisors of the norms between neurons and the unembedding: path -> (layer, (B, T))."""

    def before(path: str, layer: int, norm: Any, args: tuple) -> None:
        seen[path] = layer, norm_divisor(norm, args[0])[..., 0]

    sites = writing_sites(model)
    layers = range(model.layers)
    norm_layers = {path: layer for layer in layers for site in sites for path in model.norms_after(layer, site)}
    with ExitStack() as undo:
        for path, layer in norm_layers.items():
            hook = partial(before, path, layer)
            undo.callback(model.net.get_submodule(path).register_forward_pre_hook(hook).remove)
        yield


def file_stem(model: Model) -> str:
    """Return the name of files that are measured on a model and the texts."""
    texts = hashlib.sha256("\n".join(TEXTS).encode()).hexdigest()[:8]
    return f"{model.fingerprint}-{model.dtype_name}-{texts}"


def _file(model: Model) -> Path:
    return cache_folder() / "calibration" / f"{file_stem(model)}.safetensors"


def cached_calibration(model: Model) -> Calibration | None:
    """Return the calibration in the cache; None if there is none, or if it is damaged."""
    file = _file(model)
    try:
        tensors, made_with = read_tensors(file)
        low, high = tensors.pop("low"), tensors.pop("high")
        means = {site: tensors.pop(f"mean.{site}") for site in writing_sites(model)}
        divisors = {path: tuple(values.tolist()) for path, values in tensors.items()}
        return Calibration(low, high, means, divisors, made_with)  # type: ignore[arg-type]
    except FileNotFoundError:
        return None
    except (Damaged, KeyError):
        log.warning("The cached calibration %s is damaged, or of an older icebear; it is measured again.", file)
        return None


def _write(file: Path, calibration: Calibration) -> None:
    """Write the cache; a failure only costs time later, and is said."""
    values = {path: torch.tensor(quantiles) for path, quantiles in calibration.divisors.items()}
    means = {f"mean.{site}": x for site, x in calibration.means.items()}
    try:
        save_tensors(file, {"low": calibration.low, "high": calibration.high, **means, **values}, calibration.made_with)
    except (OSError, InputError) as error:
        log.warning("The calibration is not cached, and is measured again by the next command: %s", error)
