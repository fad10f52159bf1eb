"""What a recipe costs: what else changes when its edits act."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.calibration import calibrate
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.convert import CONVERTER, READING
from icebear.edits import Edit
from icebear.errors import InputError, RecipeError
from icebear.recipe import Recipe
from icebear.steering.apply import Statistic, steer
from icebear.steering.flipping.phrases import predicted
from icebear.steering.flipping.record import FlipRecord

NEUTRAL = (
    "The committee will meet again on Thursday to discuss the budget for the coming year.",
    "She put the letter back into the envelope and walked slowly to the door.",
    "To bake bread you need flour, water, salt and a little patience.",
    "The train to the coast leaves at seven in the morning and is often late.",
    "My brother has been learning to play the violin since he was six.",
    "In the second half of the century the population of the town doubled.",
    "Please read the instructions carefully before you open the box.",
    "The results of the experiment were published in a small journal.",
    "He paid for the coffee, said thank you and went out into the rain.",
    "A good teacher listens more than she talks.",
    "The company sold its factory and moved its offices to another city.",
    "Most of the trees in the garden were planted by our grandmother.",
)
"""Texts that no recipe is about, our own."""

KEY = "side_effects"
"""Where they stand in a recipe's provenance."""
PLACES = 48
"""Held-out contexts: texts cut at seeded inner tokens."""
CONTINUED = 16
"""Tokens of the plain continuation of each, for edits that act on what is generated."""


@dataclass(frozen=True)
class TokenChange:
    """A token's probability and rank (1 is the first) after a recipe's prompt, without and with the edits; of a phrase
    the product over its tokens, each behind those before it, and the worst rank."""

    text: str
    before: float
    after: float
    rank_before: int
    rank_after: int


@dataclass(frozen=True)
class SideEffects:
    """What a recipe does, and what else it changes; nats and counts."""

    kl: float
    """Mean KL divergence of the edited from the plain probabilities of the next token at held-out contexts, where the
    edits act."""
    places: int
    where: str
    """Where that is, in words."""
    old: TokenChange | None
    """The token that was first, if the recipe knows its prompt, and the one that was wanted:"""
    new: TokenChange | None
    perplexity: float
    """Of held-out sentences (of the neutral texts where none are given), and with the edits at every token:"""
    perplexity_everywhere: float
    repetition: float | None
    """The share of three-token sequences in 40 tokens after the prompt that were there before, with the edits, and
    without:"""
    repetition_plain: float | None
    of_its_range: dict[str, float | None]
    """Of each FFN neuron that is set: the value as a multiple of what it was seen to be, see `Calibration.share`."""
    budget: float | None = None
    """Nats that the recipe was meant to cost at most."""

    @property
    def over_budget(self) -> bool:
        return self.budget is not None and self.kl > self.budget

    @property
    def warnings(self) -> list[str]:
        over = [f"it costs {self.kl:.3f} nats, more than the budget of {self.budget}"] * self.over_budget
        for neuron, share in self.of_its_range.items():
            if share is None:
                over.append(f"{neuron} is set to a sign that it was not seen to take")
            elif share > 1.001:  # values are rounded
                over.append(f"{neuron} is set to {share:.1f} x the furthest that it was seen to go")
        repeats = (self.repetition or 0) > (self.repetition_plain or 0) + 0.2
        return over + ["the continuation repeats itself"] * repeats

    def provenance(self) -> dict[str, Any]:
        """JSON-ready, for a recipe."""
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, recipe: Recipe) -> SideEffects | None:
        """Those in a recipe's provenance, if they were measured. Raises `RecipeError` where they are not as icebear
        writes them."""
        try:
            return CONVERTER.structure(recipe.provenance[KEY], cls) if KEY in recipe.provenance else None
        except READING as error:
            raise RecipeError(
                f"The side effects of the recipe {recipe.name!r} have a bad part ({error}); make it again."
            ) from None


