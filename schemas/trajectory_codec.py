"""Codec of trajectories and progress records, with checks at both ends.

A value is an Arrow stream of one row in a zstd frame (`arrow_frame`), with a column per field of
`Trajectory`, `Progress` or `TurnProgress`, in order. Log-probs are rounded once,
to float32; nothing else is rounded. `sampler_logprobs` is null if it equals `logprobs`; readers
restore it. Records without `routed_experts` have no such column.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import wire
from dora_pipe.schemas.arrow_frame import Layout, decompress
from dora_pipe.schemas.context_tokens import counted_places
from dora_pipe.schemas.contexts import Call
from dora_pipe.schemas.headers import describe
from dora_pipe.schemas.routes import ROUTES_BYTES_MAX, Routes, check_routes, need_entries
from dora_pipe.schemas.trajectory import (
    Arrays,
    Headers,
    Masked,
    Meta,
    Progress,
    Segment,
    Trajectory,
    TurnProgress,
    check_arrays,
    check_digest,
    check_fields,
    check_segments,
)
from dora_pipe.schemas.wire import value_digest

AnyProgress = Progress | TurnProgress
"""Records of the progress topic."""

S = TypeVar("S", Meta, Call)
T = TypeVar("T", Trajectory, Progress, TurnProgress)
ArraysOf = Callable[[Mapping[str, pa.Array]], Arrays]

META: Final = msgspec.json.Decoder(Meta)
CALL: Final = msgspec.json.Decoder(Call)


def _as_it_is(value: Any) -> Any:
    return value


class Column(NamedTuple):
    """Column of a field whose annotation is not enough."""

    kind: pa.DataType
    name: str = ""
    """Column name if it differs from the field's."""
    nullable: bool = False
    """Whether null has a meaning."""
    write: Callable[[Any], Any] = _as_it_is
    read: Callable[[Any], Any] = _as_it_is


class RecordLayout(Layout, Generic[T]):
    """Columns of a record class; `columns` overrides annotations."""

    def __init__(self, record: type[T], columns: Mapping[str, Column]) -> None:
        self._record: type[T] = record
        named = [field for field in fields(record) if field.name != ROUTED or ROUTED in columns]
        self.columns: dict[str, Column] = {
            field.name: columns.get(field.name) or _plain(field.type) for field in named
        }
        self._names: tuple[tuple[str, str], ...] = tuple(
            (field, column.name or field) for field, column in self.columns.items()
        )
        self._reads: tuple[tuple[str, Callable[[Any], Any]], ...] = tuple(
            (field, column.read)
            for field, column in self.columns.items()
            if column.read is not _as_it_is
        )
        super().__init__(
            pa.schema(
                pa.field(name, self.columns[field].kind, nullable=self.columns[field].nullable)
                for field, name in self._names
            ),
            wide={ROUTED: ROUTES_BYTES_MAX} if ROUTED in columns else {},
        )

        self.routed: RecordLayout[T] = (
            self if ROUTED in columns else RecordLayout(record, {**columns, ROUTED: _ROUTES})
        )
        """Layout of records with routed experts."""

    def for_record(self, record: T) -> RecordLayout[T]:
        return self if record.routed_experts is None else self.routed

    def for_stream(self, raw: bytes) -> RecordLayout[T]:
        return self.routed if self.routed.is_of(raw) else self

    def write(self, record: T) -> dict[str, pa.Array]:
        """Return the columns of a record. Raises SchemaError."""
        values = {
            name: column.write(getattr(record, name)) for name, column in self.columns.items()
        }
        if same_bits(values["logprobs"], values["sampler_logprobs"]):
            values["sampler_logprobs"] = None
        return {name: self.column(name, values[field]) for field, name in self._names}

    def read(self, values: Mapping[str, Any]) -> T:
        """Return the record from column values. Raises SchemaError."""
        attributes: dict[str, Any] = {field: values.get(name) for field, name in self._names}
        for field, read in self._reads:
            attributes[field] = read(attributes[field])
        if attributes["sampler_logprobs"] is None:
            attributes["sampler_logprobs"] = attributes["logprobs"]
        record: T = self._record(**attributes)
        return record

    def finish(self, columns: dict[str, pa.Array], arrays: Arrays) -> bytes:
        if arrays.sampler_logprobs is not arrays.logprobs and same_bits(
            arrays.logprobs, arrays.sampler_logprobs
        ):
            columns["sampler_logprobs"] = self.column("sampler_logprobs", None)
        return self.seal(list(columns.values()))


def same_bits(first: Any, second: Any) -> bool:
    """Return whether float32 arrays are bitwise equal: -0.0 must survive. Returns False for other
    types."""
    if not (isinstance(first, np.ndarray | array) and isinstance(second, np.ndarray | array)):
        return False
    numbers, other = np.asarray(first), np.asarray(second)
    if not numbers.dtype == other.dtype == np.float32:
        return False
    return np.array_equal(numbers.view(np.uint32), other.view(np.uint32))


