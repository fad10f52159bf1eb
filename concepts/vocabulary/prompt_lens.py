"""The logit lens of a prompt: what each layer would answer at each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icebear.concepts.vocabulary.vocabulary import gives_answers, unembed
from icebear.errors import InputError
from icebear.models.model import Model

_WORD_TOKENS: WeakKeyDictionary[Model, Tensor] = WeakKeyDictionary()


class Readout(NamedTuple):
    """The likeliest tokens at a token, of each layer that was read (L, k), with their probabilities."""

    tokens: list[list[str]]
    probabilities: list[list[float]]


@torch.no_grad()
def logit_lens(model: Model, ids: Sequence[int], layers: Sequence[int], k: int, words: bool = False) -> list[Readout]:
    """Return the readout at each token: the residual stream after a layer, through the final norm and the unembedding.

    The last layer has the model's answer. words: list words only, apart from the likeliest token of the last layer;
    probabilities are those of all tokens. Raises `InputError` if the model has no final norm.
    """
    norm = model.family_at(model.layers - 1).final_norm
    if not norm or not gives_answers(model, model.layers - 1):
        raise InputError(f"{model.name} has no logit lens, because no final norm and unembedding give its answers.")
    streams: dict[int, Tensor] = {}
    keep = _word_tokens(model) if words else None
    batch, each = model.read_ids([list(ids)]), list(range(len(ids)))
    with model.lock:
        hooked = [model.layer_modules[layer].register_forward_hook(partial(_see, streams, layer)) for layer in layers]
        try:
            answer = model.logits(batch, each)[0].float()
        finally:
            for hook in hooked:
                hook.remove()
        module = model.net.get_submodule(norm)
        last = model.layers - 1
        logits = (answer if n == last else unembed(model, module(streams[n]).float()) for n in layers)  # (T, V) each
        parts = [_top(x, k, keep, n == last) for n, x in zip(layers, logits, strict=True)]
    texts = {number: model.text(number) for numbers, _ in parts for row in numbers for number in row}
    return [
        Readout([[texts[number] for number in numbers[t]] for numbers, _ in parts], [values[t] for _, values in parts])
        for t in each
    ]


def _see(streams: dict[int, Tensor], layer: int, module: Any, args: Any, output: Any) -> None:
    streams[layer] = (output[0] if isinstance(output, tuple) else output)[0].detach()


def _top(logits: Tensor, k: int, keep: Tensor | None, is_last: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Return the k likeliest ids and their probabilities (T, k) of logits (T, V). keep: the ids (V,) that may be."""
    probabilities = logits.softmax(-1)
    ranked = probabilities
    if keep is not None:
        k, ranked = min(k, int(keep.sum())), probabilities.masked_fill(~keep, -1.0)
        if is_last:
            best = probabilities.argmax(-1, keepdim=True)
            ranked = ranked.scatter(1, best, probabilities.gather(1, best))
    ids = ranked.topk(min(k, ranked.shape[1])).indices
    return ids.tolist(), probabilities.gather(1, ids).tolist()


def _word_tokens(model: Model) -> Tensor:
    """Return whether each token (V,) is of letters and digits, or has an apostrophe or hyphen inside."""
    if model not in _WORD_TOKENS:
        texts = (model.text(token).strip() for token in range(model.output_size))
        flags = [bool(text[:1].isalnum() and text[-1:].isalnum() and _joined(text).isalnum()) for text in texts]
        _WORD_TOKENS[model] = torch.tensor(flags, device=model.device)
    return _WORD_TOKENS[model]


def _joined(text: str) -> str:
    return "".join(letter for letter in text if letter not in "'-\u2019")
