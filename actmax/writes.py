"""What a neuron writes at its maximally activating sentences: its measured effects on the likely next tokens there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.sites import hooks
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import likely_ids
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.db.store import Store
from icebear.models.model import Model
from icebear.records import EFFECT_SENTENCES, Neuron, SentenceEffects, Writes

PAGE_SENTENCES = 6
"""The number of sentences in the app and on pages with several cards."""
PASS_ROWS = 12
"""The number of sentences that are read in one pass; more of them would add padding."""


def writes(model: Model, store: Store, neuron: Neuron, sentences: int = EFFECT_SENTENCES) -> dict[str, Writes]:
    """Measure what a neuron writes, by polarity.

    It is empty for models that do not predict a next token, and for sites whose mean activation is not measured.
    """
    means = mean_activations(model) if model.task.is_causal else {}
    if neuron.site not in means:
        return {}
    store.check(model.fingerprint, model.name)
    average = means[neuron.site][neuron.layer, neuron.index].item()
    sets = {polarity: [(e.sentence, e.token) for e in store.examples(neuron, polarity, sentences)] for polarity in "+-"}
    sets["random"] = random_tokens(store, sentences)
    limit = store.facts.get("max_tokens")
    rows = [model.token_ids(sentence.text, limit)[: token + 1] for sentence, token in chain(*sets.values())]
    if not rows:
        return {}
    measured = [part.split(list(map(len, sets.values()))) for part in patched_logits(model, neuron, average, rows)]
    parts = dict(zip(sets, zip(*measured, strict=True), strict=True))
    plain, patched, activations = parts["random"]
    control = mean_correlation(likely_effects(plain, patched)[1], activations - average)
    return {
        polarity: _writes(model, average, sets[polarity], parts[polarity], control)
        for polarity in "+-"
        if sets[polarity]
    }


def random_tokens(store: Store, count: int) -> list[tuple[Any, int]]:
    """Return sentences of a store and a token of each, seeded. The first token does not count."""
    generator = random.Random(0)
    sentences = store.sentences.starting_at(generator.getrandbits(62))  # ids are hashes of 62 bits
    several = (sentence for sentence in sentences if len(sentence.tokens) > 1)
    return [(sentence, generator.randrange(1, len(sentence.tokens))) for sentence in islice(several, count)]


def likely_effects(plain: Tensor, patched: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """Return the W likely tokens of any of P rows, the most probable first, the centered effects (P, W) on them, and
    their probabilities (P, W). plain, patched: logits (P, V)."""
    ids = likely_ids(plain)
    effects = (plain - patched)[:, ids]
    return ids, effects - effects.mean(1, keepdim=True), plain.softmax(-1)[:, ids]


def mean_correlation(effects: Tensor, deviations: Tensor) -> float | None:
    """Return the mean correlation of two of P centered effects (P, W), each for an activation that is larger.

    deviations: (P,) the activations less the value that they are set to. An effect reverses with the sign of its
        deviation, which differs at random tokens.
    """
    count = len(effects)
    rows = torch.nn.functional.normalize(effects * deviations.sign()[:, None])
    cosines = rows @ rows.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item() if count > 1 else None


def _writes(model: Model, average: float, chosen: Any, measured: Sequence[Tensor], control: float | None) -> Writes:
    plain, patched, activations = measured
    ids, effects, probabilities = likely_effects(plain, patched)
    tokens = list(map(model.answer_text, ids))
    raises, lowers = map(tuple, effect_words(tokens, effects.mean(0), 6))
    sentences = []
    for (sentence, token), row, likely, activation in zip(
        chosen, effects, probabilities, activations.tolist(), strict=True
    ):
        order = likely.argsort(descending=True, stable=True)
        words = effect_words([tokens[at] for at in order.tolist()], row[order])
        sentences.append(SentenceEffects("".join(sentence.tokens[: token + 1]), activation, *map(tuple, words)))
    return Writes(average, raises, lowers, mean_correlation(effects, activations - average), control, tuple(sentences))


@torch.no_grad()
def patched_logits(
    model: Model, neuron: Neuron, value: float, rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (P, V) after token ids, those with a neuron set to a value at the last token, and the neuron's
    activations (P,) there."""
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    seen: list[Tensor] = []

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        half, x = len(x) // 2, x.clone()
        seen.append(x[:half, -1, neuron.index].float().cpu())
        x[half:, -1, neuron.index] = value
        return x

    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    for start in range(0, len(order), PASS_ROWS):
        chosen = order[start : start + PASS_ROWS]
        prefix = Prefix.of(model, [rows[row][:-1] for row in chosen])
        for part in [chosen] if prefix else [[row] for row in chosen]:
            with model.lock, hooks(model, [(neuron.site, neuron.layer)], visit):
                logits = _in_two_copies(model, prefix, [list(rows[row]) for row in part])
            halves = logits.float().cpu().chunk(2)
            parts |= zip(part, zip(*halves, seen.pop(), strict=True), strict=True)
    plain, patched, activations = zip(*(parts[row] for row in range(len(rows))), strict=True)
    return torch.stack(plain), torch.stack(patched), torch.stack(activations)


def _in_two_copies(model: Model, prefix: Prefix | None, rows: list[list[int]]) -> Tensor:
    """Return the logits (2 R, V) at the last tokens of rows, which are one row without a prefix."""
    twice = [*rows, *rows]
    if prefix is None:
        return model.logits(model.padded(twice), [len(rows[0]) - 1])[:, 0]
    last = torch.tensor([ids[-1:] for ids in twice], device=model.device)
    return prefix.logits(last, [*range(len(rows))] * 2, [len(ids) - 1 for ids in twice], [0])[:, 0]
