"""A server with OpenAI's API, such as vLLM, llama.cpp or Ollama: its address, its first model, and what it answers."""

from __future__ import annotations

import json
import os
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from icebear.errors import InputError, ModelError
from icebear.values import shown

KEY = "OPENAI_API_KEY"
"""The environment variable of the server's key, which is never stored."""
SECONDS = 120.0
"""A server that takes longer has no answer."""
MOST_BYTES = 1 << 20


def check_address(url: str) -> str:
    """Return an address such as http://localhost:8000/v1, without a slash at its end. Raises `InputError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{shown(url)} is not the address of a server; give one such as http://localhost:8000/v1")
    return url.rstrip("/")


def server_model(url: str) -> str:
    """Return the name of a server's first model. Raises `ModelError`; `LookupError` or `TypeError` if it names none."""
    return str(server_answer(f"{url}/models")["data"][0]["id"])


def server_answer(url: str, request: dict[str, Any] | None = None) -> Any:
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
    raise ModelError(f"The server {why}") from None
