"""Split a text into sentences, list items, table rows, lines of code and members of JSON, which can be removed from it.

1. A text that is JSON is split into its members: `"key": value` of an object, elements of an array. A member that has
   members is split itself; a string with several sentences is split into these.
2. Any other text is read line by line. Lines of a fenced block are code. A list item has the indented lines below it.
   A row of a Markdown table is a part; its header and the line below it belong to no part.
3. Other lines are paragraphs between empty lines. A paragraph of wrapped prose is split into sentences; of any other,
   such as a log, each line is split by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from icebear.errors import need
from icebear.values import one_of

Bounds = tuple[int, int]
"""Characters [start, stop) of a text."""
UNITS = ("sentence", "message", "document")
"""What a text is split into; ``document``: parts between empty lines, or the elements of the outermost JSON array."""

FENCE = re.compile(r"\s*(?:```|~~~)")
LIST_ITEM = re.compile(r"(\s*)(?:[-*+\u2022]|\d{1,3}[.)])\s+\S")
ROW = re.compile(r"\s*\|.*\|\s*$")
RULE = re.compile(r"[\s|:-]*$")
"""The line below the header of a table."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
WRAPPED_WIDTH = 50
"""The fewest characters of a line of wrapped prose, apart from the last."""
PROSE = 0.93
"""The smallest share of letters, spaces and punctuation of wrapped prose."""


def bounds_of(text: str, by: str = "sentence") -> list[Bounds]:
    """Return the parts of a text, in order. A part has the white space after it; what is in no part stays.

    by: ``sentence``, ``message`` or ``document``.
    """
    one_of(by, "unit", UNITS)
    if by == "message":
        return [(0, len(text))] if text.strip() else []
    if is_json(text):
        return [(start, _after_comma(text, stop)) for start, stop in _members(text, by)]
    if by == "document":
        return [match.span() for match in re.finditer(r"(?s)\S.*?(?:\n\s*\n|\Z)", text)]
    return [(start, _after_empty_lines(text, stop)) for start, stop in _of_lines(text)]


def removed(text: str, parts: Sequence[Bounds]) -> str:
    """Return a text without some of its parts. JSON stays JSON: no comma is left before a bracket."""
    starts, stops = zip(*sorted(parts), strict=True) if parts else ((), ())
    rest = "".join(text[start:stop] for start, stop in zip((0, *stops), (*starts, len(text)), strict=True))
    if parts and is_json(text):
        return re.sub(rf"({STRING.pattern})|,(\s*[}}\]])", lambda match: match[1] or match[2], rest)
    return rest


def covering(text: str) -> list[str]:
    """Return a text as its sentences and other parts, joined without gaps; white space before the first is a part."""
    starts = [start for start, _ in bounds_of(text)]
    return [text[start:stop] for start, stop in pairwise([0, *starts, len(text)]) if start < stop]


def is_json(text: str) -> bool:
    """Return whether a text is a JSON object or array with members."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        return bool(json.loads(text))
    except (ValueError, RecursionError):
        return False


# --- JSON -----------------------------------------------------------------------------------------------


def _members(text: str, by: str) -> Iterator[Bounds]:
    """Yield the members of JSON without the commas between them."""
    members = list(_inside(text, _skip(text, 0)))
    while by == "document" and len(members) == 1 and text[members[0][1]] in "{[":
        members = list(_inside(text, members[0][1]))
    for start, value, stop in members:
        if by == "sentence" and text[value] in "{[" and list(_inside(text, value)):
            yield from ((value + begin, value + end) for begin, end in _members(text[value:stop], by))
        elif by == "sentence" and text[value] == '"' and len(parts := _of_string(text, value, stop)) > 1:
            yield from parts
        else:
            yield start, stop


def _inside(text: str, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, start of the value, stop) of each member of the object or array that begins at a character."""
    closing = {"{": "}", "[": "]"}[text[at]]
    is_object, at = text[at] == "{", _skip(text, at + 1)
    while text[at] != closing:
        start = value = at
        if is_object:
            value = _skip(text, _skip(text, STRING.match(text, at).end()) + 1)  # type: ignore[union-attr]
        _, stop = json.JSONDecoder().raw_decode(text, value)
        yield start, value, stop
        at = _skip(text, stop)
        at = _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    """Return the first character from `at` on that is no white space."""
    return re.compile(r"\s*").match(text, at).end()  # type: ignore[union-attr]


