"""Records of other writers: more is ignored; what is missing or of another type is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.arrow_frame import Layout, decompress
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.trajectory_codec import (
    EPISODE_PROGRESS,
    PROGRESS,
    TRAJECTORY,
    TURN_PROGRESS,
    decode_any_progress,
    decode_progress,
    decode_trajectory,
    decode_turn_progress,
    encode_any_progress,
    encode_progress,
    encode_trajectory,
    encode_turn_progress,
)
from dora_pipe.schemas.wire import Unknown, encode
from tests.golden import arrow_values, branched_values, values

EXTRA = {"later_field": {"deep": [1, None]}}


def with_extra(record: msgspec.Struct) -> bytes:
    """A record as a later version writes it: more fields on every level, longer arrays."""

    def grow(value: Any) -> Any:
        if isinstance(value, dict):
            return {**{key: grow(one) for key, one in value.items()}, **EXTRA}
        return [grow(one) for one in value] if isinstance(value, list) else value

    plain = msgspec.json.decode(encode(record))
    free = {key: plain[key] for key in ("config", "args", "figures", "settings", "numerics")
            if key in plain}  # fmt: skip
    progress = {key: plain[key] for key in ("progress",) if key in plain}
    return msgspec.json.encode({**grow(plain), **free, **progress})


@pytest.mark.parametrize("record", values.CONTROL, ids=lambda one: type(one).__name__)
def test_control_record_with_later_fields_is_read(record: control.AnyControl) -> None:
    assert control.decode_control(with_extra(record)) == record


@pytest.mark.parametrize("record", values.METRICS, ids=lambda one: type(one).__name__)
def test_metrics_record_with_later_fields_is_read(record: metrics.AnyMetrics) -> None:
    assert metrics.decode_metrics(with_extra(record)) == record


def test_round_with_later_fields_is_read() -> None:
    plain = msgspec.json.decode(encode(values.ROUND))
    plain |= EXTRA
    plain["decisions"][0] |= EXTRA
    plain["decisions"][0]["spec"] |= EXTRA
    place = plain["decisions"][1]
    place["siblings"][0][2].append("later")
    place["siblings"][1].append("later")
    plain["observations"][0] |= EXTRA
    assert rounds.decode_round(msgspec.json.encode(plain)) == values.ROUND


@pytest.mark.parametrize("decode", [control.decode_control, metrics.decode_metrics])
def test_record_of_a_later_kind_is_kept_and_named(decode: Any) -> None:
    raw = b'{"kind":"later-kind","anything":[1,2]}'
    assert decode(raw) == Unknown(kind="later-kind", raw=raw)


@pytest.mark.parametrize("place", ["decisions", "observations"])
def test_round_with_a_later_kind_inside_is_refused_with_its_place(place: str) -> None:
    plain = msgspec.json.decode(encode(values.ROUND))
    plain[place].insert(1, {"kind": "later-kind", "reason": "a fold must not skip this"})
    with pytest.raises(SchemaError) as found:
        rounds.decode_round(msgspec.json.encode(plain))
    assert found.value.path.startswith(f"$.{place}[")
    assert "later-kind" in str(found.value)


def test_trajectory_with_later_columns_keys_and_segment_fields_is_read() -> None:
    row = columns_of(encode_trajectory(arrow_values.TRAJECTORY)[0])
    row["later_column"] = pa.array([[1.5, None]])
    row["later_null"] = pa.nulls(1)
    meta = msgspec.json.decode(row["meta_json"][0].as_py())
    row["meta_json"] = pa.array([msgspec.json.encode({**meta, **EXTRA}).decode()])
    segments = row["segments"].to_pylist()[0]
    row["segments"] = pa.array([[{**one, "later": "x", "also": 1} for one in segments]],
        pa.list_(pa.struct([*TRAJECTORY.schema.field("segments").type.value_type,
                            ("later", pa.utf8()), ("also", pa.int8())])))  # fmt: skip
    assert decode_trajectory(sealed(row)) == arrow_values.TRAJECTORY


def test_columns_in_another_order_are_read() -> None:
    row = columns_of(encode_trajectory(arrow_values.TRAJECTORY)[0])
    assert decode_trajectory(sealed(dict(reversed(row.items())))) == arrow_values.TRAJECTORY


def test_absent_columns_with_a_meaning_get_it() -> None:
    row = columns_of(encode_trajectory(arrow_values.PLAIN_TRAJECTORY)[0])
    del row["sampler_logprobs"], row["reward"]
    assert decode_trajectory(sealed(row)) == arrow_values.PLAIN_TRAJECTORY


def test_absent_segment_fields_with_a_default_get_it() -> None:
    row = columns_of(encode_trajectory(arrow_values.PLAIN_TRAJECTORY)[0])
    segments = row["segments"].to_pylist()[0]
    kept = [{key: one[key] for key in list(one)[:6]} for one in segments]
    kinds = list(TRAJECTORY.schema.field("segments").type.value_type)[:6]
    row["segments"] = pa.array([kept], pa.list_(pa.struct(kinds)))
    read = decode_trajectory(sealed(row)).segments
    assert [(one.kind, one.worker, one.epoch, one.ok) for one in read] == [
        ("prompt", "", -1, True),
        ("model", "", -1, True),
    ]


@pytest.mark.parametrize("name", [f.name for f in TRAJECTORY.schema if not f.nullable])
def test_absent_trajectory_column_is_refused_by_name(name: str) -> None:
    row = columns_of(encode_trajectory(arrow_values.TRAJECTORY)[0])
    del row[name]
    with pytest.raises(SchemaError, match="0 columns") as found:
        decode_trajectory(sealed(row))
    assert found.value.path == f"$.{name}"


@pytest.mark.parametrize("name", TRAJECTORY.schema.names)
def test_trajectory_column_of_another_type_is_refused_by_name(name: str) -> None:
    row = columns_of(encode_trajectory(arrow_values.TRAJECTORY)[0])
    row[name] = pa.array([b"bytes"])
    with pytest.raises(SchemaError, match="column is binary, not") as found:
        decode_trajectory(sealed(row))
    assert found.value.path == f"$.{name}"


@pytest.mark.parametrize("name", PROGRESS.schema.names)
def test_progress_column_of_another_type_is_refused_by_name(name: str) -> None:
    row = columns_of(encode_progress(arrow_values.PROGRESS), PROGRESS)
    row[name] = pa.array([[[1]]])
    with pytest.raises(SchemaError, match="column is list") as found:
        decode_progress(sealed(row))
    assert found.value.path == f"$.{name}"


@pytest.mark.parametrize("name", TURN_PROGRESS.schema.names)
def test_column_of_a_call_s_progress_of_another_type_is_refused_by_name(name: str) -> None:
    row = columns_of(encode_turn_progress(branched_values.TURN_PROGRESS), TURN_PROGRESS)
    row[name] = pa.array([[[1]]])
    with pytest.raises(SchemaError, match="column is list") as found:
        decode_turn_progress(sealed(row))
    assert found.value.path == f"$.{name}"


@pytest.mark.parametrize("name", EPISODE_PROGRESS.schema.names)
def test_column_of_an_episode_s_progress_of_another_type_is_refused_by_name(name: str) -> None:
    row = columns_of(encode_any_progress(branched_values.EPISODE_PROGRESS), EPISODE_PROGRESS)
    row[name] = pa.array([[[1]]])
    with pytest.raises(SchemaError, match="column is list") as found:
        decode_any_progress(sealed(row))
    assert found.value.path == f"$.{name}"


def test_later_header_is_ignored() -> None:
    pairs = (*header_pairs(arrow_values.HEADERS), ("later", b"\xff"), ("later", b""))
    assert parse_headers(pairs) == arrow_values.HEADERS


def columns_of(value: bytes, layout: Layout = TRAJECTORY) -> dict[str, pa.Array]:
    """The columns of a record, to be changed."""
    return dict(layout.opened(decompress(value)).arrays)


def sealed(columns: dict[str, pa.Array]) -> bytes:
    """A record as another writer makes it: with these columns, by Arrow's own writer."""
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return zstandard.compress(sink.getvalue().to_pybytes())
