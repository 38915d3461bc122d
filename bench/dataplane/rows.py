"""A trajectory as a row of Arrow, as somebody writes it who wants nothing of this package: no zstd,
a schema that both sides know, and of all checks those that any reader makes.

What is checked on arrival: the digest of the bytes, and that every column has as many entries as
there are tokens. Decides nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.trajectory import Meta, Segment, Trajectory

SCHEMA: Final = pa.schema(
    [
        ("trajectory", pa.utf8()),
        ("version", pa.int64()),
        ("digest", pa.utf8()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("reward", pa.float64()),
        ("said", pa.binary()),
        ("routes", pa.binary()),
    ]
)


class Said(msgspec.Struct, frozen=True):
    """What of a trajectory is no array."""

    meta: Meta
    segments: list[Segment]


SAID: Final = msgspec.json.Decoder(Said)
_ENCODER: Final = msgspec.json.Encoder()


def said_by(trajectory: Trajectory) -> bytes:
    """As JSON."""
    return _ENCODER.encode(Said(trajectory.meta, list(trajectory.segments)))


def encode_row(trajectory: Trajectory) -> bytes:
    """The row's bytes, without the schema."""
    routes = trajectory.routed_experts
    columns = [
        pa.array([trajectory.trajectory]),
        pa.array([trajectory.version], pa.int64()),
        pa.array([trajectory.digest]),
        _list_of(trajectory.token_ids, np.int32),
        _list_of(trajectory.logprobs, np.float32),
        _list_of(trajectory.loss_mask, np.uint8),
        pa.array([trajectory.reward], pa.float64()),
        pa.array([said_by(trajectory)], pa.binary()),
        pa.array([None if routes is None else routes.data], pa.binary()),
    ]
    return bytes(pa.record_batch(columns, schema=SCHEMA).serialize())


def open_row(value: bytes, sha256: bytes) -> str:
    """The id of a row whose arrays were made. Raises InvariantBroken."""
    if hashlib.sha256(value).digest() != sha256:
        raise InvariantBroken("a row has other bytes than were sent")
    batch = pa.ipc.read_record_batch(pa.py_buffer(value), SCHEMA)
    arrays = [batch.column(at)[0].values.to_numpy(zero_copy_only=True) for at in (3, 4, 5)]
    said = SAID.decode(batch.column(7)[0].as_buffer())
    routes = batch.column(8)[0].as_buffer()
    routed = None if routes is None else np.frombuffer(routes, np.uint8)
    check_shapes(said, [len(one) for one in arrays], None if routed is None else len(routed))
    trajectory: str = batch.column(0)[0].as_py()
    return trajectory


def check_shapes(said: Said, lengths: list[int], routed: int | None) -> None:
    """Raise InvariantBroken unless every column has an entry for each token."""
    if set(lengths) != {said.segments[-1].end} or (routed is not None and routed % lengths[0]):
        raise InvariantBroken(f"columns of {lengths} tokens, {routed} bytes of routes")


def _list_of(numbers: Any, dtype: type[np.generic]) -> pa.Array:
    values = pa.array(np.asarray(numbers, dtype))
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
