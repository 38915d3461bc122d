"""Address and key of each session.

Keys derive from a secret of the incarnation, so none is stored.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final, Literal

SECRET_BYTES: Final = 32
_PREFIX: Final = "dora-"

Checked = Literal["mine", "other", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """Address and key for an agent."""

    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses of one incarnation."""

    host: str
    port: int
    secret: bytes

    def of(self, request: str) -> SessionAddress:
        name = session_name(request)
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{host}:{self.port}/s/{name}/v1"
        return SessionAddress(base_url=url, api_key=key_of(self.secret, name))


def session_name(request: str) -> str:
    """Return the path segment of an attempt; late calls of earlier ones have another."""
    return request.replace("/", ".")


def key_of(secret: bytes, name: str) -> str:
    mac = hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()
    return f"{_PREFIX}{name}-{mac}"


def check_key(secret: bytes, name: str, key: str) -> Checked:
    """Return whether a key is this session's, another's, or invalid."""
    owner = key.removeprefix(_PREFIX).rpartition("-")[0]
    if not hmac.compare_digest(key_of(secret, owner).encode(), key.encode()):
        return "wrong"
    return "mine" if owner == name else "other"
