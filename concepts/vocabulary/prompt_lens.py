"""The logit lens of a prompt: what each layer would answer at each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icebear.concepts.passes.run import first_layers
from icebear.concepts.passes.sites import stream_hooks
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model

TOKENS_AT_ONCE = 64
"""Of which the logits of a layer are in memory."""
Top = tuple[list[list[int]], list[list[float]]]
"""The likeliest ids at each token (T, k), and their probabilities."""
_WORD_TOKENS: WeakKeyDictionary[Model, Tensor] = WeakKeyDictionary()


class Readout(NamedTuple):
    """The likeliest tokens at a token, of each layer that was read (L, k), with their probabilities."""

    tokens: list[list[str]]
    probabilities: list[list[float]]


@torch.no_grad()
def logit_lens(model: Model, ids: Sequence[int], layers: Sequence[int], k: int, words: bool = False) -> list[Readout]:
    """Return the readout at each token: the residual stream after a layer, through the model's own head.

    The last layer has the model's answer. words: list words only, apart from the likeliest token of the last layer;
    probabilities are those of all tokens. Raises `InputError` for other models than causal ones.
    """
    if not (model.task.is_causal and model.task.generates and model.has_family):
        raise InputError(f"{model.name} has no logit lens, because its layers do not end in answers at each token.")
    streams: dict[int, Tensor] = {}
    keep, last = _word_tokens(model) if words else None, model.layers - 1
    batch, each = model.read_ids([list(ids)]), list(range(len(ids)))
    with model.lock:
        with stream_hooks(model, layers, lambda layer, stream: streams.update({layer: stream})):
            model.final_stream(batch)
        parts = [
            _all_tokens(
                [
                    _top(_answers(model, batch, streams[n], each[at : at + TOKENS_AT_ONCE]), k, keep, n == last)
                    for at in each[::TOKENS_AT_ONCE]
                ]
            )
            for n in layers
        ]
    texts = {number: model.text(number) for numbers, _ in parts for row in numbers for number in row}
    return [
        Readout([[texts[number] for number in numbers[t]] for numbers, _ in parts], [values[t] for _, values in parts])
        for t in each
    ]


def _all_tokens(parts: list[Top]) -> Top:
    numbers, values = zip(*parts, strict=True)
    return [*chain(*numbers)], [*chain(*values)]


def _answers(model: Model, batch: Batch, stream: Tensor, positions: list[int]) -> Tensor:
    """Return the logits (P, V) that the model makes of a residual stream (1, T, D), with all that its head does: norm,
    bias, scale, soft cap. Its first layer runs, and hands on this stream in place of its own."""
    with first_layers(model, 1), stream_hooks(model, [0], lambda *_: stream):
        return model.logits(batch, positions)[0].float()


def _top(logits: Tensor, k: int, keep: Tensor | None, is_last: bool) -> Top:
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
        flags = [
            bool(text[:1].isalnum() and text[-1:].isalnum() and re.sub("[-'\u2019]", "", text).isalnum())
            for text in texts
        ]
        _WORD_TOKENS[model] = torch.tensor(flags, device=model.device)
    return _WORD_TOKENS[model]
