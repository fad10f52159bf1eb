"""Side effects of edits: the off-target KL at held-out contexts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.vocabulary import calibration
from icebear.edits import AnyEdit
from icebear.errors import InputError, NumericalError
from icebear.models.model import Model
from icebear.steering.apply import steer
from icebear.steering.flipping.last_token import head_outputs

HELD_OUT_TEXTS = (Path(__file__).parent / "held_out.txt").read_text(encoding="utf-8").splitlines()
"""Texts of our own that no recipe is about."""

CONTEXTS = 48
CONTINUED = 16
"""Tokens of the plain continuation of each context, for edits that act on generated tokens."""
MAX_STRENGTH = 256.0
TRIES = 40
SETS_PER_PASS = 4
"""Sets of edits that share a pass; bounds the memory of the keys, values and logits of all contexts for each."""
EditSets = Sequence[Sequence[AnyEdit]]
ContextReader = Callable[[EditSets], Iterator[Tensor]]
"""Reads the held-out contexts under each set of edits: the log-probabilities (N, V) of their next tokens."""


def token_rows(model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts; random ones for a model whose tokenizer cannot read them.

    Raises `InputError` for no texts, or a text in which nothing is predicted.
    """
    if not model.reads_any_text:
        return calibration.token_rows(model)
    rows = [model.token_ids(text) for text in texts]
    if not rows or any(len(ids) < 2 for ids in rows):
        raise InputError("There is no held-out text, or one is shorter than two tokens; give whole sentences.")
    return rows


@torch.no_grad()
def _log_probabilities(
    model: Model, edits: Iterable[AnyEdit], rows: Sequence[list[int]], positions: list[int], prompt_tokens: int | None
) -> Tensor:
    """(B, P, V) for the next tokens of texts, whose first `prompt_tokens` are the prompt."""
    with steer(model, edits, prompt_tokens=prompt_tokens):  # which holds the lock
        logits = model.logits(model.encode(rows), positions)
    return logits.float().log_softmax(-1).cpu()


class HeldOutContexts:
    """Held-out contexts of a model, and its predictions there without edits."""

    def __init__(self, model: Model, texts: Sequence[str] = HELD_OUT_TEXTS) -> None:
        """The contexts are `CONTEXTS` beginnings of texts (fewer if the texts are few and short), cut at seeded random
        tokens before the last, the shortest first."""
        self.model, rows = model, token_rows(model, texts)
        generator, by_text = random.Random(0), []
        for number, row in enumerate(rows):
            by_text.append([(number, end) for end in range(min(2, len(row) - 1), len(row))])
            generator.shuffle(by_text[-1])
        taken = [context for contexts in zip_longest(*by_text) for context in contexts if context]
        contexts = sorted(taken[:CONTEXTS], key=itemgetter(1))
        longest = sorted(dict(contexts).items(), key=itemgetter(1))  # the last context of each text
        numbers = {number: new for new, (number, _) in enumerate(longest)}
        self._texts = [rows[number][:end] for number, end in longest]
        self._cuts = [(numbers[number], end) for number, end in contexts]
        self._plain: dict[ContextReader, Tensor] = {}

    @cached_property
    def contexts(self) -> list[list[int]]:
        return [self._texts[number][:end] for number, end in self._cuts]

    def off_target_kl(self, edits: Sequence[AnyEdit]) -> float:
        """Return the mean KL(plain || edited) in nats at the last token of each context, and, if edits act on generated
        tokens, at `CONTINUED` tokens that the plain model writes after it. Edits that name a position of their own
        prompt act at the last one."""
        return next(self.off_target_kls([edits]))

    def off_target_kls(self, sets: Iterable[Sequence[AnyEdit]]) -> Iterator[float]:
        """Yield `off_target_kl` of each set of edits; sets that act at the last token share passes."""
        for read, group in groupby(map(_anywhere, sets), self._reader):
            logs = read([*[[]] * (read not in self._plain), *group])
            if read not in self._plain:
                self._plain[read] = next(logs)
            yield from (self._kl(self._plain[read], edited) for edited in logs)

    def _kl(self, plain: Tensor, edited: Tensor) -> float:
        kl = (plain.exp() * (plain - edited)).sum(-1).mean()
        if kl.isnan():
            raise NumericalError(f"With these edits {self.model.name} computes NaN; make them smaller.")
        return float(kl.clamp(min=0))

    def _reader(self, edits: Sequence[AnyEdit]) -> ContextReader:
        """Return the quickest way to read the contexts for edits that act there. All give the same."""
        writes, ends = _acting(edits)
        wheres = {edit.where for edit in edits}
        if writes:
            return self._ends_and_continuations if ends else self._continuations
        if wheres <= {"last"} and self._prefix:
            return self._last_tokens
        if wheres <= {"all", "prompt"} and self.model.task.is_causal:
            return self._whole_texts
        return self._ends

    @cached_property
    def _prefix(self) -> Prefix | None:
        return Prefix.of(self.model, self._texts)

    def _last_tokens(self, sets: EditSets) -> Iterator[Tensor]:
        """Read the last token of each context after all tokens before it, on which the edits do not act; the rows of
        a pass are all contexts for each of several sets."""
        assert self._prefix
        count = len(self._cuts)
        for start in range(0, len(sets), SETS_PER_PASS):
            part = sets[start : start + SETS_PER_PASS]
            with torch.no_grad(), ExitStack() as edited:
                for number, edits in enumerate(part):
                    rows = range(number * count, (number + 1) * count)
                    edited.enter_context(steer(self.model, edits, rows=rows))
                logits = self._prefix.logits(*self._after_prefix([*range(count)] * len(part)), [0])[:, 0]
            yield from logits.float().log_softmax(-1).cpu().split(count)

    def _after_prefix(self, chosen: Sequence[int]) -> tuple[Tensor, list[int], list[int]]:
        """Return the last tokens (C, 1) of chosen contexts, with the row of the prefix and the position of each."""
        rows, ends = zip(*(self._cuts[number] for number in chosen), strict=True)
        last = torch.tensor([[self.contexts[number][-1]] for number in chosen], device=self.model.device)
        return last, list(rows), [end - 1 for end in ends]

    def head_outputs(self, chosen: Sequence[int]) -> dict[int, Tensor]:
        """Return layer -> the outputs (C, A) of its heads at the last token of C chosen contexts."""
        if self._prefix:
            return head_outputs(self.model, self._prefix.inputs(*self._after_prefix(chosen)))
        batches = [self.model.padded([self.contexts[number]]) for number in chosen]
        each = [head_outputs(self.model, self.model.inputs(batch)) for batch in batches]
        return {layer: torch.cat([row[layer] for row in each]) for layer in each[0]}

    def _whole_texts(self, sets: EditSets) -> Iterator[Tensor]:
        """Read each text once: edits act on each token in the same way in all contexts."""
        numbers, ends = zip(*self._cuts, strict=True)
        for edits in sets:
            logs = _log_probabilities(self.model, edits, self._texts, list(range(max(ends))), None)
            yield logs[list(numbers), [end - 1 for end in ends]]

    def _ends(self, sets: EditSets) -> Iterator[Tensor]:
        return self._by_length(sets, self.contexts, 0)

    def _continuations(self, sets: EditSets) -> Iterator[Tensor]:
        return self._by_length(sets, self._continued, 1)

    def _ends_and_continuations(self, sets: EditSets) -> Iterator[Tensor]:
        return self._by_length(sets, self._continued, 0)

    def _by_length(self, sets: EditSets, texts: Sequence[list[int]], start: int) -> Iterator[Tensor]:
        """Read texts that begin with the contexts, from the `start`-th token after the last one on."""
        for edits in sets:
            logs = []
            for length, group in groupby(zip(map(len, self.contexts), texts, strict=True), key=itemgetter(0)):
                rows = [row for _, row in group]
                positions = list(range(length - 1 + start, len(rows[0])))
                logs.append(_log_probabilities(self.model, edits, rows, positions, length).flatten(0, 1))
            yield torch.cat(logs)

    @cached_property
    def _continued(self) -> list[list[int]]:
        """The contexts with the most probable tokens after them."""
        room = self.model.context_length - len(self.contexts[-1])
        if room < 1:
            return self.contexts
        written = self.model.continuations(self.contexts, min(CONTINUED, room))
        return [context + tokens for context, tokens in zip(self.contexts, written, strict=True)]


