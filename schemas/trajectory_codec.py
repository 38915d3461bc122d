"""How trajectories and progress records become bytes and come back, checked at both ends.

A value is one zstd frame around an Arrow stream of one row (see `arrow_frame`). Log-probs and
nothing else are rounded: to float32, once, by the writer. `sampler_logprobs` is a null column where
it equals `logprobs` (nothing is truncated, and they are at the sampler's temperature); reading
restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import wire
from dora_pipe.schemas.arrow_frame import Layout
from dora_pipe.schemas.headers import describe, header_pairs, headers_of, matches, parse_headers
from dora_pipe.schemas.trajectory import (
    Arrays,
    Headers,
    Meta,
    Progress,
    Segment,
    Trajectory,
    check_arrays,
    check_digest,
    check_fields,
)

__all__ = [
    "decode_progress",
    "decode_trajectory",
    "encode_progress",
    "encode_trajectory",
    "header_pairs",
    "headers_of",
    "matches",
    "parse_headers",
    "view_trajectory",
]

_DIGEST_BYTES = 32
_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
_SEGMENT = pa.struct(
    [
        ("kind", pa.utf8()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("turn", pa.int32()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("worker", pa.utf8()),
        ("epoch", pa.int64()),
        ("version", pa.int64()),
        ("tool", pa.utf8()),
        ("ok", pa.bool_()),
    ]
)
_SEGMENT_FIELDS = tuple(field.name for field in _SEGMENT)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


TRAJECTORY = Layout(
    pa.schema(
        [
            _required("trajectory", pa.utf8()),
            _required("version", pa.int64()),
            _required("weights_digest", pa.binary(_DIGEST_BYTES)),
            _required("token_ids", _TOKENS),
            _required("logprobs", _LOGPROBS),
            pa.field("sampler_logprobs", _LOGPROBS),
            _required("loss_mask", pa.list_(pa.uint8())),
            pa.field("reward", pa.float64()),
            _required("segments", pa.list_(_SEGMENT)),
            _required("meta_json", pa.utf8()),
        ]
    )
)
"""Columns of the trajectories topic. A nullable one may be absent: it has a meaning when null."""

PROGRESS = Layout(
    pa.schema(
        [
            _required("trajectory", pa.utf8()),
            _required("attempt", pa.int32()),
            _required("version", pa.int64()),
            _required("weights_digest", pa.binary(_DIGEST_BYTES)),
            _required("worker", pa.utf8()),
            _required("epoch", pa.int64()),
            _required("start", pa.int32()),
            _required("token_ids", _TOKENS),
            _required("logprobs", _LOGPROBS),
            pa.field("sampler_logprobs", _LOGPROBS),
            _required("prefills", pa.list_(pa.int32())),
            _required("previous", pa.int64()),
            _required("started_ns", pa.int64()),
        ]
    )
)
"""Columns of the progress topic."""

_LISTS = frozenset({"token_ids", "logprobs", "sampler_logprobs", "loss_mask"})
META = msgspec.json.Decoder(Meta)


def encode_trajectory(trajectory: Trajectory, *, traceparent: str = "") -> tuple[bytes, Headers]:
    """The value bytes and what the headers say of them. Raises SchemaError.

    Example: ``value, headers = encode_trajectory(trajectory)``, then
    ``Append(value=value, headers=header_pairs(headers), ...)``.
    """
    columns = {
        "trajectory": trajectory.trajectory,
        "version": trajectory.version,
        "weights_digest": _digest_bytes(trajectory.digest),
        "token_ids": trajectory.token_ids,
        "logprobs": trajectory.logprobs,
        "sampler_logprobs": trajectory.sampler_logprobs,
        "loss_mask": trajectory.loss_mask,
        "reward": trajectory.reward,
        "segments": [_segment_row(segment) for segment in trajectory.segments],
        "meta_json": wire.encode(trajectory.meta).decode(),
    }
    built = {name: TRAJECTORY.column(name, value) for name, value in columns.items()}
    arrays = _arrays(built)
    check_arrays(arrays)
    check_fields(trajectory, arrays)
    _null_where_equal(TRAJECTORY, built, arrays.logprobs, arrays.sampler_logprobs)
    value = TRAJECTORY.seal(list(built.values()))
    return value, describe(trajectory, sha256=wire.sha256_hex(value), traceparent=traceparent)


def decode_trajectory(value: bytes) -> Trajectory:
    """A trajectory from its value bytes, checked. Raises SchemaError with a path, nothing else."""
    columns, values = TRAJECTORY.unseal(value)
    return _checked(columns, values, _arrays(columns))


def view_trajectory(value: bytes) -> Trajectory:
    """As `decode_trajectory`, with numpy arrays (NaN for None): no token becomes an object.

    For who looks at a record as a whole; checks and errors are the same.
    """
    columns, values = TRAJECTORY.unseal(value, leave=_LISTS)
    arrays = _arrays(columns)
    values["token_ids"], values["loss_mask"] = arrays.token_ids, arrays.loss_mask
    values["logprobs"], values["sampler_logprobs"] = arrays.logprobs, arrays.sampler_logprobs
    return _checked(columns, values, arrays)


def _checked(columns: Mapping[str, pa.Array], values: dict[str, Any], arrays: Arrays) -> Trajectory:
    check_arrays(arrays)
    _no_stray_values(columns, arrays.loss_mask)
    trajectory = Trajectory(
        trajectory=values["trajectory"],
        version=values["version"],
        digest=values["weights_digest"].hex(),
        token_ids=values["token_ids"],
        logprobs=values["logprobs"],
        sampler_logprobs=_or(values.get("sampler_logprobs"), values["logprobs"]),
        loss_mask=values["loss_mask"],
        reward=values.get("reward"),
        segments=_segments(values["segments"]),
        meta=wire.decode(values["meta_json"].encode(), META, "$.meta"),
    )
    check_fields(trajectory, arrays)
    return trajectory


def encode_progress(progress: Progress) -> bytes:
    """The value bytes of a progress record. Raises SchemaError."""
    columns = {
        "trajectory": progress.trajectory,
        "attempt": progress.attempt,
        "version": progress.version,
        "weights_digest": _digest_bytes(progress.digest),
        "worker": progress.worker,
        "epoch": progress.epoch,
        "start": progress.start,
        "token_ids": progress.token_ids,
        "logprobs": progress.logprobs,
        "sampler_logprobs": progress.sampler_logprobs,
        "prefills": progress.prefills,
        "previous": progress.previous,
        "started_ns": progress.started_ns,
    }
    built = {name: PROGRESS.column(name, value) for name, value in columns.items()}
    arrays = _progress_arrays(built)
    check_arrays(arrays)
    _null_where_equal(PROGRESS, built, arrays.logprobs, arrays.sampler_logprobs)
    return PROGRESS.seal(list(built.values()))


def decode_progress(value: bytes) -> Progress:
    """A progress record from its value bytes, checked. Raises SchemaError, nothing else."""
    columns, values = PROGRESS.unseal(value)
    check_arrays(_progress_arrays(columns))
    return Progress(
        trajectory=values["trajectory"],
        attempt=values["attempt"],
        version=values["version"],
        digest=values["weights_digest"].hex(),
        worker=values["worker"],
        epoch=values["epoch"],
        start=values["start"],
        token_ids=values["token_ids"],
        logprobs=values["logprobs"],
        sampler_logprobs=_or(values.get("sampler_logprobs"), values["logprobs"]),
        prefills=tuple(values["prefills"]),
        previous=values["previous"],
        started_ns=values["started_ns"],
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _numbers(columns: Mapping[str, pa.Array], name: str, *, nulls: bool) -> np.ndarray[Any, Any]:
    """The entries of a list column; null is NaN. Raises SchemaError for a null that may not be."""
    values = columns[name][0].values
    if values.null_count and not nulls:
        raise SchemaError("null entry", path=f"$.{name}")
    numbers: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return numbers


def _sampler(columns: Mapping[str, pa.Array], logprobs: np.ndarray[Any, Any]) -> Any:
    column = columns.get("sampler_logprobs")
    if column is None or column.null_count:
        return logprobs
    return _numbers(columns, "sampler_logprobs", nulls=True)


def _arrays(columns: Mapping[str, pa.Array]) -> Arrays:
    logprobs = _numbers(columns, "logprobs", nulls=True)
    return Arrays(
        token_ids=_numbers(columns, "token_ids", nulls=False),
        logprobs=logprobs,
        sampler_logprobs=_sampler(columns, logprobs),
        loss_mask=_numbers(columns, "loss_mask", nulls=False),
    )


def _progress_arrays(columns: Mapping[str, pa.Array]) -> Arrays:
    """Every token of a progress record was sampled: a trajectory's rules with a mask of ones."""
    for name in ("start", "version", "attempt"):
        if columns[name][0].as_py() < 0:
            raise SchemaError("negative", path=f"$.{name}")
    if columns["prefills"][0].values.null_count:
        raise SchemaError("null entry", path="$.prefills")
    token_ids = _numbers(columns, "token_ids", nulls=False)
    logprobs = _numbers(columns, "logprobs", nulls=False)
    return Arrays(
        token_ids=token_ids,
        logprobs=logprobs,
        sampler_logprobs=_sampler(columns, logprobs),
        loss_mask=np.ones(len(token_ids), np.uint8),
    )


