"""Evidence: what audit compares of a trajectories record, of bounded size.

Evidence without an event waits in memory, beyond `WAITING_MAX` on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

import msgspec

from dora_pipe.audit.spill import SpillDict, SpillFile
from dora_pipe.bus.base import EMPTY_POLLS_MAX, count_empty_polls, wait_after
from dora_pipe.bus.blobs import lost_blob
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.bus.logged import record_digest
from dora_pipe.core.errors import SchemaError, one_line
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.schemas.context_tokens import call_fault
from dora_pipe.schemas.control import ERROR_CHARACTERS_MAX, FinishReason, parts_in_control
from dora_pipe.schemas.headers import matches, parse_headers
from dora_pipe.schemas.trajectory import Described, Headers, Sampler, Segment
from dora_pipe.schemas.trajectory_codec import decode_trajectory, view_trajectory

Place = tuple[int, int]


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    group_size: int
    sample: int
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
    error: str = ""
    parts: dict[str, float] = {}
    contexts: int = 1
    calls: int = 0
    fault: str = ""
    """Why its calls contradict its tokens, if they do."""
    mixture: tuple[int, int, int] | None = None
    """Experts, layers with experts, experts per token."""

    @property
    def versions(self) -> list[int]:
        return [segment.version for segment in self.sampled]


_OF_META: Final = Content.__struct_fields__[: Content.__struct_fields__.index("version")]


class Evidence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    topic: str
    partition: int
    offset: int
    bytes: int
    sha256: str
    headers: Headers | None
    header_error: str = ""
    content: Content | None = None
    """None if unreadable or not decoded."""
    value_error: str = ""
    disagree: tuple[str, ...] = ()
    """Header fields that the value contradicts."""
    lost: str = ""
    """Why the blob is missing."""
    other_key: str = ""

    @property
    def place(self) -> Place:
        return self.partition, self.offset

    @property
    def where(self) -> str:
        return f"trajectories:{self.partition}:{self.offset}"


def evidence_of(record: Record, *, opened: bool) -> Evidence:
    """Return a record's evidence; `opened` also decodes the value."""
    headers, header_error = None, ""
    try:
        headers = parse_headers(record.headers)
    except SchemaError as error:
        header_error = error.message
    content: Content | None = None
    value_error, disagree = "", cast("tuple[str, ...]", ())
    lost = lost_blob(record)
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
        described = view_trajectory(value)
    except SchemaError as error:
        return None, error.message, ()
    fault = call_fault(decode_trajectory(value)) if described.meta.calls else ""
    return _content(described, fault), "", tuple(matches(headers, described))


def _content(described: Described, fault: str) -> Content:
    meta = described.meta
    return Content(
        **{name: getattr(meta, name) for name in _OF_META},
        version=described.version,
        sampled=tuple([segment for segment in described.segments if segment.kind == "model"]),
        weights=meta.weights,
        answer=meta.reward_answer,
        error=one_line(meta.reward_error or "", ERROR_CHARACTERS_MAX),
        parts=parts_in_control(meta.reward_parts),
        contexts=1 + len(meta.contexts),
        calls=len(meta.calls),
        fault=fault,
        mixture=_mixture(described),
    )


def _mixture(described: Described) -> tuple[int, int, int] | None:
    routes = described.routed_experts
    return None if routes is None else (routes.experts, routes.layers, routes.per_token)


WAITING_MAX: Final = 20_000
"""About 1 kB each."""

POLL_RECORDS: Final = 256
POLL_BYTES: Final = 4 * 1024 * 1024


class EvidenceBuffer:
    """Evidence not checked yet; `ends` bounds reading."""

    def __init__(self, file: SpillFile) -> None:
        self.positions: dict[int, int] = {}
        self.last: dict[int, tuple[int, str]] = {}
        """Last record read, per partition."""
        self.waiting: SpillDict[Place, Evidence] = SpillDict(file, "evidence", Evidence)
        self._topic = ""
        self._reader: Reader | None = None
        self._opened = True
        self._ends: dict[int, int] = {}

    def begin(self, bus: Bus, topic: str, ends: Mapping[int, int], *, opened: bool) -> None:
        """Continue to these ends; `opened` decodes values."""
        self.close()
        self._topic, self._ends = topic, dict(ends)
        self._opened = opened
        for partition in ends:
            self.positions.setdefault(partition, 0)
        behind = {
            TopicPartition(topic, partition): self.positions[partition]
            for partition, end in ends.items()
            if self.positions[partition] < end
        }
        self._reader = bus.reader(behind) if behind else None

    def read_to(self, partition: int, offset: int) -> None:
        """Read past this offset or to the end. Raises BusError."""
        target = min(offset + 1, self._ends.get(partition, 0))
        reader, empty = self._reader, 0
        while self.positions.get(partition, target) < target:
            assert reader is not None
            before = dict(self.positions)
            records = reader.poll(
                timeout_s=wait_after(empty), records_max=POLL_RECORDS, bytes_max=POLL_BYTES
            )
            for record in records:
                self._keep(record)
            for number, end in self._ends.items():
                if self.positions[number] < end:
                    position = reader.position(TopicPartition(self._topic, number))
                    self.positions[number] = max(self.positions[number], min(position, end))
            moved = bool(records) or self.positions != before
            source = TopicPartition(self._topic, partition)
            empty = count_empty_polls(reader, source, empty, moved=moved, polls_max=EMPTY_POLLS_MAX)
        if len(self.waiting) > WAITING_MAX:
            self.waiting.spill(list(self.waiting)[: WAITING_MAX // 2])

    def read_all(self) -> None:
        for partition, end in self._ends.items():
            self.read_to(partition, end)

    def pop(self, key: Place) -> Evidence | None:
        """Remove and return evidence, if it was read."""
        evidence: Evidence | None = self.waiting.get(key)
        if evidence is not None:
            del self.waiting[key]
        return evidence

    def rest(self) -> list[Evidence]:
        """Return the rest by partition and offset."""
        return sorted(self.waiting.everything(), key=lambda evidence: evidence.place)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _keep(self, record: Record) -> None:
        if record.offset < self._ends[record.partition]:
            evidence = evidence_of(record, opened=self._opened)
            self.waiting[evidence.place] = evidence
            self.last[evidence.partition] = evidence.offset, evidence.sha256
