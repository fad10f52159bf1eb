"""Requests from this machine only, also by way of a website: for the app and for `icebear serve`; and the base path
below which a proxy of this machine reaches them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from icebear.errors import InputError
from icebear.values import shown

LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
_PATH = re.compile(r"(/[\w.~@%-]+)*", re.ASCII)


@dataclass(frozen=True)
class Base:
    """Where a proxy serves the app: below a path, and at a host whose name requests may have."""

    path: str = ""
    """Empty, or with a slash at its begin only."""
    host: str = ""
    """Empty for this machine only."""

    @classmethod
    def parse(cls, text: str) -> Base:
        """Read a path such as /user/me/proxy/absolute/8501, or an address such as https://hub.example.org/user/me.

        Raises `InputError` for any other text.
        """
        try:
            parts = urlsplit(text)
        except ValueError:  # a bracket without its partner
            parts = urlsplit("")
        path, host = parts.path.rstrip("/"), parts.netloc.rpartition(":")[0] or parts.netloc
        is_address = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(host))
        is_path = text[:1] == "/" and not parts.netloc
        dots = {".", ".."} & set(path.split("/"))
        if {"?", "#"} & set(text) or dots or not (_PATH.fullmatch(path) and (is_address or is_path)):
            raise InputError(
                f"{shown(text)} is not a base path; give one such as /user/me/proxy/absolute/8501, or the address of "
                "the proxy, such as https://hub.example.org/user/me/proxy/absolute/8501."
            )
        return cls(path, host if is_address else "")


def is_local(scope: Scope, host: str = "") -> bool:
    """Return whether a request names this machine as its host, or another one that the user allowed.

    A website can point its own name to 127.0.0.1 (DNS rebinding). Its pages then have the server's origin, and only the
    `Host` header distinguishes them.
    """
    hosts = Headers(scope=scope).getlist("host") if scope["type"] in ("http", "websocket") else ["localhost"]
    if len(hosts) != 1:
        return False
    return bool(LOCAL.fullmatch(hosts[0])) or (bool(host) and hosts[0].partition(":")[0].lower() == host.lower())
