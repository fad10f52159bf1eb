"""Recorded conversations: the shapes of common interfaces as messages that chat templates take.

- OpenAI: `tool_calls` whose arguments are JSON in a text, messages of the role ``tool``, the role ``developer``.
- Anthropic: content in blocks ``text``, ``thinking``, ``tool_use`` and ``tool_result``; `system` beside the messages.
- Hugging Face: what templates take, so it stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from icebear.errors import InputError

BLOCKS = ("thinking", "redacted_thinking", "tool_use", "tool_result")
"""Kinds of blocks that only Anthropic's messages have. Redacted reasoning is encrypted, so it is left out."""


def recorded(messages: Iterable[Any]) -> Iterator[Any]:
    """Yield messages of any of the shapes as templates take them. What is no message is yielded as it is."""
    for message in messages:
        if not isinstance(message, Mapping):
            yield message
        elif _has_blocks(message):
            yield from _of_blocks(message)
        elif message.get("tool_calls") or message.get("role") == "developer":
            yield _of_calls(message)
        else:
            yield message


def recorded_file(data: Any) -> Any:
    """Return what a file has as an object of messages and switches of a template; `system` and `tools` beside the
    messages become a message and a switch."""
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        return data
    system, tools, template = data.get("system"), data.get("tools"), data.get("template")
    before = [{"role": "system", "content": system}] if system else []
    switches = {**({"tools": [_tool(tool) for tool in tools]} if isinstance(tools, list) and tools else {})}
    switches |= template if isinstance(template, dict) else {}
    return {"messages": [*before, *data["messages"]], "template": switches if switches else template}


def call_json(call: Mapping[str, Any]) -> str:
    """Return a call of a tool as JSON with its name and arguments."""
    function = call.get("function", call)
    about = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return json.dumps(about, ensure_ascii=False)


def calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls of tools stand in its text, for a template that writes none."""
    calls = [f"<tool_call>{call_json(call)}</tool_call>" for call in message.get("tool_calls") or ()]
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "ids")}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *calls]))} if calls else dict(message)


def _of_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's message: arguments as an object, and the system's role."""
    role = "system" if message.get("role") == "developer" else message.get("role")
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "role": role}
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InputError("The tool_calls of a chat message are a list of objects; correct the messages.")
    content = "" if message.get("content") is None else message["content"]
    return {**message, "role": role, "content": content, "tool_calls": list(map(_call, calls))}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError("A call of a tool needs a function with a name; correct the messages.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the model wrote no JSON, and a template takes a text too
            read = json.loads(arguments or "{}")
            arguments = read if isinstance(read, dict) else arguments
    about = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**about, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _has_blocks(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(_kind(block) in BLOCKS for block in content)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _of_blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield Anthropic's message: results of tools as messages of their own, before the rest."""
    if message.get("tool_calls"):
        raise InputError("A chat message has its calls of tools in blocks or in tool_calls, not in both; correct it.")
    rest = {key: value for key, value in message.items() if key != "content"}
    blocks = message["content"]
    for block in blocks:
        if _kind(block) == "tool_result":
            about = {"tool_call_id": block["tool_use_id"]} if isinstance(block.get("tool_use_id"), str) else {}
            yield {"role": "tool", "content": _text(block.get("content", "")), **about}
    calls = [
        _call({"id": block.get("id"), "name": block.get("name"), "arguments": block.get("input", {})})
        for block in blocks
        if _kind(block) == "tool_use"
    ]
    thoughts = "\n".join(str(block.get("thinking", "")) for block in blocks if _kind(block) == "thinking")
    content = _text([block for block in blocks if _kind(block) not in BLOCKS])
    if content or calls or thoughts:
        extra: dict[str, Any] = {"tool_calls": calls} if calls else {}
        extra |= {"reasoning_content": thoughts} if thoughts else {}
        yield {**rest, "content": content, **extra}


def _text(content: Any) -> str:
    """Return the text of a content. Raises `InputError` for an image or another part that is no text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise InputError("A chat message has a part that is no text, and icebear reads text only; leave it out.")
    return "\n".join(part["text"] for part in parts)


def _tool(tool: Any) -> Any:
    """Return Anthropic's schema of a tool as OpenAI's."""
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        return tool
    about = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": {**about, "parameters": tool["input_schema"]}}
