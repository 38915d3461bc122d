"""What a record of the trajectories topic says by itself, before anybody asks what was dispatched,
and who brings it: this process, or others that help.

Evidence is a function of the record alone: it can be gathered by other processes, in any order, and
is small however long the trajectory is. `check_records` holds it against the ledger. What was read
and not asked for yet waits: records that nobody has named so far, or whose group is open. Beyond
`WAITING_MAX` the oldest wait on the disk, where there is one.

Each helper reads some of the partitions and writes frames to its standard output: a length, then
MessagePack. A helper that is ahead waits until its pipe is read, so that nothing piles up.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Final, Protocol, cast

import msgspec

from dora_pipe.audit.reading import gc_paused
from dora_pipe.bus.base import EMPTY_POLLS_MAX, wait_after
from dora_pipe.bus.claim_check import lost_claim
from dora_pipe.bus.logged import record_digest
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.core.errors import BusError, DoraError, SchemaError
from dora_pipe.schemas.contexts import call_fault
from dora_pipe.schemas.control import (
    FinishReason,
    parts_in_control,
)
from dora_pipe.schemas.headers import matches, parse_headers
from dora_pipe.schemas.trajectory import Described, Headers, Sampler, Segment
from dora_pipe.schemas.trajectory_codec import decode_trajectory, view_trajectory

Place = tuple[int, int]
"""Partition and offset."""


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the value says, as far as control says it too; of a value that holds in itself."""

    group_size: int
    sibling: int
    source: str
    task: str
    dataset_digest: str
    index: int
    data_epoch: int
    seed: int
    finish: FinishReason
    version: int
    sampled: tuple[Segment, ...]
    weights: tuple[Sampler, ...]
    answer: str = ""
    parts: dict[str, float] = {}
    """Those that control repeats."""
    contexts: int = 1
    calls: int = 0
    fault: str = ""
    """Why its calls do not follow from its tokens; empty where they do, or there are none."""
    mixture: tuple[int, int, int] | None = None
    """Experts, layers that have some, and experts for a token, where it says through which ones its
    tokens went."""
    """As control repeats it."""

    @property
    def versions(self) -> list[int]:
        """The version of everything that was sampled, in order."""
        return [one.version for one in self.sampled]


