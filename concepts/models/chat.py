"""A chat's messages, and the turns that a model sees in its tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.errors import InputError
from icebear.paths import read_text
from icebear.values import several, text_of

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class Chat:
    """Messages, of which a model's own template makes a prompt.

    A message is a dict with role and content, as transformers takes it; what a model wrote has its token ids as well,
    which are then taken as they are and never tokenised again.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]]) -> None:
        self.messages = tuple(_message(one) for one in several(messages))
        if not self.messages:
            raise InputError("A chat has at least one message; give one with role and content.")

    def __repr__(self) -> str:
        return f"Chat({[dict(message) for message in self.messages]!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and self.messages == other.messages

    def __hash__(self) -> int:
        return hash(json.dumps(self.messages, sort_keys=True))

    def then(self, role: str, content: str, ids: Sequence[int] | None = None) -> Chat:
        """With a message more. ids: its tokens, if a model wrote it."""
        written = {"ids": list(ids)} if ids is not None else {}
        return Chat([*self.messages, {"role": role, "content": content, **written}])

    def asking(self, content: str) -> Chat:
        """With another message in place of the user's last one. Raises `InputError` where there is none."""
        last = max((place for place, one in enumerate(self.messages) if one["role"] == "user"), default=None)
        if last is None:
            raise InputError("The chat has no message of the user that another one could stand for.")
        return Chat([*self.messages[:last], {"role": "user", "content": content}, *self.messages[last + 1 :]])

    @classmethod
    def read(cls, path: str | Path) -> Chat:
        """Of a JSON file: a list of messages, or an object that has one. Raises `InputError`."""
        return cls.from_json(read_text(path), str(path))

    @classmethod
    def from_json(cls, text: str, name: str = "The chat") -> Chat:
        """Of a list of messages, or an object that has one. Raises `InputError`."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name} cannot be read as JSON ({error}); check it.") from None
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list):
            raise InputError(f"{name} must be a JSON list of messages, each with role and content.")
        return cls(messages)

    def to_json(self, indent: int | None = 1) -> str:
        """indent: None for one short line."""
        separators = None if indent else (",", ":")
        return json.dumps(self.messages, ensure_ascii=False, indent=indent, separators=separators)


def _message(given: Any) -> dict[str, Any]:
    named = isinstance(given, Mapping) and isinstance(given.get("role"), str)
    ids = given.get("ids") if named else None
    written = ids is None or (isinstance(ids, list) and all(type(token) is int for token in ids))
    if not named or not isinstance(given.get("content"), str | list) or not written:
        raise InputError("A message has a role and a content, and if a model wrote it ids, a list of its tokens.")
    readable(json.dumps(given, ensure_ascii=False, default=str))
    return dict(given)


def readable(text: str) -> str:
    """The text itself. Raises `InputError` for one that a tokenizer cannot read."""
    try:
        text_of(text).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Character {error.start} of the text is a stray byte; give the text in UTF-8.") from None
    return text


# --- messages as tokens ---------------------------------------------------------------------------------


def rendered(model: Model, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a chat by the model's own template, up to where it answers (or goes on with its answer).

    Raises `InputError` where the template refuses them.
    """
    given = [_message(one) for one in messages]
    texts = [{key: value for key, value in one.items() if key != "ids"} for one in given]
    kept = {place: one["ids"] for place, one in enumerate(given) if one.get("ids")}
    if not kept:
        return _templated(model, texts, tokenize=True)
    written = "".join(str(one["content"]) for one in given)
    sign = next(sign for sign in map(chr, range(0xE000, 0xF900)) if sign not in written)  # private use: in no template
    for place in kept:
        texts[place] = {**texts[place], "content": f"{sign}{place}{sign}"}
    parts = re.split(f"{sign}(\\d+){sign}", _templated(model, texts, tokenize=False))
    ids: list[int] = []
    read = ""
    for text, place in zip(parts[:-1:2], map(int, parts[1::2]), strict=True):
        read += text
        new = text.removesuffix(_unread(model, texts[:place], read))
        ids += [*(model.continuation(new) if ids else model.tokens_of(new)), *kept[place]]
        read += texts[place]["content"]
    return ids + model.continuation(parts[-1])


def _unread(model: Model, before: Sequence[Mapping[str, Any]], read: str) -> str:
    """The spaces that a template writes before an answer which it is given, but not where the model shall answer."""
    if not before or before[-1]["role"] == "assistant":
        return ""
    prompted = _templated(model, before, tokenize=False)
    extra = read.removeprefix(prompted) if read.startswith(prompted) else ""
    return extra if extra.isspace() else ""


def _templated(model: Model, messages: Sequence[Mapping[str, Any]], tokenize: bool) -> Any:
    """Ids, or text."""
    tokenizer = template_of(model)
    answering = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=not answering,
            continue_final_message=answering,
            tokenize=tokenize,
            return_dict=False,
        )
    except Exception as error:  # a template is a program, in transformers' sandbox: it may raise anything
        raise InputError(f"The chat template of {model.name} refuses these messages: {error}") from None


