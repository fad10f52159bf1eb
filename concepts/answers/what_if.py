"""What if: the exchanges of each content word of a prompt, and which of them change the explained word.

1. The explained word is the likeliest content word after the prompt (`likely_words`).
2. Each of the content words of the prompt is exchanged for at most five others (`candidates_for`); all are read.
3. The change of an exchange is the log-odds of the explained word after it, less those before it, in nats.
4. The table has the three words with the largest median change, each with the two exchanges that change most. The range
   of the changes of all other words is its control.
5. A comparison is an exchange by which the explained word loses, and which a person could have made
   (`icebear.concepts.answers.comparisons`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.answers.comparisons import GOOD_SCORE, WRITTEN, Compared, Exchange, comparison_score
from icebear.concepts.answers.content_words import LikelyWord, Reader, likeliest, likely_words
from icebear.concepts.answers.exchanges import (
    PER_WORD,
    Candidate,
    Embeddings,
    candidates_for,
    exchangeable,
    may_change,
    most_relevant,
)
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.records import InNotebooks
from icebear.render import quoted
from icebear.values import typed

if TYPE_CHECKING:
    import pandas

EXCHANGED_WORDS = 12
"""The largest number of words that are exchanged: those with the largest relevance."""
SHOWN_WORDS = 3
SHOWN_EACH = 2
"""The exchanges of a word in the table."""
LONGEST = 128
"""The largest number of tokens of a text whose words are exchanged without being asked for."""
FEWEST = 3
"""Of a long text fewer words are exchanged, but so many."""
READ = 1500
"""The largest number of tokens that are read in all exchanges of further words."""
ONE_NAT = 1.0
"""Where no exchange changes the explained word by this much, no single word matters."""


@dataclass(frozen=True, repr=False)
class WhatIf(InNotebooks):
    """What the explained word hangs on: all exchanges that were read, those of the words that matter most first."""

    prompt: str
    explained: LikelyWord
    explained_after: str
    """What the model writes before the explained word; empty if it is the next token."""
    is_next: bool
    """Whether the explained token is the likeliest one."""
    exchanges: tuple[Exchange, ...]

    @cached_property
    def words(self) -> tuple[tuple[Exchange, ...], ...]:
        """The exchanges by word."""
        spans = dict.fromkeys((exchange.position, exchange.length) for exchange in self.exchanges)
        return tuple(tuple(x for x in self.exchanges if (x.position, x.length) == span) for span in spans)

    @property
    def shown(self) -> tuple[Exchange, ...]:
        """The rows of the table."""
        return tuple(exchange for word in self.words[:SHOWN_WORDS] for exchange in word[:SHOWN_EACH])

    @property
    def matters(self) -> bool:
        """Whether an exchange changes the explained word by a nat or more."""
        return any(abs(exchange.change) >= ONE_NAT for exchange in self.exchanges)

    @property
    def control(self) -> tuple[float, float] | None:
        """The range of the changes by the exchanges of all words that are not in the table; None of fewer than two."""
        others = [exchange.change for word in self.words[SHOWN_WORDS:] for exchange in word]
        return (min(others), max(others)) if len(self.words) >= SHOWN_WORDS + 2 else None

    @property
    def comparisons(self) -> tuple[Exchange, ...]:
        """The exchanges that a person could have made to compare with, the best first (`comparison_score`)."""
        return tuple(sorted((x for x in self.exchanges if x.score >= GOOD_SCORE), key=lambda x: -x.score))

    def arguments(self, exchange: Exchange | None) -> dict[str, Any]:
        """Return the arguments of `attribute` that explain the word, compared by an exchange or alone."""
        prompt = {"prompt": self.prompt + self.explained_after, "target": self.explained.token}
        if exchange is None:
            return prompt
        other = {"counterfactual": exchange.text + self.explained_after}
        return {**prompt, **other, **({"contrast": exchange.likely.token} if self._has_answer(exchange) else {})}

    def _has_answer(self, exchange: Exchange) -> bool:
        """Return whether another word is likely in the same place."""
        return not exchange.likely.after and exchange.likely.token != self.explained.token

    def command(self, exchange: Exchange) -> str:
        """Return the command that explains the prompt beside one exchange."""
        words = ["icebear", "explain", self.prompt + self.explained_after]
        words += ["--counterfactual", exchange.text + self.explained_after]
        words += [] if self.is_next else ["--target", self.explained.token_text]
        words += ["--contrast", exchange.likely.token_text] if self._has_answer(exchange) else []
        return shlex.join(words)

    def __str__(self) -> str:
        if not self.exchanges:
            return "The prompt has no word that can be exchanged."
        if not self.matters:
            answer = quoted(self.explained.text)
            return f"No single word matters: none of {len(self.exchanges)} exchanges changes {answer} by a nat or more."
        most = self.exchanges[0]
        return (
            f"The answer hangs most on {most.word!r}: with {most.instead!r} instead, {most.answer!r} is the "
            f"likeliest word (change {most.change:+.1f} nats)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-ready data."""
        shown = {id(exchange) for exchange in self.shown}
        rows = [{**x.to_dict(), "tokens": list(x.tokens), "shown": id(x) in shown} for x in self.exchanges]
        return {"exchanges": rows, "explained_after": self.explained_after}

    def to_frame(self) -> pandas.DataFrame:
        """Return a row for each exchange, with its command."""
        import pandas

        commands = [self.command(exchange) for exchange in self.exchanges]
        frame = pandas.DataFrame(self.to_dict()["exchanges"], columns=[*WRITTEN, "shown"])
        return frame.assign(command=commands)