class Evidence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record: where it lies, its digest, and what headers and value say."""

    topic: str
    partition: int
    offset: int
    bytes: int
    sha256: str
    """Of the value as it lies in the log."""
    headers: Headers | None
    header_error: str = ""
    """Why the headers cannot be read."""
    content: Content | None = None
    """None where the value cannot be read, or was not opened."""
    value_error: str = ""
    disagree: tuple[str, ...] = ()
    """Header fields that the value contradicts."""
    lost: str = ""
    """Why the value, which lay beside the log, is not there: its claim by digest."""
    other_key: str = ""
    """The record's key, where it is not its group's id."""

    @property
    def place(self) -> Place:
        """Partition and offset."""
        return self.partition, self.offset

    @property
    def where(self) -> str:
        """The same for people."""
        return f"trajectories:{self.partition}:{self.offset}"


def evidence_of(record: Record, *, opened: bool) -> Evidence:
    """Look at one record; if `opened`, read and check its value, too."""
    headers, header_error = None, ""
    try:
        headers = parse_headers(record.headers)
    except SchemaError as error:
        header_error = error.message
    content: Content | None = None
    value_error, disagree = "", cast("tuple[str, ...]", ())
    lost = lost_claim(record)
    if opened and headers is not None and not lost:
        content, value_error, disagree = _open(record.value, headers)
    return Evidence(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        bytes=len(record.value),
        sha256=record_digest(record),
        headers=headers,
        header_error=header_error,
        content=content,
        value_error=value_error,
        disagree=disagree,
        lost=lost,
        other_key=_other_key(record, headers),
    )


def _other_key(record: Record, headers: Headers | None) -> str:
    if headers is None or record.key == headers.group.encode():
        return ""
    return repr(record.key)


def _open(value: bytes, headers: Headers) -> tuple[Content | None, str, tuple[str, ...]]:
    try:
        seen = view_trajectory(value)
    except SchemaError as error:
        return None, error.message, ()
    fault = call_fault(decode_trajectory(value)) if seen.meta.calls else ""
    return _content(seen, fault), "", tuple(matches(headers, seen))


def _content(seen: Described, fault: str) -> Content:
    meta = seen.meta
    return Content(
        group_size=meta.group_size,
        sibling=meta.sibling,
        source=meta.source,
        task=meta.task,
        dataset_digest=meta.dataset_digest,
        index=meta.index,
        data_epoch=meta.data_epoch,
        seed=meta.seed,
        finish=meta.finish,
        version=seen.version,
        sampled=tuple([one for one in seen.segments if one.kind == "model"]),
        weights=meta.weights,
        answer=meta.reward_answer,
        parts=parts_in_control(meta.reward_parts),
        contexts=1 + len(meta.contexts),
        calls=len(meta.calls),
        fault=fault,
        mixture=_mixture(seen),
    )


def _mixture(seen: Described) -> tuple[int, int, int] | None:
    routes = seen.routed_experts
    return None if routes is None else (routes.experts, routes.layers, routes.per_token)


WAITING_MAX: Final = 20_000
"""Evidence in memory; a piece is about a kilobyte."""

POLL_RECORDS: Final = 256
POLL_BYTES: Final = 4 * 1024 * 1024


class EvidenceSource(Protocol):
    """Evidence of given partitions, in offset order per partition."""

    def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
        """The next evidence, of this partition if others can wait; waits so long for the first.

        Raises BusError.
        """
        ...

    def position(self, partition: int) -> int:
        """Evidence below was given."""
        ...

    def held_back(self) -> bool:
        """Whether the log delays records (a quota): slow, not lost."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class SpillStore(Protocol):
    """Where evidence waits that is too much for memory."""

    def put(self, pieces: Iterable[Evidence]) -> None: ...

    def pop(self, place: Place) -> Evidence | None:
        """Give back one, which is not kept any longer."""
        ...

    def all(self) -> Iterator[Evidence]:
        """What is kept, by partition and offset."""
        ...


class OwnReader:
    """A `EvidenceSource` in this process."""

    def __init__(
        self, bus: Bus, topic: str, positions: Mapping[int, int], *, opened: bool = True
    ) -> None:
        self._topic = topic
        self._opened = opened
        at = {TopicPartition(topic, one): position for one, position in positions.items()}
        self._reader: Reader = bus.reader(at)

    def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
        """The next evidence, of whichever partition."""
        records = self._reader.poll(
            timeout_s=timeout_s, records_max=POLL_RECORDS, bytes_max=POLL_BYTES
        )
        return [evidence_of(record, opened=self._opened) for record in records]

    def position(self, partition: int) -> int:
        """Evidence below was given."""
        return self._reader.position(TopicPartition(self._topic, partition))

    def held_back(self) -> bool:
        """See the protocol."""
        return bool(self._reader.held_back())

    def close(self) -> None:
        """Let go of the reader."""
        self._reader.close()


