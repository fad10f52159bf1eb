"""The API of `icebear serve`; `python docs/openapi.py` writes docs/openapi.json from the code."""

from __future__ import annotations

import json
from pathlib import Path

from icebear.app.api.server import server
from icebear.app.session import Session


def text() -> str:
    return json.dumps(server(Session("smollm2-135m")).openapi(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("openapi.json").write_text(text())
