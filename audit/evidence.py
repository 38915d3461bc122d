"""What a record of the trajectories topic says by itself, before anybody asks what was dispatched.

Evidence is a function of the record alone: it can be gathered by other processes, in any order, and
is small however long the trajectory is. `check_records` holds it against the ledger.
"""

from __future__ import annotations

from typing import cast

import msgspec

from dora_pipe.bus.claim_check import lost_claim
from dora_pipe.bus.port import Record
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.fast_validate import FastValidator
from dora_pipe.schemas.identity import Purpose
from dora_pipe.schemas.trajectory import Described, Headers, Sampler, Segment
from dora_pipe.schemas.trajectory_codec import matches, parse_headers
from dora_pipe.schemas.wire import sha256_hex

Place = tuple[int, int]
"""Partition and offset."""


class Content(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the value says, as far as control says it too; of a value that holds in itself."""

    group_size: int
    sibling: int
    purpose: Purpose
    dataset_digest: str
    index: int
    data_epoch: int
    seed: int
    finish: FinishReason
    version: int
    sampled: tuple[Segment, ...]
    weights: tuple[Sampler, ...]

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


def evidence_of(record: Record, glancer: FastValidator | None) -> Evidence:
    """Look at one record; with a glancer the value is opened and checked, too."""
    headers, header_error = None, ""
    try:
        headers = parse_headers(record.headers)
    except SchemaError as error:
        header_error = error.message
    content: Content | None = None
    value_error, disagree = "", cast("tuple[str, ...]", ())
    lost = lost_claim(record)
    if glancer is not None and headers is not None and not lost:
        content, value_error, disagree = _open(record.value, headers, glancer)
    return Evidence(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        bytes=len(record.value),
        sha256=sha256_hex(record.value),
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


def _open(
    value: bytes, headers: Headers, glancer: FastValidator
) -> tuple[Content | None, str, tuple[str, ...]]:
    try:
        seen = glancer.look(value)
    except SchemaError as error:
        return None, error.message, ()
    return _content(seen), "", tuple(matches(headers, seen))


def _content(seen: Described) -> Content:
    meta = seen.meta
    return Content(
        group_size=meta.group_size,
        sibling=meta.sibling,
        purpose=meta.purpose,
        dataset_digest=meta.dataset_digest,
        index=meta.index,
        data_epoch=meta.data_epoch,
        seed=meta.seed,
        finish=meta.finish,
        version=seen.version,
        sampled=tuple([one for one in seen.segments if one.kind == "model"]),
        weights=meta.weights,
    )
