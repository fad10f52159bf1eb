"""A language model of one's choice that describes neurons: a server with OpenAI's API, such as vLLM, llama.cpp or
Ollama."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from icebear.errors import ModelError
from icebear.openai_server import check_address, server_answer, server_model
from icebear.records import Example

LONGEST_DESCRIPTION = 200
"""The largest number of characters of a description."""
TASK = (
    "Each line below is a sentence in which one neuron of a language model is very active, at the token between « and "
    "». Say in at most twelve words what these sentences, or the marked tokens, have in common. Answer with these "
    "words only.\n\n"
)


@dataclass(frozen=True)
class Writer:
    """A server, and its model."""

    url: str
    model: str

    @classmethod
    def at(cls, url: str, model: str | None = None) -> Writer:
        """Return the writer at an address such as http://localhost:8000/v1. model: by default, the server's first one.

        Raises `InputError` for something else than an address, and `ModelError` if the server does not name a model.
        """
        url = check_address(url)
        if model is None:
            try:
                model = server_model(url)
            except (LookupError, TypeError):
                raise ModelError(f"The server at {url} names no model; give one with --writer-model.") from None
            except ModelError as error:  # some list no models, and describe all the same
                raise ModelError(f"{error} If it runs, name its model with --writer-model.") from None
        return cls(url, model)

    def __str__(self) -> str:
        return f"{self.model} at {urlsplit(self.url).netloc.rpartition('@')[2]}"

    def describe(self, examples: Sequence[Example]) -> str:
        """Return a description of what examples have in common, in one line. Raises `ModelError`."""
        request = {"model": self.model, "temperature": 0, "max_tokens": 60}
        request["messages"] = [{"role": "user", "content": TASK + "\n".join(map(_marked, examples))}]
        answer = server_answer(f"{self.url}/chat/completions", request)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        lines = [line for line in text.splitlines() if line.strip()] if isinstance(text, str) else []
        if not lines:
            raise ModelError(f"The server at {self.url} gave no description; check that it serves chat completions.")
        return re.sub(r"\s+", " ", lines[0]).strip(" \"'*.")[:LONGEST_DESCRIPTION]


def _marked(example: Example) -> str:
    tokens, at = example.sentence.tokens, example.token
    token = tokens[at]
    space = token[: len(token) - len(token.lstrip())]
    return "".join((*tokens[:at], f"{space}«{token.strip()}»", *tokens[at + 1 :])).replace("\n", " ")
