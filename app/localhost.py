"""Whether a request names this machine. One from a website whose own name points here (DNS rebinding) does not."""

import re

from starlette.datastructures import Headers
from starlette.types import Scope

LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)


def is_local(scope: Scope, host: str = "") -> bool:
    """Return whether a request names this machine as its host, or another one that the user allowed.

    A website can point its own name to 127.0.0.1 (DNS rebinding). Its pages then have the server's origin, and only the
    `Host` header distinguishes them.
    """
    hosts = Headers(scope=scope).getlist("host") if scope["type"] in ("http", "websocket") else ["localhost"]
    if len(hosts) != 1:
        return False
    return bool(LOCAL.fullmatch(hosts[0])) or (bool(host) and hosts[0].partition(":")[0].lower() == host.lower())