def side_effects(
    model: Model,
    recipe: Recipe,
    neutral: Sequence[str] = NEUTRAL,
    held_out: Sequence[str] = (),
    statistic: Statistic | None = None,
    budget: float | None = None,
) -> SideEffects:
    """What edits change besides the answer.

    neutral: texts that it should leave alone.
    held_out: sentences for the perplexity, such as `icebear.concepts.corpus.held_out` gives.
    statistic: as of `steer`, an index's.
    budget: nats that the KL may cost; `SideEffects.warnings` names what costs more.
    """
    recipe.check(model)
    edits = [edit.in_raw_units(statistic) if statistic else edit for edit in recipe]
    at = HeldOutContexts(model, neutral)
    everywhere = [replace(edit, where="all") for edit in edits]
    held = token_rows(model, held_out or neutral)
    usual, changed = (_perplexity(model, chosen, held) for chosen in ([], everywhere))
    flip = FlipRecord.of(recipe)
    if flip:
        flip.check(model)
    prompt = flip.prompt if flip else recipe.provenance.get("prompt")
    phrase = flip.phrase if flip and flip.top_k is None else ()
    old = new = repetition = repetition_plain = None
    if prompt:
        before, after = (predicted(model, chosen, prompt, phrase or (0,)).softmax(-1).cpu() for chosen in ([], edits))
        repetition_plain = _repeats(model, prompt)
        with steer(model, edits):
            repetition = _repeats(model, prompt)
        old = _change(model, (int(before[0].argmax()),), before, after)
        new = _change(model, phrase, before, after) if phrase else None
    return SideEffects(
        at.divergence(edits),
        len(at.places),
        _where(edits, len(at.places)),
        old,
        new,
        usual,
        changed,
        repetition,
        repetition_plain,
        _shares(model, edits),
        budget,
    )


