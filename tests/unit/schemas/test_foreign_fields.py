"""Tests of records from other writers: extra, missing and mistyped fields."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.arrow_frame import decompress
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.trajectory_codec import (
    TRAJECTORY,
    decode_any_progress,
    decode_trajectory,
    encode_trajectory,
)
from dora_pipe.schemas.wire import Unknown, encode
from tests.golden import arrow_values, values

EXTRA = {"later_field": {"deep": [1, None]}}


def with_extra(record: msgspec.Struct) -> bytes:
    def grow(value: Any) -> Any:
        if isinstance(value, dict):
            return {**{key: grow(entry) for key, entry in value.items()}, **EXTRA}
        return [grow(entry) for entry in value] if isinstance(value, list) else value

    plain = msgspec.json.decode(encode(record))
    free = {key: plain[key] for key in ("config", "args", "metrics", "settings", "numerics")
            if key in plain}  # fmt: skip
    progress = {key: plain[key] for key in ("progress",) if key in plain}
    return msgspec.json.encode({**grow(plain), **free, **progress})


@pytest.mark.parametrize("record", values.CONTROL, ids=lambda value: type(value).__name__)
def test_control_record_with_later_fields_is_read(record: control.AnyControl) -> None:
    assert control.decode_control(with_extra(record)) == record


@pytest.mark.parametrize("record", values.METRICS, ids=lambda value: type(value).__name__)
def test_metrics_record_with_later_fields_is_read(record: metrics.AnyMetrics) -> None:
    assert metrics.decode_metrics(with_extra(record)) == record


def test_round_with_later_fields_is_read() -> None:
    plain = msgspec.json.decode(encode(values.ROUND))
    plain |= EXTRA
    plain["decisions"][0] |= EXTRA
    plain["decisions"][0]["spec"] |= EXTRA
    index = plain["decisions"][1]
    index["samples"][0][2].append("later")
    index["samples"][1].append("later")
    plain["observations"][0] |= EXTRA
    assert rounds.decode_round(msgspec.json.encode(plain)) == values.ROUND


@pytest.mark.parametrize("decode", [control.decode_control, metrics.decode_metrics])
def test_record_of_a_later_kind_is_kept_and_named(decode: Any) -> None:
    raw = b'{"kind":"later-kind","anything":[1,2]}'
    assert decode(raw) == Unknown(kind="later-kind", raw=raw)


@pytest.mark.parametrize("index", ["decisions", "observations"])
def test_round_with_a_later_kind_inside_is_refused_with_its_place(index: str) -> None:
    plain = msgspec.json.decode(encode(values.ROUND))
    plain[index].insert(1, {"kind": "later-kind", "reason": "a fold must not skip this"})
    with pytest.raises(SchemaError) as raised:
        rounds.decode_round(msgspec.json.encode(plain))
    assert raised.value.path.startswith(f"$.{index}[")
    assert "later-kind" in str(raised.value)


def test_a_record_of_other_columns_is_refused() -> None:
    row = columns_of(encode_trajectory(arrow_values.PLAIN_TRAJECTORY)[0])
    assert decode_trajectory(sealed(row)) == arrow_values.PLAIN_TRAJECTORY
    for changed in (
        {**row, "later": pa.array([1])},
        dict(reversed(row.items())),
        {name: column for name, column in row.items() if name != "reward"},
        {**row, "version": pa.array([3], pa.int32())},
        {"later": pa.array([1])},
    ):
        for decode in (decode_trajectory, decode_any_progress):
            with pytest.raises(SchemaError, match="columns are not those of this record"):
                decode(sealed(changed))


def test_later_header_is_ignored() -> None:
    pairs = (*header_pairs(arrow_values.HEADERS), ("later", b"\xff"), ("later", b""))
    assert parse_headers(pairs) == arrow_values.HEADERS


def columns_of(value: bytes) -> dict[str, pa.Array]:
    return dict(TRAJECTORY.opened(decompress(value)).arrays)


def sealed(columns: dict[str, pa.Array]) -> bytes:
    schema = TRAJECTORY.schema if list(columns) == TRAJECTORY.schema.names else None
    if schema is not None and any(columns[key.name].type != key.type for key in schema):
        schema = None
    batch = pa.record_batch(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return zstandard.compress(sink.getvalue().to_pybytes())