def _null_where_equal(
    layout: Layout,
    columns: dict[str, pa.Array],
    logprobs: np.ndarray[Any, Any],
    sampler_logprobs: np.ndarray[Any, Any],
) -> None:
    # Bits are compared, not numbers: -0.0 must come back as -0.0.
    bits = (logprobs.view(np.uint32), sampler_logprobs.view(np.uint32))
    if np.array_equal(*bits):
        columns["sampler_logprobs"] = layout.column("sampler_logprobs", None)


def _no_stray_values(columns: Mapping[str, pa.Array], mask: np.ndarray[Any, Any]) -> None:
    """A NaN in place of a null would pass `check_arrays`, which sees both as NaN."""
    nulls = len(mask) - int(np.count_nonzero(mask))
    for name in ("logprobs", "sampler_logprobs"):
        column = columns.get(name)
        if column is not None and not column.null_count and column[0].values.null_count != nulls:
            raise SchemaError("NaN instead of null", path=f"$.{name}")


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {name: getattr(segment, name) for name in _SEGMENT_FIELDS}


def _segments(rows: Sequence[Any]) -> list[Segment]:
    try:
        return msgspec.convert(rows, list[Segment])
    except msgspec.ValidationError as error:
        raise wire.schema_error(error, "$.segments") from None


def _digest_bytes(digest: str) -> bytes:
    check_digest(digest)
    return bytes.fromhex(digest)