def look(model: Model, prompt: PromptLike, next_token: bool = False) -> WhatIf:
    """Exchange the content words of a prompt.

    next_token: explain the likeliest token, also where it is no content word. Raises `InputError` for a model that does
    not predict the next token.
    """
    if not model.task.is_causal:
        raise InputError(
            f"{model.name} is not a causal language model, and icebear exchanges words only for these; give a "
            "counterfactual yourself."
        )
    ids = list(model.encode([prompt]).row_ids(0))
    reader, embeddings = Reader(model, ids), Embeddings(model)
    logits = reader.logits()
    model.top_tokens(logits[-1], 1)  # raises for NaN
    (explained,) = [likeliest(model, logits[-1])] if next_token else likely_words(reader, [ids], [logits[-1]])
    after = explained.after
    text = prompt if isinstance(prompt, str) else model.tokenizer.decode(ids)
    candidates = _chosen_candidates(reader, embeddings, logits)
    if isinstance(prompt, str):  # so that the command of a row reads the same tokens
        candidates = [row for row in candidates if model.ids(_text(model, row.of(ids))) == row.of(ids)]
    exchanges = _measured(reader, embeddings, candidates, explained, logits[-1])
    is_next = not after and explained.token == int(logits[-1].argmax())
    return WhatIf(text, explained, "".join(model.pieces(after)), is_next, tuple(_ordered(exchanges)))


def look_unasked(model: Model, prompt: str, next_token: bool = False) -> WhatIf | None:
    """Exchange the content words of a text that is explained alone; None for a long text, which would take long."""
    if not model.task.is_causal or len(model.ids(prompt)) > LONGEST:
        return None
    return look(model, prompt, next_token)


def chosen_counterfactual(model: Model, prompt: str) -> str | None:
    """Return the first comparison for the likeliest token after a text; None without one, or for a long text."""
    exchanged = look_unasked(model, prompt)
    return exchanged.comparisons[0].text if exchanged and exchanged.is_next and exchanged.comparisons else None


@typed
def what_if(model: Model, prompt: PromptLike) -> pandas.DataFrame:
    """Exchange the content words of a prompt, one at a time, and measure what this changes.

    The explained word is the likeliest content word after the prompt. Each content word of the prompt, and phrase of
    capitalized words, gives way to at most five similar ones of as many tokens.

    Parameters
    ----------
    model : Model
        A causal language model.
    prompt : str, sequence of int or Chat

    Returns
    -------
    pandas.DataFrame
        A row for each exchange, the words on which the answer hangs most first: the word, its position and length in
        tokens, the word instead and its token ids, the likeliest content word after the exchange with its probability,
        the change of the explained word's log-odds in nats, whether the row is in the table that `icebear explain`
        shows, and the command that explains both prompts.

    Raises
    ------
    InputError
        If the model does not predict the next token.
    """
    return look(model, prompt).to_frame()


def _text(model: Model, ids: Sequence[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=True)


def _chosen_candidates(reader: Reader, embeddings: Embeddings, logits: Tensor) -> list[Candidate]:
    """Return the exchanges of the words with the largest relevance. logits: (T, V)."""
    model, ids = reader.model, reader.ids
    spans = exchangeable(model, ids, may_change(model, ids))
    if sum(len(ids) - start for start, _ in spans) * PER_WORD > READ or len(spans) > EXCHANGED_WORDS:
        spans = most_relevant(model, ids, spans)
    read = accumulate(PER_WORD * (len(ids) - start) for start, _ in spans)
    chosen = [
        span for number, (span, tokens) in enumerate(zip(spans, read, strict=True)) if number < FEWEST or tokens <= READ
    ]
    each = [candidates_for(reader, embeddings, span, logits) for span in chosen[:EXCHANGED_WORDS]]
    return [candidate for candidates in each for candidate in candidates]


def _measured(
    reader: Reader, embeddings: Embeddings, candidates: Sequence[Candidate], explained: LikelyWord, logits: Tensor
) -> list[Exchange]:
    """Read all exchanges. logits: (V,) after the prompt."""
    model, ids, after = reader.model, reader.ids, explained.after
    rows = [[*candidate.of(ids), *after] for candidate in candidates]
    logits_after = reader.next_logits(rows)
    answers = likely_words(reader, rows, logits_after)
    before = reader.next_logits([[*ids, *after]])[0] if after else logits
    return [
        _exchange(model, *row, Compared(embeddings, ids, explained, before, values))
        for row, values in zip(zip(candidates, answers, strict=True), logits_after, strict=True)
    ]


def _exchange(model: Model, candidate: Candidate, answer: LikelyWord, compared: Compared) -> Exchange:
    ids, start, end = compared.ids, candidate.start, candidate.end
    before, after = (log_odds(x, compared.explained.token) for x in (compared.logits, compared.logits_after))
    word, instead = ("".join(model.pieces(tokens)).strip() for tokens in (ids[start:end], candidate.tokens))
    row = Exchange(
        word,
        start,
        end - start,
        instead,
        candidate.tokens,
        answer.text,
        answer.probability,
        after - before,
        _text(model, candidate.of(ids)),
        answer,
        -inf,
    )
    return replace(row, score=comparison_score(model, candidate, row, compared))


def _ordered(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Sort by the median change of the word, and by the change."""
    changes: dict[int, list[float]] = {}
    for exchange in exchanges:
        changes.setdefault(exchange.position, []).append(abs(exchange.change))
    return sorted(exchanges, key=lambda x: (-median(changes[x.position]), x.position, -abs(x.change)))


def log_odds(logits: Tensor, token: int) -> float:
    """Return the log-odds of a token, from the logits (V,) of all."""
    others = logits.double().clone()
    others[token] = -torch.inf
    return (logits[token].double() - others.logsumexp(-1)).item()
