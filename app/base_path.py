"""The base path below which a proxy of this machine serves the app and `icebear serve`; imports no optional package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from icebear.errors import InputError
from icebear.values import shown

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)
_PATH = re.compile(r"(/[\w.~@-]+)*")


@dataclass(frozen=True)
class BasePath:
    """Where a proxy serves the app: below a path, and at a host whose name requests may have."""

    path: str = ""
    """Empty, or with a slash at its beginning only. Decoded, as servers compare it with that of a request."""
    host: str = ""
    """Empty for this machine only."""

    @classmethod
    def parse(cls, text: str) -> BasePath:
        """Read a path such as /user/me/proxy/absolute/8501, or an address such as https://hub.example.org/user/me.

        Raises `InputError` for any other text.
        """
        try:
            parts = urlsplit(text)
        except ValueError:  # a bracket without its partner
            parts = urlsplit("")
        path, host = unquote(parts.path).rstrip("/"), parts.netloc.rpartition(":")[0] or parts.netloc
        is_address = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(host))
        is_path = text[:1] == "/" and not parts.netloc
        dots = {".", ".."} & set(path.split("/"))
        if {"?", "#"} & set(text) or dots or not (_PATH.fullmatch(path) and (is_address or is_path)):
            raise InputError(
                f"{shown(text)} is not a base path; give one such as /user/me/proxy/absolute/8501, or the address of "
                "the proxy, such as https://hub.example.org/user/me/proxy/absolute/8501."
            )
        return cls(path, host if is_address else "")

    @property
    def quoted(self) -> str:
        """The path as it is in an address."""
        return quote(self.path)
