"""Writes a trajectory record without Arrow, to the very bytes that Arrow would write.

It takes what a worker has in its hands: arrays, few segments, perhaps routes. Whatever is
otherwise, or wrong, goes to `encode_trajectory`, which decides and says why. A test holds the two
against each other. The layout of a version never changes, so a record batch's metadata is a
template in which numbers are set (`fast_validate.RowMetadata`); its buffers stand behind it in the
order of the schema, each filled up to eight bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_frame import (
    COLUMN_BYTES_MAX,
    END_OF_STREAM,
    ENTRIES_MAX,
    compress,
)
from dora_pipe.schemas.fast_validate import (
    COUNT_NODES,
    ENTRY_NODES,
    LOGPROBS_NULLS,
    NODES,
    REWARD_NULLS,
    ROUTED_NODES,
    SAMPLER_NULLS,
    SAMPLERS_NODE,
    SEGMENTS_MAX,
    row_metadata,
)
from dora_pipe.schemas.headers import describe
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import (
    Arrays,
    Headers,
    Segment,
    Trajectory,
    check_arrays,
    check_fields,
    check_segments,
)
from dora_pipe.schemas.trajectory_codec import (
    SEGMENT,
    check_routed,
    encode_trajectory,
    same_bits,
)
from dora_pipe.schemas.wire import encode, value_digest

META_BYTES_MAX: Final = 1024 * 1024
"""More of it is for Arrow, which bounds columns."""

FAST_ROUTES_BYTES_MAX: Final = COLUMN_BYTES_MAX - 1024
"""The same of routes: a copy more matters little there."""

_NONE: Final = b""
_NULL: Final = b"\0"
"""The bitmap of a row that is null."""
_KINDS: Final = {"utf8": "", "string": "", "int32": "i", "int64": "q", "bool": "?"}
_FIELDS: Final = tuple((one.name, _KINDS[str(one.type)]) for one in SEGMENT)
_PADDING: Final = tuple(bytes(size) for size in range(8))

_GIVES_UP: Final = (SchemaError, struct.error, ValueError, TypeError, AttributeError, OverflowError)

Buffers = list[Any]
"""Bytes and what shows itself as such."""


def write_trajectory(trajectory: Trajectory, *, traceparent: str = "") -> tuple[bytes, Headers]:
    """As `encode_trajectory`: the same bytes, the same errors. Raises SchemaError."""
    arrays = _arrays(trajectory)
    if arrays is None:
        return encode_trajectory(trajectory, traceparent=traceparent)
    try:
        check_arrays(arrays)
        check_segments(trajectory.segments, arrays.loss_mask)
        check_fields(trajectory)
        check_routed(trajectory, distinct=False)
        value = _framed(trajectory, arrays)
    except _GIVES_UP:
        return encode_trajectory(trajectory, traceparent=traceparent)
    return value, describe(trajectory, sha256=value_digest(value), traceparent=traceparent)


def _arrays(trajectory: Trajectory) -> Arrays | None:
    """Those of a trajectory as a worker has it; None of another."""
    routes = trajectory.routed_experts
    if routes is not None and not _is_plain(routes):
        return None
    if not 0 < len(trajectory.segments) <= SEGMENTS_MAX:
        return None
    token_ids = _numbers(trajectory.token_ids, np.int32)
    logprobs = _numbers(trajectory.logprobs, np.float32)
    sampler = _numbers(trajectory.sampler_logprobs, np.float32)
    mask = _numbers(trajectory.loss_mask, np.uint8)
    if token_ids is None or logprobs is None or sampler is None or mask is None:
        return None
    if not 0 < len(token_ids) <= ENTRIES_MAX:
        return None
    return Arrays(
        token_ids=token_ids,
        logprobs=logprobs,
        sampler_logprobs=logprobs if same_bits(logprobs, sampler) else sampler,
        loss_mask=mask,
    )


def _is_plain(routes: Routes) -> bool:
    plain = isinstance(routes.data, bytes | memoryview)
    return plain and len(routes.data) <= FAST_ROUTES_BYTES_MAX


def _numbers(values: Any, dtype: type[np.generic]) -> np.ndarray[Any, Any] | None:
    if not isinstance(values, np.ndarray | array | bytearray):
        return None
    found = np.asarray(values)
    plain = found.dtype == dtype and found.ndim == 1 and found.flags.c_contiguous
    return found if plain else None


def _framed(trajectory: Trajectory, arrays: Arrays) -> bytes:
    """The value bytes. Raises struct.error or ValueError for what Arrow has to look at."""
    nulls = len(arrays.token_ids) - int(np.count_nonzero(arrays.loss_mask))
    known = np.packbits(arrays.loss_mask, bitorder="little").tobytes() if nulls else _NONE
    buffers, routes = _buffers(trajectory, arrays, known), trajectory.routed_experts
    if routes is not None:
        buffers += _routes(routes)
    pieces = _pieces(buffers, _nodes(trajectory, arrays, nulls), routed=routes is not None)
    return compress(b"".join(pieces))


def _nodes(trajectory: Trajectory, arrays: Arrays, nulls: int) -> list[int]:
    """Length and nulls of every node; `nulls` are those of log-probs."""
    length, count = len(arrays.token_ids), len(trajectory.segments)
    own = arrays.sampler_logprobs is arrays.logprobs
    nodes = [1, 0] * (NODES if trajectory.routed_experts is None else ROUTED_NODES)
    for place in ENTRY_NODES:
        nodes[place] = length
    for place in COUNT_NODES:
        nodes[place] = count
    nodes[LOGPROBS_NULLS] = nulls
    nodes[SAMPLER_NULLS] = int(own)
    nodes[SAMPLERS_NODE], nodes[SAMPLERS_NODE + 1] = (0, 0) if own else (length, nulls)
    nodes[REWARD_NULLS] = int(trajectory.reward is None)
    return nodes


def _buffers(trajectory: Trajectory, arrays: Arrays, known: bytes) -> Buffers:
    """In the order of the schema; `known` is the bitmap of log-probs."""
    one, whole = trajectory, struct.pack("<2i", 0, len(arrays.token_ids))
    meta = encode(one.meta)
    if len(meta) > META_BYTES_MAX:
        raise ValueError("for Arrow")
    found: Buffers = [*_texts([one.trajectory.encode()]), _NONE, struct.pack("<q", one.version)]
    found += (_NONE, bytes.fromhex(one.digest), _NONE, whole, _NONE, _seen(arrays.token_ids))
    found += (_NONE, whole, known, _floats(arrays.logprobs, one.segments))
    if arrays.sampler_logprobs is arrays.logprobs:
        found += (_NULL, struct.pack("<2i", 0, 0), _NONE, _NONE)
    else:
        found += (_NONE, whole, known, _floats(arrays.sampler_logprobs, one.segments))
    found += (_NONE, whole, _NONE, _seen(arrays.loss_mask))
    found += (_NULL, bytes(8)) if one.reward is None else (_NONE, struct.pack("<d", one.reward))
    found += (_NONE, struct.pack("<2i", 0, len(one.segments)), _NONE)
    for name, kind in _FIELDS:
        found += _column([getattr(each, name) for each in one.segments], kind)
    return [*found, *_texts([meta])]


def _column(values: Sequence[Any], kind: str) -> Buffers:
    """Of a field of segments."""
    if kind == "":
        return _texts([each.encode() for each in values])
    if kind == "?":
        if any(type(each) is not bool for each in values):
            raise ValueError("for Arrow")
        bits = sum(each << at for at, each in enumerate(values))
        return [_NONE, bits.to_bytes((len(values) + 7) // 8, "little")]
    return [_NONE, struct.pack(f"<{len(values)}{kind}", *values)]


def _texts(texts: Sequence[bytes]) -> Buffers:
    ends = accumulate(map(len, texts), initial=0)
    return [_NONE, struct.pack(f"<{len(texts) + 1}i", *ends), b"".join(texts)]


def _floats(values: np.ndarray[Any, Any], segments: Iterable[Segment]) -> memoryview:
    """Zero, as Arrow has it under a null, where the policy did not sample."""
    found = values.copy()
    for one in segments:
        if one.kind != "model":
            found[one.start : one.end] = 0
    return _seen(found)


def _seen(values: np.ndarray[Any, Any]) -> memoryview:
    return values.data.cast("B")


def _routes(routes: Routes) -> Buffers:
    """A struct of three numbers and the entries."""
    found: Buffers = [_NONE]
    for number in (routes.experts, routes.layers, routes.per_token):
        found += (_NONE, struct.pack("<i", number))
    return [*found, _NONE, struct.pack("<2i", 0, len(routes.data)), routes.data]


def _pieces(buffers: Buffers, nodes: Sequence[int], *, routed: bool) -> Buffers:
    """The parts of the stream."""
    frame = row_metadata(routed=routed)
    pieces: Buffers = [frame.head, _NONE]
    numbers: list[int] = []
    at = 0
    for each in buffers:
        size = len(each)
        numbers += (at, size)
        pieces += (each, _PADDING[-size % 8])
        at += size + -size % 8
    pieces[1] = frame.filled(at, numbers, nodes)
    return [*pieces, END_OF_STREAM]