class EvidenceBuffer:
    """What was read of the topic and not been judged; `ends` bounds what is read.

    `fresh` opens a source at positions, when the first evidence is needed.
    """

    def __init__(self) -> None:
        self.spilled: SpillStore | None = None
        self._source: EvidenceSource | None = None
        self.positions: dict[int, int] = {}
        """Per partition: everything below was read."""
        self.last: dict[int, tuple[int, str]] = {}
        """Per partition: offset and sha256 of the last record that was read."""
        self.waiting: dict[Place, Evidence] = {}
        self._ends: dict[int, int] = {}
        self._reads: list[int] = []

    def begin(
        self, ends: Mapping[int, int], fresh: Callable[[dict[int, int]], EvidenceSource]
    ) -> None:
        """Read on, up to these ends."""
        self.close()
        self._ends = dict(ends)
        for partition in ends:
            self.positions.setdefault(partition, 0)
        behind = {one: self.positions[one] for one in ends if self.positions[one] < ends[one]}
        self._reads = list(behind)
        if behind:
            self._source = fresh(behind)

    def read_to(self, partition: int, offset: int) -> None:
        """Read until this offset has been passed, or the end."""
        target = min(offset + 1, self._ends.get(partition, 0))
        empty = 0
        while self.positions.get(partition, target) < target:
            assert self._source is not None
            before = self.positions[partition]
            pieces = self._source.poll(partition, wait_after(empty))
            for one in pieces:
                self._keep(one)
            for each in self._reads:
                position = min(self._source.position(each), self._ends[each])
                self.positions[each] = max(self.positions[each], position)
            moved = pieces or self.positions[partition] > before
            empty = 0 if moved else max(1, empty + (not self._source.held_back()))
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"partition {partition} gives no more records before its end")
        self._overflow()

    def read_all(self) -> None:
        """Read up to the ends."""
        for partition, end in self._ends.items():
            self.read_to(partition, end)

    def pop(self, place: Place) -> Evidence | None:
        """The evidence of a place, if it was read; it waits no longer."""
        found = self.waiting.pop(place, None)
        if found is None and self.spilled is not None:
            found = self.spilled.pop(place)
        return found

    def rest(self) -> Iterator[Evidence]:
        """What nobody has taken, by partition and offset."""
        waiting = sorted(self.waiting.values(), key=lambda one: one.place)
        if self.spilled is None:
            yield from waiting
            return
        yield from sorted([*self.spilled.all(), *waiting], key=lambda one: one.place)

    def close(self) -> None:
        """Let go of the source."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _keep(self, one: Evidence) -> None:
        if one.offset < self._ends[one.partition]:
            self.waiting[one.partition, one.offset] = one
            self.last[one.partition] = one.offset, one.sha256

    def _overflow(self) -> None:
        if self.spilled is None or len(self.waiting) <= WAITING_MAX:
            return
        oldest = [self.waiting.pop(place) for place in list(self.waiting)[: WAITING_MAX // 2]]
        self.spilled.put(oldest)


HELPERS_MAX: Final = 8

RECORDS_MIN: Final = 8000
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


Start = Callable[[Request], subprocess.Popen[bytes]]
"""Starts a helper, which writes frames to its standard output (a pipe). Raises ResourceError."""


class HelperFrame(msgspec.Struct, frozen=True, array_like=True):
    """What a helper has read; with `error`, its last word."""

    positions: dict[int, int]
    pieces: list[Evidence]
    error: str = ""
    held_back: bool = False


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
            moved, held_back = bool(pieces) or before != at, reader.held_back()
            empty = 0 if moved else max(1, empty + (not held_back))
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"{request.topic} gives no more records before its end")
            if moved or held_back:
                _write(out, encode(HelperFrame(at, pieces, held_back=held_back)))
    except DoraError as error:
        _write(out, encode(HelperFrame(at, [], error.message)))
    finally:
        reader.close()


def _write(out: IO[bytes], data: bytes) -> None:
    out.write(_HEAD.pack(len(data)))
    out.write(data)
    out.flush()


class Helpers:
    """A `EvidenceSource` of what other processes read."""

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

    def held_back(self) -> bool:
        """See the protocol."""
        return any(helper.held_back for helper in self._helpers)

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
        self._helpers = []


class _Helper:
    def __init__(self, start: Start, request: Request) -> None:
        self.at = dict(request.positions)
        self.held_back = False
        self._decoder = msgspec.msgpack.Decoder(HelperFrame)
        self._process = start(request)
        assert self._process.stdout is not None
        self._out = cast("io.RawIOBase", self._process.stdout)
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
        self.at, self.held_back = frame.positions, frame.held_back
        return frame.pieces

    def _frame(self) -> HelperFrame:
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
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._out.close()