def template_of(model: Model) -> Any:
    """The tokenizer, which has the template. Raises `InputError` where there is none."""
    if not getattr(model.tokenizer, "chat_template", None):
        raise InputError(f"{model.name} has no chat template; give the prompt as one text.")
    return model.tokenizer


# --- tokens as turns ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One message of a chat in its tokens, half open."""

    role: str
    start: int
    """Of the template's own tokens before the message:"""
    first: int
    """Of the message itself, which is read up to before `last`; what is behind is the template's again."""
    last: int
    stop: int


def inside(found: Sequence[Turn]) -> set[int]:
    """The positions of messages, without what the template wrote around them."""
    return {place for turn in found for place in range(turn.first, turn.last)}


def outside(found: Sequence[Turn], count: int) -> tuple[int, ...]:
    """The positions that the template wrote, of so many; none where there is no message."""
    said = inside(found)
    return tuple(place for place in range(count) if place not in said) if found else ()


@dataclass(frozen=True)
class Marks:
    """What a template writes around messages."""

    opens: dict[str, str]
    """With the role that follows."""
    closes: tuple[str, ...]
    follows: str | None
    """The role that begins where a message of the user ends, if nothing opens it."""
    default: str
    """What the template puts in for a system message that is not given."""


def marks_of(tokenizer: Any) -> Marks | None:
    """By messages that cannot be taken for the template; None where there is no template, or none that marks turns."""

    def written(*roles: str) -> list[str] | None:
        """What stands before, between and behind messages of these roles."""
        contents = [f"\ue000{place}\ue001" for place in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        try:
            found = re.split("|".join(contents), tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program, and may refuse these roles
            return None
        return found if len(found) == len(roles) + 1 else None

    if not getattr(tokenizer, "chat_template", None):
        return None
    one, both, three = written("user"), written("user", "assistant"), written("user", "assistant", "user")
    if not (one and both and three):
        return None
    closed, ended = commonprefix([one[1], three[1]]), commonprefix([both[2], three[2]])  # noqa: RUF071
    answering, asking = three[1][len(closed) :], three[2][len(ended) :]
    if not asking.strip():
        return None
    opens, closes, default = {asking: "user"}, [closed, ended], ""
    if answering.strip():
        opens[answering] = "assistant"
    system = written("system", "user")
    if system and system[1].endswith(asking):
        named = asking.replace("user", "system")
        start = system[0].find(named.strip()) if named != asking else len(tokenizer.bos_token or "")
        close = system[1].removesuffix(asking)
        if start >= 0 and system[0][start:].strip() not in ("", asking.strip()):
            opens |= {system[0][start:]: "system"} | ({named: "system"} if named != asking else {})
            closes.append(close)
            default = one[0].partition(named.strip())[2].partition(close.strip())[0].strip()
    follows = None if answering.strip() else "assistant"
    return Marks(opens, tuple(text for text in dict.fromkeys(closes) if text.strip()), follows, default)


def turns(pieces: Sequence[str], marks: Marks) -> tuple[Turn, ...]:
    """The turns in a model's tokens, each with its text, as their template marks them; none in other texts."""
    text, found = "".join(pieces), []
    role, begun, first = None, 0, 0
    for mark in re.finditer(_pattern(marks), text):
        said = mark[0].strip()
        opened = next((role for text, role in marks.opens.items() if text.strip() == said), None)
        if opened is None and role is None:
            continue  # of a message that nothing opened
        if role is not None:
            stop = mark.start() if opened else mark.end()
            if opened is None or mark.start() > first:
                found.append((role, begun, first, mark.start(), stop))
                begun = stop
        role, first = opened, mark.end()
        if opened is None and marks.follows and found[-1][0] == "user":
            role = marks.follows
    if role is not None:
        found.append((role, begun, first, len(text), len(text)))
    ends = list(accumulate(map(len, pieces), initial=0))

    def token(character: int) -> int:
        """Return the first token that begins at a character or contains it."""
        return min(bisect_left(ends, character), bisect_right(ends, character) - 1)

    made = []
    for role, begun, first, last, stop in found:
        if role == "system" and marks.default and text[first:last].strip() == marks.default:
            first = last  # the template's own text is no message
        opened = token(first)
        closed = max(opened, bisect_left(ends, last))
        made.append(Turn(role, token(begun), opened, closed, token(stop) if stop < len(text) else len(pieces)))
    return tuple(made)


def _pattern(marks: Marks) -> str:
    """Match the longest mark first; the spaces around a mark are optional."""

    def loose(mark: str) -> str:
        core = mark.strip()
        before, after = map(re.escape, mark.split(core, 1))
        return f"(?:{before})?{re.escape(core)}(?:{after})?"

    return "|".join(loose(mark) for mark in sorted((*marks.opens, *marks.closes), key=len, reverse=True))


def other_prompt(prompt: Any, text: str | None) -> Any:
    """Another prompt like this one: of a chat, with another message of the user at its end."""
    return prompt.asking(text) if text and isinstance(prompt, Chat) else text
