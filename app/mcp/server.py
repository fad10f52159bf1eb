"""The server itself, over stdio: stdout is the wire, so all other output goes to stderr."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCNotification, ToolAnnotations
from pydantic import ValidationError

from icebear.app.mcp.ledger import note, note_approval
from icebear.app.mcp.plan import FREE, Plan, approved_plan
from icebear.app.mcp.tools import Tools, tool_names
from icebear.app.refusals import one_line
from icebear.app.session import Session
from icebear.errors import InputError, UnknownName
from icebear.values import one_of

ABOUT = """icebear finds the neurons that a language model uses for a prediction, shows what they mean, and steers them.
Begin with explain: it chooses a counterfactual (a prompt of as many tokens whose answer differs) if you give none, and
shows which heads and neurons compute the answer. Then use neuron for what a neuron means, and steer or flip to test
causes. circuit shows how heads and neurons affect each other; sources and what_if measure which text an answer depends
on; attribute and rank list tokens and neurons by relevance. Relevance and similarity are no causes. Each causal answer
has a control: the same done to others, at random. If beyond_chance is false, or others leave as little, the claim is
not supported: say so; if it is null, there were too few others to decide. If you try many neurons, one passes by
chance: say how many you tried. The side effects of edits are changes in unrelated texts."""
PLANNED = """Before any other call, call plan with the question and all calls that you mean to make; the user approves
it in a file. Calls that are not in the plan run too, and the ledger names them as departures: say why you made them."""
READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)


CLOSED_POLL_SECONDS = 1.0
"""Seconds between two looks whether the client still reads."""


class Server(MCPServer):
    """Also answers lines that are no message, and requests whose id is none, which the SDK ignores; refuses unknown
    arguments; reports invalid ones in one line; ends when nobody reads its answers; keeps a ledger."""

    session: Session
    noted: Plan | None = None
    """The approved plan that the ledger has."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        ledger, planned = self.session.ledger, {}
        try:
            planned = self._planned(name, arguments)
            result = await self._call(name, arguments, context)
        except ToolError as error:
            if ledger:
                note(ledger, self.session, name, arguments, error=str(error), **planned)
            raise
        if ledger:
            note(ledger, self.session, name, arguments, answer=result.structured_content, **planned)
        return result

    def _planned(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what the ledger says of a call and the plan, and note a plan that was approved since the last call.

        Raises `ToolError` for a call without an approved plan."""
        session = self.session
        if session.plan is None or name == "plan":
            return {}
        try:
            plan = approved_plan(session.plan)
        except InputError as error:
            if name in FREE:
                return {}
            raise ToolError(str(error)) from None
        if session.ledger and plan != self.noted:
            note_approval(session.ledger, session, plan.to_dict())
            self.noted = plan
        number = plan.number(name, arguments)
        return {} if number is None and name in FREE else {"planned": number}

    async def _call(self, name: str, arguments: dict[str, Any], context: Any) -> Any:
        tool = self._tool_manager.get_tool(name)
        known = tool.parameters["properties"] if tool else arguments
        try:
            for argument in arguments:
                one_of(argument, f"argument of {name}", known)
        except UnknownName as error:
            raise ToolError(str(error)) from None
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if isinstance(error.__cause__, ValidationError):
                raise ToolError(one_line(error.__cause__.errors())) from None
            raise

    async def run_stdio_async(self) -> None:
        async with AsyncExitStack() as stack:
            wire = os.dup(sys.stdout.fileno())  # the SDK points the descriptor at stderr
            received, answers = await stack.enter_async_context(stdio_server())
            forwarded, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            group = await stack.enter_async_context(anyio.create_task_group())

            async def sort() -> None:
                async with forwarded:
                    async for message in received:
                        if isinstance(message, Exception):
                            await answers.send(SessionMessage(_refusal(message)))
                        elif _lacks_id(message):
                            await answers.send(SessionMessage(_invalid("The id of a request is an integer or a text.")))
                        else:
                            await forwarded.send(message)

            group.start_soon(sort)
            group.start_soon(_end_without_reader, wire)
            await self._lowlevel_server.run(messages, answers, self._lowlevel_server.create_initialization_options())
            group.cancel_scope.cancel()


async def _end_without_reader(wire: int) -> None:
    """End the process when nobody reads its answers any more: a thread that waits for stdin cannot be ended."""
    if hasattr(select, "poll"):  # not on Windows
        poll = select.poll()
        poll.register(wire, 0)  # errors and hang-ups only
        while not poll.poll(0):
            await anyio.sleep(CLOSED_POLL_SECONDS)
        os._exit(0)


def _lacks_id(message: SessionMessage) -> bool:
    """Return whether this is a request whose id is neither an integer nor a text: the SDK reads a notification."""
    inner = message.message
    return isinstance(inner, JSONRPCNotification) and not inner.method.startswith("notifications/")


def _refusal(error: Exception) -> JSONRPCError:
    """Return the answer to a line that is no message, with the line's id if it has one."""
    errors = error.errors() if isinstance(error, ValidationError) else []
    message = next((problem["input"] for problem in errors if isinstance(problem["input"], dict)), {})
    if errors and errors[0]["type"] == "json_invalid":
        try:
            message = json.loads(errors[0]["input"])
        except (ValueError, RecursionError):
            return JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=PARSE_ERROR, message="This is not JSON."))
    identity = message.get("id") if isinstance(message, dict) else None
    is_id = isinstance(identity, (int, str)) and not isinstance(identity, bool)
    return _invalid("This is not a JSON-RPC message of Unicode text.", identity if is_id else None)


def _invalid(reason: str, identity: int | str | None = None) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=identity, error=ErrorData(code=INVALID_REQUEST, message=reason))


def server(session: Session) -> MCPServer:
    about = ABOUT if session.plan is None else f"{ABOUT}\n{PLANNED}"
    result = Server("icebear", instructions=about, version=version("icebear"), log_level="WARNING")
    result.session, tools = session, Tools(session)
    for name in tool_names(session):
        annotations = WRITES if name in ("plan", "save") else READS
        result.add_tool(getattr(tools, name), annotations=annotations, structured_output=True)
    return result
