"""What a neuron or head writes at its maximally activating sentences: its measured effects on the next tokens there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.sites import hooks, neuron_columns, neuron_site
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import likely_ids
from icebear.concepts.vocabulary.calibration import mean_activations
from icebear.db.store import Store
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.records import EFFECT_SENTENCES, Example, Neuron, SentenceEffects, Writes

PAGE_SENTENCES = 6
"""The number of sentences in the app and on pages with several cards."""
PASS_ROWS = 12
"""The number of sentences that are read in one pass; more of them would add padding."""


def writes(
    model: Model,
    store: Store,
    neuron: Neuron,
    examples: Mapping[str, Sequence[Example]],
    sentences: int = EFFECT_SENTENCES,
) -> dict[str, Writes]:
    """Measure what a neuron writes, by polarity; of a head only words with effects above those at random tokens.

    It is empty for models that do not predict a next token, and for sites whose mean activation is not measured.

    examples: polarity -> examples, of which the first `sentences` are measured.
    """
    means = mean_activations(model) if model.task.is_causal else {}
    if neuron_site(neuron.site) not in means:
        return {}
    store.check(model.index_fingerprint, model.name)
    value = means[neuron_site(neuron.site)][neuron.layer, neuron_columns(neuron, model.head_dim)]
    average = 0.0 if neuron.site == "head" else value.item()
    sets = {sign: [(e.sentence, e.token) for e in rows[:sentences]] for sign, rows in examples.items() if rows}
    if not sets:
        return {}
    sets["random"] = random_tokens(store, sentences)
    limit = store.facts.get("max_tokens")
    rows = [model.token_ids(sentence.text, limit)[: token + 1] for sentence, token in chain(*sets.values())]
    measured = [part.split(list(map(len, sets.values()))) for part in patched_logits(model, neuron, value, rows)]
    parts = dict(zip(sets, zip(*measured, strict=True), strict=True))
    plain, patched, activations = parts["random"]
    by_chance = likely_effects(plain, patched)[1]
    control = mean_correlation(by_chance, activations - average)
    least = effect_sizes(by_chance).max().item() if neuron.site == "head" else 0.0
    del sets["random"]
    return {sign: _writes(model, average, chosen, parts[sign], control, least) for sign, chosen in sets.items()}


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


def effect_sizes(effects: Tensor) -> Tensor:
    """Return the root mean square (P,) of centered effects (P, W)."""
    return effects.square().mean(1).sqrt()


def mean_correlation(effects: Tensor, deviations: Tensor) -> float | None:
    """Return the mean pairwise correlation of P centered effects (P, W), each with the sign of a larger activation.

    deviations: (P,) the activations less the value that they are set to. An effect reverses with the sign of its
        deviation, which differs at random tokens.
    """
    count = len(effects)
    rows = torch.nn.functional.normalize(effects * deviations.sign()[:, None])
    cosines = rows @ rows.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item() if count > 1 else None


def _writes(
    model: Model, average: float, chosen: Any, measured: Sequence[Tensor], control: float | None, least: float
) -> Writes:
    """least: the size above which effects have words; unless it is 0, their mean has words only if they are more alike
    than by chance."""
    plain, patched, activations = measured
    ids, effects, probabilities = likely_effects(plain, patched)
    tokens = list(map(model.answer_text, ids))
    alike = mean_correlation(effects, activations - average)
    fixed = not least or (alike is not None and control is not None and alike > control)
    raises, lowers = map(tuple, effect_words(tokens, effects.mean(0) * fixed, 6))
    sentences = []
    shown = effects * (effect_sizes(effects) > least)[:, None]
    for (sentence, token), row, likely, activation in zip(
        chosen, shown, probabilities, activations.tolist(), strict=True
    ):
        order = likely.argsort(descending=True, stable=True)
        words = effect_words([tokens[at] for at in order.tolist()], row[order])
        sentences.append(SentenceEffects("".join(sentence.tokens[: token + 1]), activation, *map(tuple, words)))
    return Writes(average, raises, lowers, alike, control, tuple(sentences))


@torch.no_grad()
def patched_logits(
    model: Model, neuron: Neuron, value: Tensor, rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (P, V) after token ids, those with a neuron set to a value at the last token, and the neuron's
    activations (P,) there; for a head, the norm of what it writes minus what it would write with the value."""
    parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    site, columns = neuron_site(neuron.site), neuron_columns(neuron, model.head_dim)
    seen: list[Tensor] = []

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        half, x = len(x) // 2, x.clone()
        seen.append(x[:half, -1, columns].float().cpu())
        x[half:, -1, columns] = value.to(x)
        return x

    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    for start in range(0, len(order), PASS_ROWS):
        chosen = order[start : start + PASS_ROWS]
        prefix = Prefix.of(model, [rows[row][:-1] for row in chosen])
        for part in [chosen] if prefix else [[row] for row in chosen]:
            with model.lock, hooks(model, [(site, neuron.layer)], visit):
                logits = _in_two_copies(model, prefix, [list(rows[row]) for row in part])
            halves = logits.float().cpu().chunk(2)
            parts |= zip(part, zip(*halves, seen.pop(), strict=True), strict=True)
    plain, patched, activations = zip(*(parts[row] for row in range(len(rows))), strict=True)
    read = torch.stack(activations)
    if neuron.site == "head":
        weights = Linear(model.site_module(site, neuron.layer)).columns(columns).cpu()  # (D, d)
        read = model.residual_scale(site) * ((read - value) @ weights.T).norm(dim=1, keepdim=True)
    return torch.stack(plain), torch.stack(patched), read[:, 0]


def _in_two_copies(model: Model, prefix: Prefix | None, rows: list[list[int]]) -> Tensor:
    """Return the logits (2 R, V) at the last tokens of rows, which are one row without a prefix."""
    twice = [*rows, *rows]
    if prefix is None:
        return model.logits(model.padded(twice), [len(rows[0]) - 1])[:, 0]
    last = torch.tensor([ids[-1:] for ids in twice], device=model.device)
    return prefix.logits(last, [*range(len(rows))] * 2, [len(ids) - 1 for ids in twice], [0])[:, 0]
