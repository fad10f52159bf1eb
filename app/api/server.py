"""The server itself: one request at a time on the one model, a queue with a limit, errors as JSON."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from icebear.app.api.calls import CALLS, Call, Document, capabilities, check_model
from icebear.app.api.schemas import LIMITS, ModelRequest, Refusal
from icebear.app.base_path import BasePath
from icebear.app.localhost import is_local
from icebear.app.refusals import one_line, with_arguments
from icebear.app.session import Session
from icebear.concepts.passes.run import Checked
from icebear.errors import NumericalError, known_error
from icebear.points import model_id

NO_BASE = BasePath()
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Refusal, "description": "The request cannot be answered"},
    413: {"model": Refusal, "description": "The body is too large"},
    429: {"model": Refusal, "description": "Too many requests wait"},
    503: {"model": Refusal, "description": "The request took too long"},
}
ABOUT = (
    "The calls of Neuronpedia's inference API that neurons can answer, with the fields of its version 1.10, and "
    "`/v1/stages`. Names are in camelCase and in snake_case; a request may use either."
)
CLIENT_GONE = 499
"""As nginx has it; nobody reads this answer."""
CAPITAL = re.compile(r"(?<=[a-z])([A-Z])")


class Guard:
    """Refuse requests for another host, and bodies over the limit while they are received."""

    def __init__(self, app: ASGIApp, host: str = "") -> None:
        """host: another host that is answered."""
        self.app, self.host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LIMITS.body:
                raise HTTPException(413, f"The body is longer than {LIMITS.body:,} bytes; shorten it.")
            return message

        if is_local(scope, self.host):
            await self.app(scope, counted, send)
        else:
            answered = "http://localhost" + f" and {self.host}" * bool(self.host)
            await refusal(403, f"This server answers {answered} only.")(scope, receive, send)


def refusal(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, status)


class Queue:
    """Lets requests wait for the session's model, up to a limit."""

    def __init__(self, session: Session) -> None:
        self.session, self.waiting = session, 0

    async def answer(self, call: Call, request: ModelRequest, http: Request) -> Response:
        if self.waiting >= (1 if getattr(request, "fail_if_busy", False) else LIMITS.waiting):
            return refusal(429, "Too many requests wait; try again later.")
        self.waiting += 1
        try:
            return await _while_connected(http, partial(self._alone, call, request))
        finally:
            self.waiting -= 1

    async def _alone(self, call: Call, request: ModelRequest) -> Response:
        try:
            return await self.session.run_exclusively(partial(self._respond, call, request), LIMITS.seconds)
        except TimeoutError:
            return refusal(503, f"The request took longer than {LIMITS.seconds:.0f} s; shorten it.")

    def _respond(self, call: Call, request: ModelRequest) -> Response:
        try:
            with Checked(anyio.from_thread.check_cancelled):
                check_model(self.session.model, request.model)
                return _written(call(self.session.model, request), getattr(request, "stream", False))
        except Exception as error:
            known = known_error(error)
            if known is None:
                raise
            return refusal(400, with_arguments(str(known), type(request).model_fields))


async def _while_connected(http: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """Return what the work does, which is cancelled, also while it waits, when the client goes."""
    response: Response = refusal(CLIENT_GONE, "The client did not wait for the answer.")
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            response = await work()
        except Exception as error:  # the group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure:
        raise failure
    return response


def both_cases(value: Any) -> Any:
    """Return an answer that also has its names in snake_case: Neuronpedia's page reads camelCase, its Python client
    reads and writes snake_case."""
    if isinstance(value, list):
        return [both_cases(row) for row in value] if value and isinstance(value[0], dict) else value
    if not isinstance(value, dict):
        return value
    rows = {name: both_cases(row) for name, row in value.items()}
    return rows | {CAPITAL.sub(lambda match: f"_{match[1].lower()}", name): row for name, row in rows.items()}


def _written(answer: Document, as_lines: bool) -> Response:
    """Return an answer as JSON, or its messages as lines of JSON. Raises `NumericalError` for NaN and infinity."""
    try:
        if not as_lines:
            return Response(json.dumps(both_cases(answer), allow_nan=False), media_type="application/json")
        messages = [answer["meta"], *answer["tokens"], answer["done"]]
        lines = "".join(f"{json.dumps(message, allow_nan=False)}\n" for message in messages)
        return Response(lines, media_type="application/x-ndjson")
    except ValueError:
        raise NumericalError("A number of the result is NaN or infinite; try --dtype float32.") from None


def server(session: Session, base: BasePath = NO_BASE) -> FastAPI:
    """Return the application. It has no pages of documentation: those of FastAPI are read from the web."""
    app = FastAPI(
        title="icebear",
        version=version("icebear"),
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
    )
    queue = Queue(session)
    for path, (call, request) in CALLS.items():
        summary, name = inspect.getdoc(call), path.removeprefix("/v1/").replace("/", "-")
        app.post(path, description=summary, operation_id=name)(_endpoint(queue, call, request))

    @app.get("/v1/capabilities", description=inspect.getdoc(capabilities), operation_id="capabilities")
    async def capabilities_call() -> Document:
        return capabilities(session.model)

    @app.get("/", operation_id="served")
    @app.get("/v1", operation_id="served-v1")
    async def served() -> Document:
        """Return what is served: each path, with its method and what it returns."""
        rows = app.openapi()["paths"].items()
        paths = {path: {way.upper(): call["description"] for way, call in calls.items()} for path, calls in rows}
        return {"icebear": version("icebear"), "model": model_id(session.model.name), "paths": paths}

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return refusal(400, one_line(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        logging.getLogger("icebear.api").error("A request failed.", exc_info=error)
        return refusal(500, f"This request failed ({type(error).__name__}); please report it.")

    app.add_middleware(Guard, host=base.host)
    if not base.path:
        return app
    below = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    below.mount(base.path, app)
    return below


def _endpoint(queue: Queue, call: Call, kind: type[ModelRequest]) -> Callable[..., Any]:
    """Return a function whose annotations FastAPI reads: the body of the request is of this kind."""

    async def endpoint(body: Any, http: Request) -> Response:
        return await queue.answer(call, body, http)

    endpoint.__annotations__["body"] = kind
    return endpoint
