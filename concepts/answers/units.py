"""Relevance of tokens summed over words, sentences, turns and documents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from icebear.concepts.results.result import Relevance
from icebear.extras import need
from icebear.models.text.chat import Turn
from icebear.values import one_of, typed


@dataclass(frozen=True)
class Unit:
    """A span of tokens [start, stop)."""

    text: str
    start: int
    stop: int
    turn: str
    """``prompt``, ``answer``, or a role of a chat, numbered if it has several turns."""
    template: bool = False
    """Whether the span belongs to the template of a chat."""


@typed
def units(relevance: Relevance, by: str = "sentence") -> list[tuple[Unit, float]]:
    """Sum the relevance of tokens over units. Tokens of a chat's template are separate units.

    Parameters
    ----------
    relevance : Relevance
    by : str
        ``token``, ``word``, ``sentence``, ``turn`` or ``document`` (parts between empty lines).

    Returns
    -------
    list of (Unit, float)

    Raises
    ------
    InputError
        If `by` is not a unit.
    """
    rows = units_of(relevance.prompt.strings, relevance.prompt.turns, relevance.prompt.answer_start, by)
    return list(zip(rows, summed(relevance.tokens, rows).tolist(), strict=True))


def units_of(pieces: Sequence[str], turns: Sequence[Turn], answer_start: int | None, by: str) -> list[Unit]:
    """Split tokens, given as texts, into units. The units cover all tokens in order."""
    one_of(by, "unit", SPLIT)
    result = []
    for turn, start, stop, template in _regions(len(pieces), turns, answer_start):
        if by == "token":
            cuts = list(range(start, stop + 1))
        else:
            cuts = [start, stop] if template else [start, *_cuts(pieces[start:stop], SPLIT[by], start), stop]
        for begin, end in pairwise(cuts):
            if begin < end:
                result.append(Unit("".join(pieces[begin:end]), begin, end, turn, template))
    return result


def summed(values: Tensor, parts: Sequence[Unit]) -> Tensor:
    """Sum values (..., T) over units (..., U)."""
    return torch.stack([values[..., part.start : part.stop].sum(-1) for part in parts], -1)


def _regions(count: int, turns: Sequence[Turn], answer_start: int | None) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (turn, start, stop, whether it is the template's) of each region."""
    begins = count if answer_start is None else answer_start
    if not turns:
        yield from (("prompt", 0, begins, False), ("answer", begins, count, False))
        return
    several = {role for role, number in Counter(turn.role for turn in turns).items() if number > 1}
    numbers: Counter[str] = Counter()
    for turn in turns:
        numbers[turn.role] += 1
        name = f"{turn.role} {numbers[turn.role]}" if turn.role in several else turn.role
        name = "answer" if turn.first >= begins else name
        yield name, turn.start, turn.first, True
        yield name, turn.first, min(turn.last, max(begins, turn.first)), False
        yield "answer", max(turn.first, min(begins, turn.last)), turn.last, False
        yield name, turn.last, turn.stop, True
    behind = turns[-1].stop
    yield from (("prompt", behind, max(behind, begins), False), ("answer", max(behind, begins), count, False))


def _cuts(pieces: Sequence[str], split: Callable[[str], list[str]], start: int) -> list[int]:
    """Return the tokens where parts of the text begin. A token belongs to the part of its first letter."""
    parts = split("".join(pieces))
    ends = list(accumulate(map(len, parts)))
    begins = list(accumulate(map(len, pieces), initial=0))
    where = []
    for index, piece in enumerate(pieces):
        letter = begins[index] + len(piece) - len(piece.lstrip()) if piece.strip() else begins[index]
        where.append(sum(end <= letter for end in ends))
    return [start + index for index in range(1, len(where)) if where[index] > where[index - 1]]


def _sentences(text: str) -> list[str]:
    """Split a text into sentences with their trailing spaces."""
    need("index")
    from sentencex import segment

    sentences: list[str] = []
    for part in segment("en", text):
        if sentences and not part.strip():
            sentences[-1] += part
        else:
            sentences.append(part)
    return sentences


SPLIT: dict[str, Callable[[str], list[str]]] = {
    "token": list,
    "word": re.compile(r"\s*\S+|\s+").findall,
    "sentence": _sentences,
    "turn": lambda text: [text],
    "document": re.compile(r"(?s).+?(?:\n\s*\n|$)").findall,
}
