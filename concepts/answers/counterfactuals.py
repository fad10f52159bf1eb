"""Suggestions of counterfactual prompts: one content word is exchanged for a likely one that changes the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path

import torch

from icebear.concepts.passes.prefix import Prefix
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.models.text.chat import inside
from icebear.models.text.prompts import PromptLike
from icebear.values import check_int, typed

COMMON = frozenset(Path(__file__).with_name("common.txt").read_text(encoding="utf-8").split())
"""The 200 most common English words."""
TRIED = 50
"""The number of words that are tried instead of each word."""
MOST = 3000
"""They are among this many most likely or similar tokens."""
AS_SURE = 0.5
"""The least ratio of the probabilities of the new and the old answer."""
ROWS_PER_PASS = 16
"""The number of prompts in a forward pass."""


@dataclass(frozen=True)
class Suggestion:
    """A prompt with as many tokens and another answer."""

    ids: tuple[int, ...]
    text: str
    word: str
    instead_of: str
    answer: str
    """The most probable next token of the suggestion."""
    probability: float
    log_probability: float
    """Of prompt and answer together, in nats."""


@typed
def suggest_counterfactuals(model: Model, prompt: PromptLike, count: int = 3) -> list[Suggestion]:
    """Suggest counterfactual prompts for `attribute`.

    One content word is exchanged for another with as many tokens. In a chat, the word is part of a message. The first
    word, the last word and the 200 most common words stay.

    Parameters
    ----------
    model : Model
        A causal language model.
    prompt : str, sequence of int or Chat
    count : int
        The largest number of suggestions.

    Returns
    -------
    list of Suggestion
        Suggestions sorted by the probability of prompt and answer; empty if there are none.

    Raises
    ------
    InputError
        If the model does not predict the next token.
    """
    count = check_int(count, "The number of counterfactuals")
    if not model.task.is_causal:
        raise InputError(
            f"{model.name} is not a causal language model, and icebear suggests counterfactuals only for these; write "
            "a counterfactual yourself."
        )
    ids = list(model.encode([prompt]).row_ids(0))
    texts = [model.answer_text(token) for token in ids]
    prefix = Prefix.of(model, [ids])
    (answer, sure, read), *_ = _answers(model, [ids])
    turns = model.turns(ids)
    allowed = inside(turns) if turns else set(range(len(ids)))
    changes = [
        ([*ids[:start], *tokens, *ids[end:]], start, end)
        for start, end in _words(texts)
        if allowed.issuperset(range(start, end))
        for tokens in _likely(model, ids[:start], ids[start:end], "".join(texts[start:end]).strip())
    ]
    rows = [
        (other, probability, sum(read[: start - 1]) + sum(logs))
        for start, group in groupby(changes, key=itemgetter(1))
        for other, probability, logs in _answers(model, [changed for changed, _, _ in group], prefix, start)
    ]
    suggestions = [
        Suggestion(
            tuple(changed),
            model.tokenizer.decode(changed),
            "".join(model.answer_text(token) for token in changed[start:end]).strip(),
            "".join(texts[start:end]).strip(),
            model.answer_text(other),
            probability,
            log_probability + math.log(probability),
        )
        for (changed, start, end), (other, probability, log_probability) in zip(changes, rows, strict=True)
        if other != answer and probability >= AS_SURE * sure and _content(model.answer_text(other))
    ]
    return sorted(suggestions, key=lambda suggestion: -suggestion.log_probability)[:count]


def _words(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bounds of the content words without the first and last token."""
    starts = [index for index, text in enumerate(texts) if text[:1].isspace()] + [len(texts)]
    return [(a, b) for a, b in pairwise(starts) if a > 0 and b < len(texts) and _content("".join(texts[a:b]))]


def _content(word: str) -> bool:
    return word.strip().isalpha() and word[:1].isspace() and word.strip().lower() not in COMMON


@torch.no_grad()
def _likely(model: Model, before: list[int], tokens: list[int], word: str) -> list[list[int]]:
    """Return words with as many tokens and equal capitalization that are likely after `before`; words of one token are
    sorted by the similarity of their embeddings."""
    with model.lock:
        logits = model.logits(model.encode([before]), [len(before) - 1])[0, 0]
    likeliest = logits.topk(min(MOST, len(logits))).indices.tolist()
    near, likely = likeliest, set(likeliest)
    if len(tokens) == 1:
        rows = Linear(model.net.get_input_embeddings()).rows()
        similar = torch.nn.functional.cosine_similarity(rows, rows[tokens[0]], dim=-1)
        near = [token for token in similar.topk(min(MOST, len(rows))).indices.tolist() if token in likely]
    texts = ((token, model.answer_text(token)) for token in near)
    words = ([token] for token, text in texts if _content(text) and text.strip()[0].isupper() == word[0].isupper())
    begun = list(islice(words, TRIED))
    for _ in tokens[1:]:
        begun = _continued(model, before, begun)
    begun_texts = {tuple(ids): "".join(model.answer_text(token) for token in ids) for ids in begun}
    return [list(ids) for ids, text in begun_texts.items() if _content(text) and text.strip().lower() != word.lower()]


def _continued(model: Model, before: list[int], begun: list[list[int]]) -> list[list[int]]:
    """Extend each beginning by the most probable token that continues the word."""
    continued = []
    for start in range(0, len(begun), ROWS_PER_PASS):
        part = begun[start : start + ROWS_PER_PASS]
        rows = [[*before, *tokens] for tokens in part]
        with model.lock:
            logits = model.logits(model.encode(rows), [len(rows[0]) - 1])[:, 0]
        for tokens, best in zip(part, logits.topk(min(20, logits.shape[-1])).indices.tolist(), strict=True):
            inside = [token for token in best if model.answer_text(token).isalpha()]
            if inside:
                continued.append([*tokens, inside[0]])
    return continued


@torch.no_grad()
def _answers(
    model: Model, rows: Sequence[list[int]], prefix: Prefix | None = None, same: int = 1
) -> list[tuple[int, float, list[float]]]:
    """Return (answer, its probability, log-probabilities of the tokens from `same` on) for prompts of equal length.

    prefix: a prompt whose first `same` tokens all prompts share.
    """
    answers, begin = [], same - 1 if prefix else 0
    for start in range(0, len(rows), ROWS_PER_PASS):
        ids = torch.tensor(rows[start : start + ROWS_PER_PASS], device=model.device)[:, begin:]
        positions = list(range(ids.shape[1]))
        with model.lock:
            if prefix and begin:
                logits = prefix.logits(ids, [0] * len(ids), [begin] * len(ids), positions)
            else:
                logits = model.logits(model.encode(ids.tolist()), positions)
        logs = logits.float().log_softmax(-1)  # (B, T, V)
        read = logs[:, :-1].gather(-1, ids[:, 1:, None])[:, same - 1 - begin :, 0]
        best = logs[:, -1].max(-1)
        answers += list(zip(best.indices.tolist(), best.values.exp().tolist(), read.tolist(), strict=True))
    return answers
