"""Requests from this machine only, also by way of a website: for the app and for `icebear serve`."""

import re

from starlette.datastructures import Headers
from starlette.types import Scope

LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)


def is_local(scope: Scope) -> bool:
    """Return whether a request names this machine as its host.

    A website can point its own name to 127.0.0.1 (DNS rebinding). Its pages then have the server's origin, and only the
    `Host` header distinguishes them.
    """
    hosts = Headers(scope=scope).getlist("host") if scope["type"] in ("http", "websocket") else ["localhost"]
    return len(hosts) == 1 and bool(LOCAL.fullmatch(hosts[0]))
