"""A tokenizer of a list of tokens, as models in TransformerLens' format have in their vocab.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from icebear.errors import InputError


class Words:
    """A tokenizer of a list of tokens: a text is such tokens, with or without spaces between them."""

    all_special_ids = ()
    pad_token_id = eos_token_id = None

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids, self.words = dict(ids), {number: word for word, number in ids.items()}
        self._pattern = re.compile(
            "|".join(map(re.escape, sorted(filter(None, ids), key=len, reverse=True))) + r"|\s+|(?P<other>\S)"
        )

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        if text.strip() in self.ids:
            return {"input_ids": [self.ids[text.strip()]]}
        matches = list(self._pattern.finditer(text))
        unknown = next((match for match in matches if match["other"]), None)
        if unknown:
            listed = ", ".join(list(self.ids)[:12]) + (", ..." if len(self.ids) > 12 else "")
            raise InputError(f"{text[unknown.start() :]!r} does not begin with a token of this model; use {listed}.")
        return {"input_ids": [self.ids[match[0]] for match in matches if match[0] in self.ids]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the tokens side by side, with spaces between them if they could not be read back otherwise."""
        ids = list(map(int, ids))
        words = [self.words.get(number, f"<{number}>") for number in ids]
        text = "".join(words)
        readable = set(ids) <= self.words.keys() and self(text)["input_ids"] == ids
        return text if readable or len(words) == 1 else " ".join(words)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids) for ids in rows]