def _after_comma(text: str, stop: int) -> int:
    """Return where a member ends with the comma and the white space after it."""
    after = _skip(text, stop)
    return _skip(text, after + 1) if text[after : after + 1] == "," else stop


def _of_string(text: str, start: int, stop: int) -> list[Bounds]:
    """Return the sentences inside of a JSON string; an escaped line break ends a line."""
    inner = re.sub(r"\\(.)", lambda escaped: " \n" if escaped[1] == "n" else escaped[0], text[start + 1 : stop - 1])
    return [(start + 1 + begin, start + 1 + end) for begin, end in _of_lines(inner)]


# --- lines ----------------------------------------------------------------------------------------------


def _of_lines(text: str) -> Iterator[Bounds]:
    """Yield the parts of a text that is not JSON."""
    lines = _lines(text)
    at = 0
    while at < len(lines):
        kind, stop = _block(text, lines, at)
        block = lines[at:stop]
        if kind == "paragraph":
            yield from _paragraph(text, block)
        elif kind == "item":
            yield block[0][0], block[-1][1]
        elif kind == "table":
            yield from block[2:] if len(block) > 1 and RULE.match(text[slice(*block[1])]) else block
        elif kind == "code":
            yield from (line for line in block if text[slice(*line)].strip() and not FENCE.match(text, *line))
        at = stop


def _lines(text: str) -> list[Bounds]:
    ends = [match.end() for match in re.finditer(r"\n", text)]
    ends += [len(text)] if text and not text.endswith("\n") else []
    return list(zip([0, *ends], ends, strict=False))


def _block(text: str, lines: Sequence[Bounds], at: int) -> tuple[str, int]:
    """Return the kind of the block that begins with a line, and the line behind it."""
    kind, stop = _kind(text, lines[at]), at + 1
    if kind == "code":
        closing = (number for number in range(stop, len(lines)) if FENCE.match(text, *lines[number]))
        return kind, next(closing, len(lines) - 1) + 1
    indent = _indent(text, lines[at])
    while kind != "empty" and stop < len(lines):
        next_kind = _kind(text, lines[stop])
        below = next_kind == "paragraph" and _indent(text, lines[stop]) > indent
        if not (below if kind == "item" else next_kind == kind):
            break
        stop += 1
    return kind, stop


def _kind(text: str, line: Bounds) -> str:
    written = text[slice(*line)]
    if not written.strip():
        return "empty"
    kinds = {"code": FENCE, "table": ROW, "item": LIST_ITEM}
    return next((kind for kind, pattern in kinds.items() if pattern.match(written)), "paragraph")


def _indent(text: str, line: Bounds) -> int:
    return _skip(text, line[0]) - line[0]


def _after_empty_lines(text: str, stop: int) -> int:
    """Return where a part ends with the empty lines after it."""
    return re.compile(r"(?:[ \t]*\n)*").match(text, stop).end()  # type: ignore[union-attr]


def _paragraph(text: str, lines: Sequence[Bounds]) -> Iterator[Bounds]:
    """Yield the sentences of a paragraph with the white space after them."""
    blocks = [(lines[0][0], lines[-1][1])] if _is_wrapped([text[slice(*line)] for line in lines]) else lines
    for start, stop in blocks:
        for sentence in _sentences(text[start:stop]):
            end = start + len(sentence)
            if sentence.strip():
                yield start, end
            start = end


def _is_wrapped(lines: Sequence[str]) -> bool:
    """Return whether the lines are prose that was wrapped at a width."""
    written = "".join(lines)
    plain = sum(sign.isalpha() or sign.isspace() or sign in ".,;:'\"!?()-" for sign in written) / len(written)
    return all(len(line.rstrip()) >= WRAPPED_WIDTH for line in lines[:-1]) and plain >= PROSE


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text with their trailing white space."""
    need("index")
    from sentencex import segment

    sentences: list[str] = []
    for part in segment("en", text):
        if sentences and not part.strip():
            sentences[-1] += part
        else:
            sentences.append(part)
    return sentences
