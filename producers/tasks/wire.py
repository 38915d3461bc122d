"""The frames between a task pool and its processes; decides only their form.

A frame is its length (4 bytes, big-endian) and JSON. Down the pipe: `Setup`, then calls. Up:
`Hello` or `Refused`, then exactly one answer per call, in order. `End` has no answer. An episode
is known by the number of the call that started it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dora_pipe.config import model
from dora_pipe.producers.tasks.port import Split

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""A longer frame is no text that a model or environment wrote."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what travels."""


class Setup(Frame, frozen=True):
    """The first frame: what to serve, and whose death ends it."""

    task: model.Task
    parent_pid: int


class Prompt(Frame, frozen=True):
    """See `PromptCall`."""

    number: int
    split: Split
    index: int


class Step(Frame, frozen=True):
    """See `EnvStep`."""

    number: int
    episode: int
    text: str


class Score(Frame, frozen=True):
    """See `RewardCall`. With an episode its environment is asked first, and closed."""

    number: int
    episode: int | None
    split: Split
    index: int
    text: str
    turns: tuple[str, ...]


class End(Frame, frozen=True):
    """Close an episode; unknown ones are ignored."""

    episode: int


Call = Prompt | Step | Score
Down = Setup | Prompt | Step | Score | End


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a task brings; equal in every process of a run. Digests are hex sha256."""

    train_digest: str
    train_rows: int
    eval_digest: str
    eval_rows: int
    reward_digest: str
    """Empty where the source cannot be known."""
    single_turn: bool = True
    """No prompt has an environment."""


class Hello(Frame, frozen=True):
    """The task is open."""

    facts: Facts


class Refused(Frame, frozen=True):
    """The task cannot be opened."""

    message: str
    hint: str | None
    config: bool
    """Whether it is the configuration's fault."""


class Prompted(Frame, frozen=True):
    """See `PromptReady`."""

    number: int
    text: str
    episode: bool


class Observed(Frame, frozen=True):
    """See `EnvObserved`."""

    number: int
    text: str
    done: bool
    tool: str
    ok: bool


class Scored(Frame, frozen=True):
    """See `Rewarded`."""

    number: int
    reward: float
    raw: float | None
    parts: dict[str, float]


class Failed(Frame, frozen=True):
    """See `TaskFailed`."""

    number: int
    error: str
    message: str


Answer = Prompted | Observed | Scored | Failed
Up = Hello | Refused | Prompted | Observed | Scored | Failed

_ENCODER = msgspec.json.Encoder()
DOWN = msgspec.json.Decoder(Down)
UP = msgspec.json.Decoder(Up)


def pack(frame: Frame) -> bytes:
    """The bytes of a frame. Raises ValueError where it is longer than `FRAME_BYTES_MAX`."""
    body = _ENCODER.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"{len(body)} bytes of text, above the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames off the front of `buffer`; a torn one stays.

    Raises ValueError for a length that no frame has: then the stream is lost.
    """
    at = 0
    try:
        while len(buffer) - at >= LENGTH_BYTES:
            start = at + LENGTH_BYTES
            size = int.from_bytes(buffer[at:start], "big")
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes")
            if len(buffer) < start + size:
                break
            at = start + size
            yield bytes(buffer[start:at])
    finally:
        del buffer[:at]