def _plain(annotation: Any) -> Column:
    kind, _, none = annotation.partition(" | ")
    kinds = {"str": pa.utf8(), "int": pa.int64(), "float": pa.float64()}
    return Column(kinds[kind], nullable=none == "None")


def _digest_bytes(digest: str) -> bytes:
    check_digest(digest)
    return bytes.fromhex(digest)


def _segments(rows: Sequence[Any]) -> list[Segment]:
    try:
        return msgspec.convert(rows, list[Segment])
    except msgspec.ValidationError as error:
        raise wire.schema_error(error, "$.segments") from None


def _route_columns(routes: Routes) -> dict[str, Any]:
    return msgspec.structs.asdict(routes) | {"data": bytes(routes.data)}


def _routes(value: Any) -> Routes | None:
    try:
        return msgspec.convert(value, Routes | None)
    except msgspec.ValidationError as error:
        raise wire.schema_error(error, f"$.{ROUTED}") from None


ROUTED: Final = "routed_experts"
"""Column of routed experts."""
_ROUTES: Final = Column(
    pa.struct(
        [
            ("experts", pa.int32()),
            ("layers", pa.int32()),
            ("per_token", pa.int32()),
            ("data", pa.binary()),
        ]
    ),
    nullable=True,
    write=lambda routes: None if routes is None else _route_columns(routes),
    read=_routes,
)
_INT32: Final = Column(pa.int32())
_INT32S: Final = Column(pa.list_(pa.int32()))
_PLACES: Final = Column(pa.list_(pa.int32()), read=tuple)
_LOGPROBS: Final = pa.list_(pa.float32())
_SHARED: Final[Mapping[str, Column]] = {
    "digest": Column(pa.binary(32), "weights_digest", write=_digest_bytes, read=bytes.hex),
    "token_ids": _INT32S,
    "logprobs": Column(_LOGPROBS),
    "sampler_logprobs": Column(_LOGPROBS, nullable=True),
}
SEGMENT: Final = pa.struct(
    [
        ("kind", pa.utf8()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("turn", pa.int32()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("worker", pa.utf8()),
        ("incarnation", pa.int64()),
        ("version", pa.int64()),
        ("tool", pa.utf8()),
        ("ok", pa.bool_()),
    ]
)
"""Fields of `Segment`, in order."""

_SEQUENCE: Final[Mapping[str, Column]] = {
    **_SHARED,
    "loss_mask": Column(pa.list_(pa.uint8())),
    "segments": Column(
        pa.list_(SEGMENT),
        write=lambda segments: [msgspec.structs.asdict(one) for one in segments],
        read=_segments,
    ),
}


def _decoded_text(text: str, decoder: msgspec.json.Decoder[S], root: str) -> S:
    return wire.decode(text.encode(), decoder, root, bytes_max=wire.TEXT_BYTES_MAX)


TRAJECTORY: Final = RecordLayout(
    Trajectory,
    {
        **_SEQUENCE,
        "meta": Column(
            pa.utf8(),
            "meta_json",
            write=lambda meta: wire.encode(meta).decode(),
            read=lambda text: _decoded_text(text, META, "$.meta"),
        ),
    },
)
"""Columns of the trajectories topic."""

PROGRESS: Final = RecordLayout(
    Progress, {**_SEQUENCE, "attempt": _INT32, "start": _INT32, "prefills": _PLACES}
)
"""Columns of the progress topic for a request."""

TURN_PROGRESS: Final = RecordLayout(
    TurnProgress,
    {
        **_SHARED,
        **dict.fromkeys(("attempt", "turn", "context", "parent", "shared"), _INT32),
        "given_ids": _INT32S,
        "prefills": _PLACES,
        "call": Column(
            pa.utf8(),
            "call_json",
            write=lambda call: wire.encode(call).decode(),
            read=lambda text: _decoded_text(text, CALL, "$.call"),
        ),
    },
)
"""Columns of the progress topic for an agent's call."""

LISTS: Final = frozenset({"token_ids", "logprobs", "sampler_logprobs", "loss_mask"})
"""Columns with an entry per token."""


def encode_trajectory(trajectory: Trajectory, *, traceparent: str = "") -> tuple[bytes, Headers]:
    """Return value bytes and headers. Raises SchemaError.

    Example: ``value, headers = encode_trajectory(trajectory)``, then ``Append(value=value,
    headers=header_pairs(headers), ...)``.
    """
    layout = TRAJECTORY.for_record(trajectory)
    columns = layout.write(trajectory)
    arrays = _arrays(columns)
    check_arrays(arrays)
    check_segments(trajectory.segments, arrays.loss_mask)
    check_fields(trajectory)
    check_routed(trajectory, distinct=False)
    value = layout.finish(columns, arrays)
    return value, describe(trajectory, sha256=value_digest(value), traceparent=traceparent)


def decode_trajectory(value: bytes) -> Trajectory:
    """Return a checked trajectory. Raises only SchemaError, with a path."""
    raw = decompress(value)
    layout = TRAJECTORY.for_stream(raw)
    columns, values = layout.opened(raw)
    return _checked(layout, columns, values, _arrays(columns))


def view_trajectory(value: bytes) -> Trajectory:
    """Return a checked trajectory with numpy arrays (NaN for None). Raises only SchemaError.

    Creates no object per token.
    """
    raw = decompress(value)
    layout = TRAJECTORY.for_stream(raw)
    columns, values = layout.opened(raw, leave=LISTS)
    arrays = _arrays(columns)
    values |= {name: getattr(arrays, name) for name in LISTS}
    return _checked(layout, columns, values, arrays)


def _checked(
    layout: RecordLayout[Trajectory],
    columns: Mapping[str, pa.Array],
    values: dict[str, Any],
    arrays: Arrays,
) -> Trajectory:
    check_arrays(arrays)
    _no_stray_values(columns, arrays.loss_mask)
    trajectory = layout.read(values)
    check_segments(trajectory.segments, arrays.loss_mask)
    check_fields(trajectory)
    check_routed(trajectory)
    return trajectory


def check_routed(trajectory: Masked, *, distinct: bool = True) -> None:
    """Raises SchemaError unless every trainable token has routed experts; `distinct` as in
    `check_routes`."""
    if trajectory.routed_experts is not None:
        check_routes(trajectory.routed_experts, trajectory.length, distinct=distinct)
        need_entries(trajectory.routed_experts, counted_places(trajectory))


def encode_any_progress(progress: AnyProgress) -> bytes:
    """Return the value bytes of any progress record. Raises SchemaError."""
    layout, arrays_of = _PROGRESS_LAYOUTS[type(progress)]
    layout = layout.for_record(progress)
    columns = layout.write(progress)
    arrays = arrays_of(columns)
    check_arrays(arrays)
    _check_chunk(progress, arrays)
    return layout.finish(columns, arrays)


def decode_any_progress(value: bytes) -> AnyProgress:
    """Return any checked progress record. Raises only SchemaError."""
    raw = decompress(value)
    layout, arrays_of = next(
        (
            (layout, arrays_of)
            for layout, arrays_of in _PROGRESS_LAYOUTS.values()
            if layout.is_of(raw) or layout.routed.is_of(raw)
        ),
        (PROGRESS, _progress_arrays),
    )
    layout = layout.for_stream(raw)
    columns, values = layout.opened(raw)
    arrays = arrays_of(columns)
    check_arrays(arrays)
    _no_stray_values(columns, arrays.loss_mask)
    progress: AnyProgress = layout.read(values)
    _check_chunk(progress, arrays)
    return progress


def _check_chunk(record: AnyProgress, arrays: Arrays) -> None:
    """Raises SchemaError unless entries and tokens of a progress record match."""
    routes, tokens = record.routed_experts, len(record.token_ids)
    if isinstance(record, TurnProgress):
        tokens += len(record.given_ids)
    else:
        check_segments(record.segments, arrays.loss_mask)
    check_routes(routes, tokens)


def _numbers(columns: Mapping[str, pa.Array], name: str, *, nulls: bool) -> np.ndarray[Any, Any]:
    """Return a list column's entries, NaN for null. Raises SchemaError for an invalid null."""
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


def _turn_arrays(columns: Mapping[str, pa.Array]) -> Arrays:
    _not_negative(columns, "version", "attempt", "turn", "context", "shared")
    if np.any(_numbers(columns, "given_ids", nulls=False) < 0):
        raise SchemaError("token id is negative", path="$.given_ids")
    _need_entries(columns, "prefills")
    token_ids = _numbers(columns, "token_ids", nulls=False)
    logprobs = _numbers(columns, "logprobs", nulls=False)
    return Arrays(
        token_ids=token_ids,
        logprobs=logprobs,
        sampler_logprobs=_sampler(columns, logprobs),
        loss_mask=np.ones(len(token_ids), np.uint8),
    )


def _progress_arrays(columns: Mapping[str, pa.Array]) -> Arrays:
    _not_negative(columns, "start", "version", "attempt")
    _need_entries(columns, "prefills")
    return _arrays(columns)


def _not_negative(columns: Mapping[str, pa.Array], *names: str) -> None:
    for name in names:
        if columns[name][0].as_py() < 0:
            raise SchemaError("negative", path=f"$.{name}")


def _need_entries(columns: Mapping[str, pa.Array], name: str) -> None:
    if columns[name][0].values.null_count:
        raise SchemaError("null entry", path=f"$.{name}")


_PROGRESS_LAYOUTS: Final[dict[type, tuple[RecordLayout[Any], ArraysOf]]] = {
    TurnProgress: (TURN_PROGRESS, _turn_arrays),
    Progress: (PROGRESS, _progress_arrays),
}


def _no_stray_values(columns: Mapping[str, pa.Array], mask: np.ndarray[Any, Any]) -> None:
    """Reject NaN in place of null, which `check_arrays` cannot distinguish."""
    nulls = len(mask) - int(np.count_nonzero(mask))
    for name in ("logprobs", "sampler_logprobs"):
        column = columns.get(name)
        if column is not None and not column.null_count and column[0].values.null_count != nulls:
            raise SchemaError("NaN instead of null", path=f"$.{name}")