def token_rows(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """The ids of neutral texts. Raises `InputError` where there is nothing to predict in one, or none."""
    rows = [model.token_ids(text) for text in texts]
    if not rows or any(len(ids) < 2 for ids in rows):
        raise InputError("A neutral text is shorter than two tokens, or there is none; give whole sentences.")
    return rows


def held_out_contexts(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """`PLACES` beginnings of texts, shortest first, cut at seeded inner tokens (and so not at full stops); fewer where
    texts are few and short."""
    cuts = [(row, end) for row in token_rows(model, texts) for end in range(min(2, len(row) - 1), len(row))]
    by_text = [list(group) for _, group in groupby(cuts, key=lambda cut: cut[0])]
    generator = random.Random(0)
    for group in by_text:
        generator.shuffle(group)
    taken = [group[turn] for turn in range(PLACES) for group in by_text if turn < len(group)][:PLACES]
    return sorted((row[:end] for row, end in taken), key=len)


def _repeats(model: Model, prompt: PromptLike) -> float:
    """How much the continuation repeats itself."""
    room = model.context_length - len(model.ids(prompt))
    text = model.generate(prompt, max_new_tokens=min(40, room)) if room > 0 else ""
    return repeated_trigrams(model.tokens_of(text))


def _change(model: Model, tokens: Sequence[int], before: Tensor, after: Tensor) -> TokenChange:
    """Of probabilities (S, V) without and with edits."""
    steps = list(range(len(tokens)))
    own = [shares[steps, list(tokens)] for shares in (before, after)]
    pairs = zip((before, after), own, strict=True)
    ranks = [1 + int((shares[steps] > one[:, None]).sum(-1).max()) for shares, one in pairs]
    text = "".join(model.answer_text(token) for token in tokens)
    return TokenChange(text, own[0].prod().item(), own[1].prod().item(), *ranks)


# --- where edits act ------------------------------------------------------------------------------------


class HeldOutContexts:
    """Held-out contexts of a model, and what it predicts there without edits."""

    def __init__(self, model: Model, texts: Sequence[str] = NEUTRAL) -> None:
        self.model, self.places = model, held_out_contexts(model, texts)
        self._plain: dict[tuple[int, bool], Tensor] = {}

    def divergence(self, edits: Sequence[Edit]) -> float:
        """Mean KL(plain || edited) in nats: at the last token of each place, and, if edits act on generated tokens, at
        `CONTINUED` tokens that the plain model writes behind it. Edits that name a position of their own prompt, or
        wait for a token, act at the last one."""
        anywhere = [replace(edit, where="last") if _elsewhere(edit) else edit for edit in edits]
        writes, ends = _acting(edits)
        divergences = []
        whole = zip(map(len, self.places), self._written if writes else self.places, strict=True)
        for length, group in groupby(whole, key=itemgetter(0)):
            rows = [row for _, row in group]
            plain = self._predicted(rows, length)
            first = 0 if ends else 1
            needed = list(range(length - 1 + first, len(rows[0])))
            edited = _log_probabilities(self.model, anywhere, rows, needed, length)
            divergences.append((plain[:, first:].exp() * (plain[:, first:] - edited)).sum(-1).flatten())
        return float(torch.cat(divergences).mean().clamp(min=0))

    @cached_property
    def _written(self) -> list[list[int]]:
        """The places with the most probable tokens behind them."""
        room = self.model.context_length - len(self.places[-1])
        if room < 1:
            return self.places
        behind = self.model.continuations(self.places, min(CONTINUED, room))
        return [place + own for place, own in zip(self.places, behind, strict=True)]

    def _predicted(self, rows: list[list[int]], length: int) -> Tensor:
        """(B, P, V) log-probabilities without edits, of places of one length from their last token on."""
        key = length, len(rows[0]) > length
        if key not in self._plain:
            needed = list(range(length - 1, len(rows[0])))
            self._plain[key] = _log_probabilities(self.model, [], rows, needed, None)
        return self._plain[key]


def _acting(edits: Sequence[Edit]) -> tuple[bool, bool]:
    """Whether edits act on generated tokens, and whether in the prompt."""
    only = [edit.where == "generated" or edit.where.startswith("step:") for edit in edits]
    return any(only) or any(edit.where == "answer" for edit in edits), not only or not all(only)


def _elsewhere(edit: Edit) -> bool:
    return edit.condition is not None or edit.turn is not None or edit.where.startswith("position:")


def _where(edits: Sequence[Edit], places: int) -> str:
    writes, ends = _acting(edits)
    parts = ["at the last token of"] * ends + [f"at {CONTINUED} generated tokens behind"] * writes
    text = f"{' and '.join(parts)} {places} held-out contexts"
    elsewhere = [str(edit) for edit in edits if _elsewhere(edit)]
    return text + (f" ({', '.join(elsewhere)} at the last token, since those have no such place)" if elsewhere else "")


@torch.no_grad()
def _log_probabilities(
    model: Model, edits: Iterable[Edit], rows: Sequence[list[int]], positions: list[int], prompt_tokens: int | None
) -> Tensor:
    """(B, P, V) of the next tokens of texts of one length, whose first tokens are the prompt."""
    with steer(model, edits, prompt_tokens=prompt_tokens):  # which holds the lock
        logits = model.logits(model.encode(rows), positions)
    return logits.float().log_softmax(-1).cpu()


def _perplexity(model: Model, edits: Sequence[Edit], rows: Sequence[list[int]]) -> float:
    losses = []
    for ids in rows:
        logs = _log_probabilities(model, edits, [ids], list(range(len(ids) - 1)), None)[0]
        losses.append(-logs[range(len(ids) - 1), ids[1:]])
    return float(torch.cat(losses).mean().exp())


def repeated_trigrams(ids: Sequence[int]) -> float:
    threes = list(zip(ids, ids[1:], ids[2:], strict=False))
    return 1 - len(set(threes)) / len(threes) if threes else 0.0


def _shares(model: Model, edits: Sequence[Edit]) -> dict[str, float | None]:
    set_ = [edit for edit in edits if edit.op == "set" and edit.neuron.site == "ffn"]
    seen = calibrate(model) if set_ else None
    return {str(e.neuron): seen.share((e.neuron.layer, e.neuron.index), e.value) for e in set_} if seen else {}
