"""A language model of one's choice that describes neurons: a server with OpenAI's API, such as vLLM, llama.cpp or
Ollama."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from icebear.errors import InputError, ModelError
from icebear.records import Example
from icebear.values import shown

KEY = "OPENAI_API_KEY"
"""The environment variable of the server's key, which is never stored."""
SECONDS = 120.0
"""A server that takes longer has no answer."""
LONGEST = 200
"""A description has at most so many characters."""
MOST_BYTES = 1 << 20
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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{shown(url)} is not the address of a server; give one such as http://localhost:8000/v1")
        url = url.rstrip("/")
        if model is None:
            try:
                model = str(_answer(f"{url}/models")["data"][0]["id"])
            except (LookupError, TypeError):
                raise ModelError(f"The server at {url} names no model; give one with --writer-model.") from None
        return cls(url, model)

    def __str__(self) -> str:
        return f"{self.model} at {urlsplit(self.url).netloc.rpartition('@')[2]}"

    def describe(self, examples: Sequence[Example]) -> str:
        """Return a description of what examples have in common, in one line. Raises `ModelError`."""
        request = {"model": self.model, "temperature": 0, "max_tokens": 60}
        request["messages"] = [{"role": "user", "content": TASK + "\n".join(map(_marked, examples))}]
        answer = _answer(f"{self.url}/chat/completions", request)
        try:
            text = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        lines = [line for line in text.splitlines() if line.strip()] if isinstance(text, str) else []
        if not lines:
            raise ModelError(f"The server at {self.url} gave no description; check that it serves chat completions.")
        return re.sub(r"\s+", " ", lines[0]).strip(" \"'*.")[:LONGEST]


def _marked(example: Example) -> str:
    tokens, at = example.sentence.tokens, example.token
    token = tokens[at]
    space = token[: len(token) - len(token.lstrip())]
    return "".join((*tokens[:at], f"{space}«{token.strip()}»", *tokens[at + 1 :])).replace("\n", " ")


def _answer(url: str, request: dict[str, Any] | None = None) -> Any:
    """Return the JSON that a server answers. Raises `ModelError`, with what to do."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if request is None else json.dumps(request).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS) as answer:
            return json.loads(answer.read(MOST_BYTES))
    except HTTPError as error:
        why = f"refuses {url} ({error.code} {error.reason}); check its address, the model, and the key in {KEY}."
    except TimeoutError:
        why = f"did not answer {url} within {SECONDS:.0f} seconds; try again, or give a smaller model."
    except ValueError:
        why = f"did not answer {url} with JSON; check its address, which often ends in /v1."
    except (OSError, HTTPException) as error:
        slow = isinstance(getattr(error, "reason", None), TimeoutError)
        why = f"{'is too slow' if slow else 'cannot be reached'} at {url}; check that it runs, and its address."
    raise ModelError(f"The writer {why}") from None
