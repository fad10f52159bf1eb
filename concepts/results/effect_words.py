"""The words of effects: which likely next words a node raises and lowers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from icebear.render import visible

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 100
"""The number of likely tokens among which words are shown, because rarer ones say little to a reader."""
IN_PROMPT = "Measured in this prompt"
BY_LENS = {
    "direct": "From its weights alone, in any prompt (logit lens)",
    "mean": "Estimated for an average prompt (averaged Jacobian)",
}
"""What the words of a node are: its effects (raises, lowers), or by lens what it promotes and suppresses."""
LEAST = 1e-3
"""Effects of fewer logits have no words, because they may be rounding errors."""


def effect_words(tokens: Sequence[str], effects: Tensor, k: int = 4) -> tuple[list[str], list[str]]:
    """Return the k words with the largest and smallest effects (W,) among the first `SHOWN` tokens. Tokens that differ
    only in case and spaces are one word; single ASCII characters and tokens without a letter or digit are none, unless
    most tokens are such characters."""
    characters = sum(len(token.strip()) == 1 for token in tokens[:SHOWN])
    shown = bool if 2 * characters > len(tokens[:SHOWN]) else is_shown_word

    def words_of(order: Sequence[int], sign: int) -> list[str]:
        words: dict[str, str] = {}
        for index in order:
            word = tokens[index].strip()
            if sign * effects[index] < LEAST or len(words) == k:
                break
            if shown(word):
                words.setdefault(word.casefold(), word)
        return list(words.values())

    order = effects[:SHOWN].argsort(stable=True).tolist()
    return words_of(order[::-1], +1), words_of(order, -1)


def is_shown_word(text: str) -> bool:
    """Return whether a token without its spaces is shown as a word."""
    return any(map(str.isalnum, text)) and not (len(text) == 1 and text.isascii())


def effect_parts(raises: Sequence[str], lowers: Sequence[str]) -> list[str]:
    """Return which likely next words are raised and which are lowered, in words."""
    return [
        f"{verb} {', '.join(map(visible, words))}" for verb, words in (("raises", raises), ("lowers", lowers)) if words
    ]


def effect_text(raises: Sequence[str], lowers: Sequence[str]) -> str:
    """Say which likely next words are raised and lowered."""
    return "; ".join(effect_parts(raises, lowers)) or "no effect on likely words"
