"""What `icebear app` serves: the script beside this file, to requests that name this machine as their host."""

import re
import threading
from importlib import import_module

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from streamlit import config
from streamlit.starlette import App

from icebear.app.localhost import is_local

BELOW_A_VIEW = re.compile(r"/([a-z]+)/[^.]*")
"""Paths at which Streamlit's page finds none of its scripts, and stays white."""
NO_FRAMES = {"X-Frame-Options": "DENY", "Content-Security-Policy": "frame-ancestors 'none'"}


class LocalhostOnly:
    """Refuse requests and WebSockets for another host, and forbid other pages to frame the app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(NO_FRAMES)
            await send(message)

        base = config.get_option("server.baseUrlPath").strip("/")
        base = f"/{base}" * bool(base)
        below = BELOW_A_VIEW.fullmatch(scope.get("path", "").removeprefix(base))
        host = config.get_option("browser.serverAddress")
        if is_local(scope, host):
            if below and "text/html" in Headers(scope=scope).get("accept", ""):
                await RedirectResponse(f"{base}/{below[1]}")(scope, receive, unframed)
                return
            await self.app(scope, receive, unframed)
        elif scope["type"] == "websocket":
            await WebSocketClose(1008)(scope, receive, send)
        else:
            await PlainTextResponse(f"Open the app at {host}.", 403)(scope, receive, unframed)


# The libraries of the first page are imported while the browser starts.
threading.Thread(target=import_module, args=("icebear.actmax.shipped.shipped_index",), daemon=True).start()
app = App("main.py", middleware=[Middleware(LocalhostOnly)])
