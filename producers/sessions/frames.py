"""What the worker and its endpoint tell each other: a length (4 bytes, big-endian) and msgpack.

Down: `Setup` first, then sessions that begin and end, and what became of calls. Up: `Listening`
once, then `Asked`. Token ids are int32, little endian, so that neither side makes objects of them
before it needs them. A call has a number that no other call of this worker's has.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.frames import framed, unframed
from dora_pipe.schemas.control import FinishReason

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one frame; a longer one is none that either side writes."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what travels."""


class SourceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How the calls of some sources (`GroupSpec.source`) are read and sampled."""

    sources: tuple[str, ...]
    task: model.Task
    sampling: model.Sampling
    chat: bool
    """The model has a chat template."""


class Setup(Frame, frozen=True):
    """What to serve, and whose death ends it."""

    parent_pid: int
    secret: bytes
    assets: str
    """The directory with the model's tokenizer and chat template."""
    started_ns: int
    """Wall clock of `run started`: what templates take for now."""
    model: str
    """What `GET models` calls the model."""
    context_tokens: int
    first_call: int
    sources: tuple[SourceSetup, ...]


class Open(Frame, frozen=True):
    """A session begins; one that the request has ends."""

    request: str
    source: str
    start: int = 0
    """Of its agent's starts: which."""


class Close(Frame, frozen=True):
    """A session has ended: its open calls, and all later ones, are told so."""

    request: str


class Answer(Frame, frozen=True):
    """What was sampled for a call."""

    call: int
    token_ids: bytes
    logprobs: tuple[float, ...]
    finish: FinishReason
    prompt_tokens: int


class Refuse(Frame, frozen=True):
    """A call that was not taken: an HTTP status, a code, and a sentence."""

    call: int
    status: int
    code: str
    message: str


class Listening(Frame, frozen=True):
    """The endpoint serves."""


class Begun(Frame, frozen=True):
    """A session has begun: what was asked of an earlier one under this name came before."""

    request: str


class Asked(Frame, frozen=True):
    """A call of an open session."""

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
    """The bytes of a frame. Raises ValueError where it is longer than `FRAME_BYTES_MAX`."""
    return framed(_ENCODER.encode(frame), FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """As `frames.unframed`, of frames that are no longer than `FRAME_BYTES_MAX`."""
    return unframed(buffer, FRAME_BYTES_MAX)


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes. Raises OverflowError for what is no int32."""
    return _little(array("i", token_ids)).tobytes()


def unpacked_ids(data: bytes) -> list[int]:
    """Token ids of bytes."""
    found = array("i")
    found.frombytes(data)
    return _little(found).tolist()


def _little(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
