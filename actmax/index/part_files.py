"""The files of a scan in parts, by their names: which parts a folder has, and which of them are complete."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

NAME = re.compile(r"part-(\d+)-of-(\d+)\.(db|partial)")
HEAD_MEANS = "head-means"
"""How the names of files begin that have the means of head outputs of a model."""


def folder_of(store: str | Path) -> Path:
    """Return the folder of the parts of a store, if no other one is named."""
    return Path(f"{store}.parts")


def parts_in(folder: Path) -> dict[int, dict[int, bool]]:
    """Return for each number of parts the parts that a folder has, and whether each is complete."""
    result: dict[int, dict[int, bool]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            part, count, ending = int(match[1]), int(match[2]), match[3]
            has = result.setdefault(count, {})
            has[part] = ending == "db" or has.get(part, False)
    return result


def remove_parts(folder: Path) -> None:
    """Delete the parts of a folder and what they share, and the folder if nothing else is in it."""
    for path in folder.iterdir():
        if NAME.fullmatch(path.name) or path.name.startswith(HEAD_MEANS):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def parts_lines(folder: Path) -> list[str]:
    """Return which parts of a scan a folder has, as a sentence for each number of parts."""
    lines = []
    for count, has in parts_in(folder).items():
        complete = sum(has.values())
        begun = ", ".join(str(part) for part, is_complete in sorted(has.items()) if not is_complete)
        lines.append(f"{folder}: {complete} of {count} parts are complete{f'; begun: {begun}' if begun else ''}.")
    return lines
