"""The messages of a chat, their token ids by the model's template, and the turns that tokens contain."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix
from pathlib import Path
from typing import Any

from icebear.errors import InputError
from icebear.models.text.reader import Reader
from icebear.models.text.recorded import recorded, recorded_file
from icebear.paths import read_text
from icebear.result_files import Given, saved_as
from icebear.values import several, text_of


class Chat:
    """Messages that a model's chat template turns into a prompt.

    Parameters
    ----------
    messages
        Dicts with ``role`` and ``content``, as in transformers, or as OpenAI's and Anthropic's interfaces have them. A
        message that a model wrote may have ``ids``, its token ids, which are used as they are, after the tokens that
        the model read before it wrote them. For a model of images and text, one message may have a part ``{"type":
        "image", "path": FILE}``.
    template
        The switches of the model's chat template, such as ``{"enable_thinking": False}`` or ``{"tools": [...]}``.

    Raises
    ------
    InputError
        For no messages, a message without role or content, or a switch that is an argument of `apply_chat_template`.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]], template: Mapping[str, Any] | None = None) -> None:
        self.messages = tuple(_message(message) for message in recorded(several(messages)))
        if not self.messages:
            raise InputError("The chat has no message; give at least one, with role and content.")
        self.template = _switches(template)

    def __repr__(self) -> str:
        template = f", {self.template!r}" if self.template else ""
        return f"Chat({[dict(message) for message in self.messages]!r}{template})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chat) and (self.messages, self.template) == (other.messages, other.template)

    def __hash__(self) -> int:
        return hash(self.to_json(None))

    def of(self, messages: Iterable[Mapping[str, Any]]) -> Chat:
        """Return a chat of other messages with the same switches of the template."""
        return Chat(messages, self.template)

    def then(self, role: str, content: str, ids: Sequence[int] | None = None) -> Chat:
        """Return the chat with one more message. ids: its token ids, if a model wrote it."""
        written = {"ids": list(ids)} if ids is not None else {}
        return self.of([*self.messages, {"role": role, "content": content, **written}])

    def asking(self, content: str) -> Chat:
        """Return the chat with the user's last message replaced. Raises `InputError` if there is none."""
        last = max((index for index, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            raise InputError("The chat has no user message that a counterfactual could replace; add a user message.")
        return self.of([*self.messages[:last], {"role": "user", "content": content}, *self.messages[last + 1 :]])

    @property
    def image(self) -> str | None:
        """The path of the image in the messages, None if there is none. Raises `InputError` for several."""
        paths = [message["image"] for message in self.messages if message.get("image")]
        if len(paths) > 1:
            raise InputError(f"The chat has {len(paths)} images, and icebear explains one; leave the others out.")
        return paths[0] if paths else None

    @property
    def image_turn(self) -> int | None:
        """The index of the message that an image stands in: the one that has it, or the first one of the user."""
        has_image = (turn for turn, message in enumerate(self.messages) if message.get("image"))
        of_user = (turn for turn, message in enumerate(self.messages) if message["role"] == "user")
        return next(has_image, next(of_user, None))

    @classmethod
    def read(cls, path: str | Path) -> Chat:
        """Read a JSON file, see `from_json`. Raises `InputError`."""
        return cls.from_json(read_text(path), str(path))

    @classmethod
    def from_json(cls, text: str, name: str = "The chat") -> Chat:
        """Read a JSON list of messages, or an object with ``messages`` and, if needed, ``template``. Raises
        `InputError`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name} cannot be read as JSON ({error}); check it.") from None
        data = recorded_file(data)
        messages, template = (data.get("messages"), data.get("template")) if isinstance(data, dict) else (data, None)
        if not isinstance(messages, list):
            raise InputError(f"{name} must be a JSON list of messages, each with role and content.")
        return cls(messages, template)

    def to_data(self) -> Any:
        """Return the chat JSON-ready: its messages, or with switches of the template an object of both."""
        messages = [dict(message) for message in self.messages]
        return {"messages": messages, "template": self.template} if self.template else messages

    def to_json(self, indent: int | None = 1) -> str:
        """Return the chat as JSON. indent: None for one line."""
        return json.dumps(self.to_data(), ensure_ascii=False, indent=indent, separators=None if indent else (",", ":"))


def _message(message: Any) -> dict[str, Any]:
    named = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    ids = message.get("ids") if named else None
    valid = ids is None or (isinstance(ids, list) and all(type(token) is int for token in ids))
    parts = message.get("content") if named else None
    calls_tools = named and parts is None and bool(message.get("tool_calls"))
    has_reasoning = named and isinstance(message.get("reasoning_content") or "", str)
    if not named or not valid or not has_reasoning or not (isinstance(parts, str | list) or calls_tools):
        raise InputError(
            "A chat message needs a role and a content, and may have ids, a list of token ids; correct the messages."
        )
    text_of(json.dumps(message, ensure_ascii=False, default=str))
    if not isinstance(parts, list):
        return dict(message)
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    images = [path for part in parts if isinstance(part, Mapping) and (path := _image_path(part))]
    if len(texts) + len(images) != len(parts) or len(images) > 1:
        raise InputError(
            "A chat message has a part that is neither a text nor the path of one image, and icebear reads nothing "
            "else; leave it out."
        )
    return {**message, "content": "\n".join(texts), **({"image": images[0]} if images else {})}


def _image_path(part: Mapping[str, Any]) -> str | None:
    """Return the path in a part that is an image; nothing is downloaded."""
    paths = (part.get(name) for name in ("path", "image", "url"))
    path = next((path for path in paths if isinstance(path, str)), None)
    return path if part.get("type") == "image" and path and not re.match(r"(https?|data):", path) else None


OURS = "conversation messages chat_template add_generation_prompt continue_final_message tokenize return_dict".split()
"""Arguments of `apply_chat_template` that are no switches of a template."""


def _switches(template: Any) -> dict[str, Any]:
    """Return the switches of a template. Raises `InputError`."""
    if template is None:
        return {}
    if not isinstance(template, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in template):
        raise InputError(
            "The switches of a chat template are a mapping of names to values; give one, such as {'a': 1}."
        )
    taken = next((name for name in template if name in OURS), None)
    if taken:
        raise InputError(f"icebear sets {taken} itself, and the template has no such switch; leave it out.")
    return dict(template)


def rendered(model: Reader, chat: Chat) -> list[int]:
    """Return the token ids of a chat by the model's template, up to where the model answers or continues its answer.

    The ids of an answer follow the ids that the model read before it wrote them: a template may write a past answer
    otherwise (without its reasoning, or without what opens it), and that history was never read. Only the text behind
    the last known answer is the template's. Raises `InputError` if the template refuses the messages.
    """
    texts = [{key: value for key, value in message.items() if key != "ids"} for message in chat.messages]
    known = {index: message["ids"] for index, message in enumerate(chat.messages) if message.get("ids")}
    if not known:
        return templated(model, texts, chat.template, tokenize=True)
    parts = _parts(model, chat, texts, known)
    begins = dict(zip(map(int, parts[1::2]), parts[:-1:2], strict=True))
    ids: list[int] = []
    answering = [index for index in known if index and chat.messages[index - 1]["role"] != "assistant"]
    for index in sorted(known)[sorted(known).index(answering[-1]) if answering else 0 :]:
        if index in answering:
            ids = rendered(model, chat.of(chat.messages[:index]))
        else:  # the model was not asked
            ids += model.continuation(begins[index]) if ids else model.tokens_of(begins[index])
        ids += known[index]
    return ids + model.continuation(parts[-1])


def _parts(model: Reader, chat: Chat, texts: list[dict[str, Any]], indices: Iterable[int]) -> list[str]:
    """Return the text before, between and after the contents of some messages, and between them their indices."""
    written = json.dumps(texts, ensure_ascii=False, default=str)
    sign = "\ue000" * (written.count("\ue000") + 1)  # private use: in no template, and longer than in any message
    signed = list(texts)
    for index in indices:
        signed[index] = {**texts[index], "content": f"{sign}{index}{sign}"}
    return re.split(f"{sign}(\\d+){sign}", templated(model, signed, chat.template, tokenize=False))


def templated(
    model: Reader,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any],
    tokenize: bool,
    continues: bool = True,
) -> Any:
    """Return token ids, or text. continues: the model answers the last message, or continues its answer."""
    tokenizer = template_of(model)
    answering = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=continues and not answering,
            continue_final_message=continues and answering,
            tokenize=tokenize,
            return_dict=False,
            **template,
        )
    except Exception as error:  # a template is a program, in transformers' sandbox: it may raise anything
        raise InputError(f"The chat template of {model.name} refuses these messages ({error}); change them.") from None


def template_of(model: Reader) -> Any:
    """Return the tokenizer, which has the chat template. Raises `InputError` if there is none."""
    if not getattr(model.tokenizer, "chat_template", None):
        raise InputError(f"{model.name} has no chat template; give the prompt as one text.")
    return model.tokenizer


@dataclass(frozen=True)
class Turn:
    """The tokens of one message, with the template's tokens around it."""

    role: str
    start: int
    """The first token, which is the template's."""
    text_start: int
    """The first token of the message; `text_stop` is the first one after the message."""
    text_stop: int
    stop: int
    """The first token of the next turn."""


def inside(turns: Sequence[Turn]) -> set[int]:
    """Return the positions of messages, without the template's tokens."""
    return {position for turn in turns for position in range(turn.text_start, turn.text_stop)}


def outside(turns: Sequence[Turn], count: int) -> tuple[int, ...]:
    """Return which of `count` positions the template wrote; none if there is no message."""
    messages = inside(turns)
    return tuple(position for position in range(count) if position not in messages) if turns else ()


def turns_of(model: Reader, chat: Chat, pieces: Sequence[str]) -> tuple[Turn, ...]:
    """Return the turns of a chat that is known, in the texts of its tokens. Special tokens that were typed into a
    message belong to it, while `turns` takes them for the template's."""
    texts = [{key: value for key, value in message.items() if key != "ids"} for message in chat.messages]
    parts = _parts(model, chat, texts, [index for index, message in enumerate(texts) if message["content"]])
    text, ends = "".join(pieces), list(accumulate(map(len, pieces), initial=0))
    result: list[Turn] = []
    at = begun = 0  # the character, and the token, behind the message before
    for before, index in zip(parts[:-1:2], map(int, parts[1::2]), strict=True):
        content = texts[index]["content"].strip()  # as many templates write it
        opened = text.find(before.strip(), at) + len(before.strip())
        start = text.find(content, max(at, opened))
        if start >= 0:
            at = start + len(content)
            first, last = bisect_right(ends, start) - 1, bisect_left(ends, at)
            result.append(Turn(texts[index]["role"], begun, first, last, last))
            begun = last
    return tuple(result)


@dataclass(frozen=True)
class Marks:
    """The text that a template writes around messages."""

    opens: dict[str, str]
    """From the text before a message to the role of the message."""
    closes: tuple[str, ...]
    follows: str | None
    """The role that begins after a message of the user, if no text opens it."""
    default: str
    """The template's own system message."""


def marks_of(tokenizer: Any) -> Marks | None:
    """Find the marks with messages that no template contains; return None without a template or without marks."""

    def written(*roles: str) -> list[str] | None:
        """Return the text before, between and after messages of these roles."""
        contents = [f"\ue000{index}\ue001" for index in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        try:
            parts = re.split("|".join(contents), tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program, and may refuse these roles
            return None
        return parts if len(parts) == len(roles) + 1 else None

    if not getattr(tokenizer, "chat_template", None):
        return None
    user_only, both, three = written("user"), written("user", "assistant"), written("user", "assistant", "user")
    if not (user_only and both and three):
        return None
    closed, ended = commonprefix([user_only[1], three[1]]), commonprefix([both[2], three[2]])  # noqa: RUF071
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
            if close.strip():
                default = user_only[0].partition(named.strip())[2].partition(close.strip())[0].strip()
    follows = None if answering.strip() else "assistant"
    return Marks(opens, tuple(text for text in dict.fromkeys(closes) if text.strip()), follows, default)


def turns(pieces: Sequence[str], marks: Marks) -> tuple[Turn, ...]:
    """Return the turns in the texts of tokens, as a template marks them; none in other texts."""
    text, spans = "".join(pieces), []
    role, begun, text_start = None, 0, 0
    for mark in re.finditer(_pattern(marks), text):
        opened = next((role for text, role in marks.opens.items() if text.strip() == mark[0].strip()), None)
        if opened is None and role is None:
            continue  # it closes a message that nothing opened
        if role is not None:
            stop = mark.start() if opened else mark.end()
            if opened is None or mark.start() > text_start:
                spans.append((role, begun, text_start, mark.start(), stop))
                begun = stop
        role, text_start = opened, mark.end()
        if opened is None and marks.follows and spans[-1][0] == "user":
            role = marks.follows
    if role is not None:
        spans.append((role, begun, text_start, len(text), len(text)))
    ends = list(accumulate(map(len, pieces), initial=0))

    def token(character: int) -> int:
        """Return the first token that begins at a character or contains it."""
        return min(bisect_left(ends, character), bisect_right(ends, character) - 1)

    result = []
    for role, begun, text_start, text_stop, stop in spans:
        if role == "system" and marks.default and text[text_start:text_stop].strip() == marks.default:
            text_start = text_stop  # the template's own text is no message
        start = token(text_start)
        end = max(start, bisect_left(ends, text_stop))
        result.append(Turn(role, token(begun), start, end, token(stop) if stop < len(text) else len(pieces)))
    return tuple(result)


def _pattern(marks: Marks) -> str:
    """Match the longest mark first; the spaces around a mark are optional."""

    def loose(mark: str) -> str:
        core = mark.strip()
        before, after = map(re.escape, mark.split(core, 1))
        return f"(?:{before})?{re.escape(core)}(?:{after})?"

    return "|".join(loose(mark) for mark in sorted((*marks.opens, *marks.closes), key=len, reverse=True))


def other_prompt(prompt: Any, text: str | None) -> Any:
    """Return another prompt: the text, for a chat the chat with the text as the user's last message, or for a pair the
    pair with the text as its first one."""
    if text and isinstance(prompt, tuple):
        return text, prompt[1]
    return prompt.asking(text) if text and isinstance(prompt, Chat) else text


def _read(saved: Any, models: Given) -> Chat:
    """Return what `Chat.to_data` wrote."""
    return Chat(saved["messages"], saved["template"]) if isinstance(saved, dict) else Chat(saved)


saved_as(Chat, Chat.to_data, _read)
