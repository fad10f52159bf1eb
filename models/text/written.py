"""What a chat template writes for a recorded answer: its reasoning, its text, and its calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any, NamedTuple

from icebear.models.text.chat import Chat, template_of, templated
from icebear.models.text.reader import Reader
from icebear.models.text.recorded import calls_as_text

THINK = "<think>"
THOUGHT = "</think>"
"""Around reasoning, where a template lets the model begin with it."""


class Written(NamedTuple):
    """A recorded answer as the model would have written it."""

    text: str
    calls: tuple[int, ...] = ()
    """The character at which each call of a tool begins."""
    dropped: str = ""
    """The reasoning that the template does not write."""


def written(model: Reader, chat: Chat, turn: int) -> Written:
    """Return what the template writes for an assistant's message with calls of tools or reasoning, without the tokens
    that end it. Calls that it does not write are text. Raises `InputError` if it refuses the messages."""
    before = list(chat.messages[:turn])
    message = {key: value for key, value in chat.messages[turn].items() if key != "ids"}
    calls, reasoning = message.get("tool_calls") or [], (message.get("reasoning_content") or "").strip()
    prompt = templated(model, before, chat.template, tokenize=False)

    def by_template(message: Mapping[str, Any]) -> str:
        """Return what the template writes after the generation prompt; empty if the answer begins otherwise."""
        text = templated(model, [*before, message], chat.template, tokenize=False, continues=False)
        return _without_ending(model, text.removeprefix(prompt)) if text.startswith(prompt) else ""

    text = by_template(message)
    if text and all(call["function"]["name"] in text for call in calls):
        begun = [by_template(_with_calls(message, calls[:count])) for count in range(len(calls))]
        dropped = "" if reasoning in text else reasoning
    else:
        begun = [calls_as_text(_with_calls(message, calls[:count]))["content"] for count in range(len(calls))]
        text, dropped = calls_as_text(message)["content"], reasoning
        if reasoning and prompt.rstrip().endswith(THINK):
            thoughts, dropped = f"{reasoning}\n{THOUGHT}\n\n", ""
            text, begun = thoughts + text, [thoughts + part for part in begun]
    return Written(text, tuple(len(commonprefix([text, part])) for part in begun), dropped)  # noqa: RUF071


def _with_calls(message: Mapping[str, Any], calls: list[Any]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "tool_calls": calls} if calls else rest


def _without_ending(model: Reader, text: str) -> str:
    """Return a text without the tokens that end a message."""
    text = text.rstrip()
    while ending := next((sign for sign in template_of(model).all_special_tokens if text.endswith(sign)), None):
        text = text.removesuffix(ending).rstrip()
    return text
