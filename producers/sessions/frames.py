"""Messages between worker and endpoint, and address and key of each session.

A message is a length (4 bytes, big-endian) and msgpack. The worker sends `Setup` first, then both
send the effects and events of `worker.effects`. Call numbers are unique per worker. Keys derive
from a secret of the incarnation, so none is stored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from dora_pipe.config import model
from dora_pipe.core.pure.frames import framed, unframed
from dora_pipe.producers.worker.effects import CallAsked, SessionEffect

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024


class SourceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of some sources (`GroupSpec.source`)."""

    sources: tuple[str, ...]
    task: model.Task
    sampling: model.Sampling
    chat: bool
    """The model has a chat template."""


class EndpointSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of an endpoint."""

    listen: str
    assets: str
    """Tokenizer and chat template."""
    started_ns: int
    """Wall clock of `run started`, used in templates."""
    model: str
    """Name in `GET models`."""
    context_tokens: int
    sources: tuple[SourceSetup, ...]


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame; the endpoint ends with `parent_pid`."""

    parent_pid: int
    secret: bytes
    first_call: int
    endpoint: EndpointSetup


Down = Setup | SessionEffect
Up = CallAsked

_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)
DOWN: Final = msgspec.msgpack.Decoder(Down)
UP: Final = msgspec.msgpack.Decoder(Up)


def pack(frame: Down | Up) -> bytes:
    """Encode a frame. Raises ValueError if too long."""
    return framed(_ENCODER.encode(frame), FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    return unframed(buffer, FRAME_BYTES_MAX)


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