def _anywhere(edits: Sequence[AnyEdit]) -> list[AnyEdit]:
    """Return edits of a position of their own prompt as edits of the last token."""
    return [replace(edit, where="last") if edit.where.startswith("position:") else edit for edit in edits]


def _acting(edits: Sequence[AnyEdit]) -> tuple[bool, bool]:
    """Return whether edits act on generated tokens, and whether they act in the prompt."""
    only = [edit.where == "generated" or edit.where.startswith("step:") for edit in edits]
    return any(only) or any(edit.where == "answer" for edit in edits), not only or not all(only)


def strength_at(
    wanted: float, cost: Callable[[float], float], start: float = 1.0, near: float = 0.02
) -> tuple[float, float]:
    """Return a strength and its cost, within a share `near` of the wanted cost. Raises `InputError` if out of reach.

    cost: a function of the strength that grows about quadratically while it is small. The search takes secants of the
    logarithms (the first with a slope of 2) inside a shrinking bracket.
    """
    low, high, strength = 0.0, math.inf, start
    seen: list[tuple[float, float]] = []
    while len(seen) < TRIES and low < MAX_STRENGTH:
        reached = cost(strength)
        if abs(reached - wanted) <= near * wanted:
            return strength, reached
        if reached < wanted:
            low = max(low, strength)
        else:
            high = min(high, strength)
        slope = 2.0
        if seen and min(reached, seen[-1][1]) > 0 and strength != seen[-1][0]:
            slope = math.log(reached / seen[-1][1]) / math.log(strength / seen[-1][0]) or 2.0
        seen.append((strength, reached))
        guess = strength * math.exp(math.log(wanted / max(reached, wanted * 1e-6)) / max(slope, 0.5))
        strength = min(max(guess, strength / 8), strength * 8, MAX_STRENGTH)
        if math.isfinite(high) and not low < strength < high:
            strength = math.sqrt(low * high) if low else high / 2
    best, reached = min(seen, key=lambda pair: abs(pair[1] - wanted))
    raise InputError(
        f"No strength gives an off-target KL of {wanted} nats. The nearest is {reached:.3g} nats at strength "
        f"{best:.3g}; choose another off-target KL, or give a strength."
    )
