"""Messages between worker and endpoint: a length (4 bytes, big-endian) and msgpack.

The worker sends `Setup` first, the endpoint `Listening`. Token ids are int32, little endian; call
numbers are unique per worker.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.pure.frames import framed, unframed
from dora_pipe.schemas.control import FinishReason

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages."""


class SourceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of some sources (`GroupSpec.source`)."""

    sources: tuple[str, ...]
    task: model.Task
    sampling: model.Sampling
    chat: bool
    """The model has a chat template."""


class Setup(Frame, frozen=True):
    """Configuration; the endpoint ends with `parent_pid`."""

    parent_pid: int
    secret: bytes
    assets: str
    """Tokenizer and chat template."""
    started_ns: int
    """Wall clock of `run started`, used in templates."""
    model: str
    """Name in `GET models`."""
    context_tokens: int
    first_call: int
    sources: tuple[SourceSetup, ...]


class Open(Frame, frozen=True):
    """Start a session, ending an earlier one."""

    request: str
    source: str
    start: int = 0


class Close(Frame, frozen=True):
    """End a session; its calls fail."""

    request: str


class Answer(Frame, frozen=True):
    """Sample of a call."""

    call: int
    token_ids: bytes
    logprobs: tuple[float, ...]
    finish: FinishReason
    prompt_tokens: int


class Refuse(Frame, frozen=True):
    """Rejection of a call."""

    call: int
    status: int
    code: str
    message: str


class Listening(Frame, frozen=True):
    """The endpoint accepts connections."""


class Begun(Frame, frozen=True):
    """A session has started; earlier calls belong to the previous one."""

    request: str


class Asked(Frame, frozen=True):
    """A call."""

    request: str
    call: int
    token_ids: bytes
    max_tokens: int | None
    api: str
    caller: str
    asked: dict[str, Any]
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]


Down = Setup | Open | Close | Answer | Refuse
Up = Listening | Begun | Asked

_ENCODER = msgspec.msgpack.Encoder()
DOWN: Final = msgspec.msgpack.Decoder(Down)
UP: Final = msgspec.msgpack.Decoder(Up)


def pack(frame: Frame) -> bytes:
    """Encode a frame. Raises ValueError if too long."""
    return framed(_ENCODER.encode(frame), FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """Yield bodies as `frames.unframed`."""
    return unframed(buffer, FRAME_BYTES_MAX)


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Encode ids. Raises OverflowError beyond int32."""
    return _little(array("i", token_ids)).tobytes()


def unpacked_ids(data: bytes) -> list[int]:
    """Decode ids."""
    ids = array("i")
    ids.frombytes(data)
    return _little(ids).tolist()


def _little(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
