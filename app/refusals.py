"""Errors as the sentences with which a server refuses a request."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from icebear.values import shown


def one_line(problems: Iterable[Any]) -> str:
    """Return what pydantic finds wrong with a request as a sentence."""
    parts = [
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        + ("" if problem["type"] == "missing" else f", not {shown(problem['input'])}")
        for problem in problems
    ]
    return "; ".join(parts) + "."


def with_arguments(sentence: str, arguments: Collection[str]) -> str:
    """Replace options of the command line by the call's arguments, if it has them; commands for the user stay."""

    def name(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        argument = match[1].replace("-", "_")
        return argument if argument in arguments else f"the command line's {match[0]}"

    return re.sub(r"icebear [a-z]+ [^;,]*|--([a-z][a-z-]*)", name, sentence)
