"""Prompts that are read once: many passes over what follows them, with cached keys and values."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from icebear.concepts.passes.sites import is_hooked
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.objective import Objective

COMMON = 16
"""A common beginning of fewer tokens is not cached."""


class Prefix:
    """The keys and values of prompts. They are exact, because no token attends to a later one."""

    def __init__(self, model: Model, cache: Any, length: int) -> None:
        """cache: what the network returned after `length` tokens; None of a model of scans, which only has a state."""
        self.model, self.cache, self.length = model, cache, length
        windows = [layer.sliding_window for layer in getattr(cache, "layers", ()) if hasattr(layer, "sliding_window")]
        self.window = min(windows, default=math.inf)

    @classmethod
    def read(cls, model: Model, rows: Sequence[Sequence[int]]) -> Prefix:
        """Read prompts of token ids."""
        batch = model.padded([list(row) for row in rows])
        with model.lock, torch.no_grad():
            output = model.net.base_model(**model.inputs(batch), use_cache=True)
        return cls(model, getattr(output, "past_key_values", None), batch.ids.shape[1])

    @classmethod
    def of(cls, model: Model, rows: Sequence[Sequence[int]]) -> Prefix | None:
        """Return a prefix after any token of which a pass may continue.

        None if the model has hooks, which would act on the prefix too, or if a token depends on earlier ones by more
        than keys and values."""
        if not model.task.is_causal or is_hooked(model) or not max(map(len, rows)):
            return None
        if model.padding_changes_results("right") or max(map(len, rows)) >= model.scales_positions_from:
            return None
        prefix = cls.read(model, rows)
        layers = getattr(prefix.cache, "layers", ())
        are_exact = [
            type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and prefix.length < prefix.window)
            for layer in layers
        ]
        return prefix if are_exact and all(are_exact) else None

    def extended(self, ids: Tensor) -> Prefix:
        """Return a prefix with a row for each of token ids (N, S) after the first row of this one."""
        with self.model.lock, torch.no_grad():
            output = self.model.net.base_model(**self.after(ids), use_cache=True)
        return Prefix(self.model, output.past_key_values, self.length + ids.shape[1])

    def inputs(self, ids: Tensor, rows: Sequence[int], starts: Sequence[int]) -> dict[str, Any]:
        """Return the inputs of a pass over token ids (N, S), each after the first tokens of a row of the prefix.

        rows, starts: for each of the N, the row of the prefix and the number of its tokens.
        """
        # Rows of different lengths have a gap before their new tokens, and windows count its columns.
        assert len(set(starts)) == 1 or max(starts) + ids.shape[1] <= self.window
        cache = self._cache_of(rows)
        if max(starts) < self.length:
            cache.crop(max(starts) - self.length)
        start = torch.tensor(starts, device=ids.device)[:, None]  # (N, 1)
        read = torch.arange(max(starts), device=ids.device) < start
        mask = torch.cat((read.long(), torch.ones_like(ids)), 1)
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
        if "position_ids" in inspect.signature(type(self.model.net).forward).parameters:
            inputs["position_ids"] = start + torch.arange(ids.shape[1], device=ids.device)
        return inputs

    def _cache_of(self, rows: Sequence[int]) -> Any:
        """Return a cache of these rows. A pass replaces its keys and values, and changes none in place."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        if len(set(rows)) > 1:
            cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
            return cache
        for layer in cache.layers:  # the same row takes no memory
            if layer.keys is not None:  # else the layer shares those of another one
                both = layer.keys, layer.values
                layer.keys, layer.values = (x[rows[0]].expand(len(rows), *x.shape[1:]) for x in both)
        return cache

    def after(self, ids: Tensor) -> dict[str, Any]:
        """Return the inputs of a pass over token ids (N, S) that all follow the first row."""
        return self.inputs(ids, [0] * len(ids), [self.length] * len(ids))

    def logits(self, ids: Tensor, rows: Sequence[int], starts: Sequence[int], positions: list[int]) -> Tensor:
        """Return the logits (N, P, V) at P columns of token ids, see `inputs`."""
        return logits_at(self.model, self.inputs(ids, rows, starts), positions)[0]


def logits_at(model: Model, inputs: dict[str, Any], positions: list[int], **options: Any) -> tuple[Tensor, Any]:
    """Return the logits (N, P, V) at P columns of a pass, and its keys and values."""
    are_kept = "logits_to_keep" in inspect.signature(type(model.net).forward).parameters
    if are_kept:
        options["logits_to_keep"] = torch.tensor(positions, device=model.device)
    output = model.net(**inputs, **options)
    return output.logits if are_kept else output.logits[:, positions], output.past_key_values


def after_common_beginning(model: Model, pair: Objective, most: int) -> tuple[Objective, int]:
    """Return a pair of prompts without the tokens that both begin with, and the number of these, see `after_beginning`.

    As they are the same in both prompts, no difference comes from them. Where there are few, the pair is returned as it
    is.

    most: the largest number of tokens to leave out.
    """
    ids = pair.batch.ids
    same = int((ids[0] == ids[1]).long().cumprod(0).sum())
    count = min(most, same, *pair.all_positions)
    return after_beginning(model, pair, count) if count >= COMMON else (pair, 0)


def after_beginning(model: Model, pair: Objective, most: int) -> tuple[Objective, int]:
    """Return a pair of prompts that begin alike without their first tokens, and the number of these.

    Passes over the pair read these tokens from a cache. Without a cache, the pair is returned as it is.

    most: the largest number of tokens to leave out.
    """
    count = min(most, *pair.all_positions)
    prefix = Prefix.of(model, [pair.batch.ids[0, :count].tolist()]) if count else None
    if not prefix:
        return pair, 0
    lengths = tuple(length - count for length in pair.batch.lengths)
    ids, mask = pair.batch.ids[:, count:], pair.batch.mask[:, count:]
    batch = Batch(ids, mask, lengths, before=count, after=prefix.after)
    return replace(pair, batch=batch, positions=tuple(tuple(p - count for p in row) for row in pair.positions)), count
