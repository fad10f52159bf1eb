"""Measure where attention heads look: in their examples, in the calibration texts, and on random tokens. It needs the
model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icebear.actmax.head_attention import MEASURED
from icebear.actmax.reading import readable, reading_of
from icebear.concepts.passes.sites import eager
from icebear.concepts.vocabulary.calibration import token_rows
from icebear.db.example_tables import ATTENTION
from icebear.db.store import Store
from icebear.errors import StoreError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.records import Example, Neuron

PASS_ROWS = 8
TEXTS = 24
"""The number of calibration texts that shares of attention are averaged over."""
REPEATS = 8
"""The number of sequences of random tokens."""
PERIOD = 30
"""Random tokens are repeated after this many."""
DISTANCES = range(PERIOD - 18, PERIOD + 1)
"""Distances that stand for chance: 19, so that in a model whose heads do not look at one of 20 in particular, any head
is named in one of 20 measurements."""


@torch.no_grad()
def attention_maps(model: Model, batch: Batch) -> dict[int, Tensor]:
    """Return layer -> the attention weights (B, H, T, T) of texts or images that share a pass; none for a model that
    does not return them. Row i of a map has the weights of the token i over the tokens it attends to."""
    inputs, options = model.inputs(batch), {"use_cache": False} if model.task.generates else {}
    with model.lock, eager(model):
        maps = model.net.base_model(**inputs, output_attentions=True, **options).attentions or ()  # no logits
    layers = model.layers_with("attn")
    numbers = range(model.layers) if len(maps) == model.layers else layers
    if len(numbers) != len(maps):
        return {}
    return {layer: weights.float().cpu() for layer, weights in zip(numbers, maps, strict=True) if layer in layers}


def add_attention(model: Model, store: Store, head: Neuron, k: int | None = None) -> list[Example]:
    """Return the first k examples (by default all) of a head with its attention at their tokens. It is measured where
    it is missing, and saved if the store can be written. An image that is missing or has changed has none."""
    examples, reading = store.examples(head, "+", k), reading_of(model, store.facts.all())
    if model.task.stacks != 1:
        return examples
    read = readable(reading, ((number, e.sentence) for number, e in enumerate(examples) if e.relevance is None))
    lacking, prompts = [number for number, _ in read], [prompt for _, prompt in read]
    if model.task.is_causal:  # there is no attention to later tokens
        prompts = [ids[: examples[number].token + 1] for number, ids in zip(lacking, prompts, strict=True)]
    for part, batch in _read_together(model, prompts):
        maps = attention_maps(model, batch)
        for row, at in enumerate(part if head.layer in maps else ()):
            example = examples[lacking[at]]
            weights = maps[head.layer][row, head.index, example.token, : batch.lengths[row]]
            later = (0.0,) * (len(example.sentence.tokens) - len(weights))
            examples[lacking[at]] = replace(example, relevance=(*weights.tolist(), *later))
    with suppress(StoreError):
        new = [examples[number] for number in lacking]
        store.example_tables.add_attributions(
            ATTENTION, [(head, "+", e.sentence.id, list(e.relevance), dict[str, float]()) for e in new if e.relevance]
        )
    return examples


def _read_together(model: Model, prompts: Sequence[Any]) -> Iterator[tuple[list[int], Batch]]:
    """Yield which prompts, token ids or pixels, share a pass, and their batch."""
    if not model.task.reads_text:
        yield from (([at], model.encode([pixels])) for at, pixels in enumerate(prompts))
        return
    for part in model.batches(list(map(len, prompts)), PASS_ROWS):
        yield part, model.read([prompts[at] for at in part])


def ensure_heads(model: Model, store: Store) -> None:
    """Measure the attention of all heads, once for an index that has heads."""
    if "head" in store.facts.get("sites") and store.controls.get(MEASURED) is None:
        store.controls.set({MEASURED: measured_heads(model)})


def measured_heads(model: Model) -> dict[str, dict[str, dict[str, object]]]:
    """Return "shares" and "kinds" -> name -> {"heads": the mean attention of each head, by layer, "control": a number}.

    Empty for models of several stacks, images and short contexts, and for models that return no attention. JSON-ready.
    """
    if model.task.stacks != 1 or not model.task.reads_text or model.context_length <= 2 * PERIOD:
        return {}
    rows = token_rows(model)[:TEXTS]
    parts = [[rows[number] for number in part] for part in model.batches_by_length(rows, PASS_ROWS)]
    texts = ((part, _stacked(model, part)) for part in parts)
    repeated, plain = (_stacked(model, ids) for ids in random_sequences(model))
    if not len(repeated):
        return {}
    measured = {"shares": text_shares(texts), "kinds": {"induction": induction_shares(repeated, plain)}}
    return {
        part: {
            name: {"heads": [[round(share, 5) for share in row] for row in x.tolist()], "control": control}
            for name, (x, control) in shares.items()
        }
        for part, shares in measured.items()
    }


def random_sequences(model: Model) -> tuple[list[list[int]], list[list[int]]]:
    """Return sequences of random tokens whose second half repeats the first, and the same with another first half; all
    begin with the token that begins a text."""
    special = model.special_ids()
    able = torch.tensor([token for token in range(model.config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    before, tokens = able[torch.randint(len(able), (2, REPEATS, PERIOD), generator=generator)]
    start = torch.tensor([row[:1] for row in [token_rows(model)[0]] * REPEATS])
    return torch.cat((start, tokens, tokens), 1).tolist(), torch.cat((start, before, tokens), 1).tolist()


def text_shares(texts: Iterable[tuple[list[list[int]], Tensor]]) -> dict[str, tuple[Tensor, float]]:
    """Return where to -> the mean attention (L, H) at all tokens but the first, and that of even attention.

    texts: (the token ids of B texts, their attention (L, B, H, T, T)).
    """
    sums: dict[str, Tensor] = {}
    count = even = 0.0
    for rows, maps in texts:
        for row, ids in enumerate(rows):
            weights = maps[:, row, :, 1 : len(ids), : len(ids)]  # (L, H, T - 1, T)
            parts = {"first": weights[..., 0], "previous": weights.diagonal(dim1=-2, dim2=-1)}
            parts["itself"] = weights[..., 1:].diagonal(dim1=-2, dim2=-1)
            sums = {name: sums.get(name, 0) + part.double().sum(-1) for name, part in parts.items()}
            count += len(ids) - 1
            even += sum(1 / (at + 1) for at in range(1, len(ids)))
    return {name: (total / count, even / count) for name, total in sums.items()}


def induction_shares(repeated: Tensor, plain: Tensor) -> tuple[Tensor, float]:
    """Return the mean attention (L, H) to the token after the earlier occurrence, and the largest that any head pays by
    chance: where nothing repeats, at distances about the period.

    repeated, plain: attention (L, B, H, T, T) on the sequences of `random_sequences`.
    """

    def at(maps: Tensor, distance: int) -> Tensor:
        """The mean attention of the second half to the token at a distance."""
        return maps[..., 1 + PERIOD :, :].diagonal(1 + PERIOD - distance, dim1=-2, dim2=-1).mean(-1).mean(1)

    return at(repeated, PERIOD - 1), max(at(plain, distance).max().item() for distance in DISTANCES)


def _stacked(model: Model, rows: Sequence[list[int]]) -> Tensor:
    """Return the attention (L, B, H, T, T); zeros for layers without attention, nothing without maps."""
    batches = (model.read(rows[start : start + PASS_ROWS]) for start in range(0, len(rows), PASS_ROWS))
    parts = [attention_maps(model, batch) for batch in batches]
    maps = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
    if not maps:
        return torch.zeros(0)
    empty = torch.zeros_like(next(iter(maps.values())))
    return torch.stack([maps.get(layer, empty) for layer in range(model.layers)])
