"""Messages between worker and endpoint: a length (4 bytes, big-endian) and msgpack.

The worker sends `Setup` first, then both send the effects and events of `worker.effects`. Call
numbers are unique per worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

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


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session has started; earlier calls belong to the previous one."""

    request: str


Down = Setup | SessionEffect
Up = Begun | CallAsked

_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)
DOWN: Final = msgspec.msgpack.Decoder(Down)
UP: Final = msgspec.msgpack.Decoder(Up)


def pack(frame: Down | Up) -> bytes:
    """Encode a frame. Raises ValueError if too long."""
    return framed(_ENCODER.encode(frame), FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    return unframed(buffer, FRAME_BYTES_MAX)
