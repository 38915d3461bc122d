"""Other processes that read the trajectories topic and gather evidence; decides who reads what.

Each helper reads some of the partitions and writes frames to its standard output: a length, then
MessagePack. A helper that is ahead waits until its pipe is read, so that nothing piles up.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Final

import msgspec

from dora_pipe.audit.evidence import Evidence
from dora_pipe.audit.gathering import OwnReader
from dora_pipe.audit.reading import EMPTY_POLLS_MAX, gc_paused, wait_after
from dora_pipe.bus.port import Bus
from dora_pipe.core.errors import BusError, DoraError

HELPERS_MAX: Final = 8

RECORDS_MIN: Final = 4000
"""Fewer records are read before a helper would have started."""

PIPE_BYTES: Final = 1 << 20
FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
_HEAD: Final = struct.Struct("<I")
_SET_PIPE_SIZE: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a helper is asked for."""

    topic: str
    positions: dict[int, int]
    ends: dict[int, int]
    opened: bool


Start = Callable[[Request], int]
"""Begins a helper and gives the end of the pipe that it writes to, a file descriptor.

It belongs to the caller; the helper ends when it is closed. Raises ResourceError.
"""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What a helper has read; with `error`, its last word."""

    positions: dict[int, int]
    pieces: list[Evidence]
    error: str = ""


def helpers_for(records: int, partitions: int) -> int:
    """How many helpers are worth their start; 0 for a short log or a machine of one core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if records < RECORDS_MIN or cores < 2:
        return 0
    return min(cores, partitions, HELPERS_MAX)


def serve(bus: Bus, request: Request, out: IO[bytes]) -> None:
    """Be a helper: read to the ends and write frames; what goes wrong is the last frame."""
    with gc_paused():
        _serve(bus, request, out)


def _serve(bus: Bus, request: Request, out: IO[bytes]) -> None:
    encode = msgspec.msgpack.Encoder().encode
    reader = OwnReader(bus, request.topic, request.positions, opened=request.opened)
    at, empty = dict(request.positions), 0
    try:
        while any(at[one] < request.ends[one] for one in at):
            pieces = reader.poll(next(iter(at)), wait_after(empty))
            before, at = at, {one: reader.position(one) for one in at}
            empty = 0 if pieces or before != at else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"{request.topic} gives no more records before its end")
            if pieces or before != at:
                _write(out, encode(Frame(at, pieces)))
    except DoraError as error:
        _write(out, encode(Frame(at, [], error.message)))
    finally:
        reader.close()


def _write(out: IO[bytes], data: bytes) -> None:
    out.write(_HEAD.pack(len(data)))
    out.write(data)
    out.flush()


class Helpers:
    """A `Source` of what other processes read."""

    def __init__(
        self,
        start: Start,
        topic: str,
        positions: Mapping[int, int],
        ends: Mapping[int, int],
        *,
        count: int,
        opened: bool = True,
    ) -> None:
        shares = [sorted(positions)[place::count] for place in range(count)]
        self._owners: dict[int, _Helper] = {}
        self._helpers: list[_Helper] = []
        for share in shares:
            if share:
                request = Request(
                    topic=topic,
                    positions={one: positions[one] for one in share},
                    ends={one: ends[one] for one in share},
                    opened=opened,
                )
                helper = _Helper(start, request)
                self._helpers.append(helper)
                self._owners.update(dict.fromkeys(share, helper))

    def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
        """The next evidence of whoever reads this partition. Raises BusError."""
        return self._owners[partition].poll(timeout_s)

    def position(self, partition: int) -> int:
        """Evidence below was given."""
        return self._owners[partition].at[partition]

    def close(self) -> None:
        """End the helpers."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []


class _Helper:
    def __init__(self, start: Start, request: Request) -> None:
        self.at = dict(request.positions)
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._out = os.fdopen(start(request), "rb", buffering=0)
        if _SET_PIPE_SIZE is not None:
            with suppress(OSError):
                fcntl.fcntl(self._out, _SET_PIPE_SIZE, PIPE_BYTES)

    def poll(self, timeout_s: float) -> list[Evidence]:
        """One frame, if one begins to come in time."""
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        if not ready:
            return []
        frame = self._frame()
        if frame.error:
            raise BusError(frame.error)
        self.at = frame.positions
        return frame.pieces

    def _frame(self) -> Frame:
        (size,) = _HEAD.unpack(self._read(_HEAD.size))
        if size > FRAME_BYTES_MAX:
            raise BusError("a process that helps audit wrote nonsense")
        try:
            return self._decoder.decode(self._read(size))
        except msgspec.MsgspecError as error:
            raise BusError(f"a process that helps audit wrote nonsense: {error}") from None

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            read = self._out.readinto(left)
            if not read:
                raise BusError("a process that helps audit ended before its work was done")
            left = left[read:]
        return data

    def close(self) -> None:
        """The process ends at its next write."""
        self._out.close()
