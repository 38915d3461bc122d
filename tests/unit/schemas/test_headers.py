"""Tests of record headers: values, missing and wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.headers import describe, header_pairs, matches, parse_headers
from dora_pipe.schemas.trajectory import Headers
from tests.golden.arrow_values import HEADERS, PLAIN_TRAJECTORY, TRAJECTORY

REQUIRED = [name for name in Headers.__struct_fields__ if name != "traceparent"]


def pairs_with(**changes: bytes | None) -> list[tuple[str, bytes]]:
    results: dict[str, bytes | None] = {**dict(header_pairs(HEADERS)), **changes}
    return [(name, value) for name, value in results.items() if value is not None]


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_header_is_named(name: str) -> None:
    with pytest.raises(SchemaError, match="header is missing") as raised:
        parse_headers(pairs_with(**{name: None}))
    assert raised.value.path == f"$.headers.{name}"


def test_missing_traceparent_is_nothing_to_complain_about() -> None:
    assert parse_headers(pairs_with(traceparent=None)) == msgspec.structs.replace(
        HEADERS, traceparent=""
    )


@pytest.mark.parametrize("name", REQUIRED)
def test_header_that_is_there_twice_is_named(name: str) -> None:
    pairs = pairs_with()
    with pytest.raises(SchemaError, match="twice") as raised:
        parse_headers([*pairs, *(pair for pair in pairs if pair[0] == name)])
    assert raised.value.path == f"$.headers.{name}"


@pytest.mark.parametrize("name", REQUIRED)
def test_header_that_is_not_ascii_is_named(name: str) -> None:
    with pytest.raises(SchemaError, match="not ASCII") as raised:
        parse_headers(pairs_with(**{name: b"\xc3\xb6"}))
    assert raised.value.path == f"$.headers.{name}"


@pytest.mark.parametrize(
    "text", [b"", b"1.0", b"+1", b" 1", b"01", b"1_0", b"0x1", b"-", b"9" * 20]
)
def test_version_that_is_not_a_plain_integer_is_refused(text: bytes) -> None:
    with pytest.raises(SchemaError, match="not an integer") as raised:
        parse_headers(pairs_with(version=text))
    assert raised.value.path == "$.headers.version"


@pytest.mark.parametrize("text", [b"nan", b"inf", b"-inf", b"1e999", b"high", b"None"])
def test_reward_that_is_not_a_finite_number_is_refused(text: bytes) -> None:
    with pytest.raises(SchemaError, match="not a finite number") as raised:
        parse_headers(pairs_with(reward=text))
    assert raised.value.path == "$.headers.reward"


@pytest.mark.parametrize("name", ["digest", "sha256"])
@pytest.mark.parametrize("text", [b"", b"a1", b"A1" * 32, b"zz" * 32, b"a1" * 33])
def test_digest_that_is_none_is_refused(name: str, text: bytes) -> None:
    with pytest.raises(SchemaError, match="64 hex digits") as raised:
        parse_headers(pairs_with(**{name: text}))
    assert raised.value.path == f"$.headers.{name}"


@pytest.mark.parametrize("reward", [None, 0.0, -0.0, 1 / 3, -1e300, 5e-324])
def test_reward_survives_exactly_and_none_is_not_zero(reward: float | None) -> None:
    back = parse_headers(header_pairs(msgspec.structs.replace(HEADERS, reward=reward))).reward
    assert repr(back) == repr(reward)


def test_evaluation_has_its_deadline_of_minus_one() -> None:
    headers = parse_headers(header_pairs(describe(PLAIN_TRAJECTORY, sha256="ab" * 32)))
    assert (headers.deadline, headers.reward) == (-1, None)


def test_worker_name_that_is_not_ascii_is_refused_by_the_writer() -> None:
    meta = msgspec.structs.replace(TRAJECTORY.meta, worker="w\u00f6")
    with pytest.raises(SchemaError, match="not ASCII") as raised:
        header_pairs(describe(replace(TRAJECTORY, meta=meta), sha256="ab" * 32))
    assert raised.value.path == "$.headers.worker"


def test_headers_of_a_trajectory_say_what_it_says() -> None:
    headers = describe(TRAJECTORY, sha256="ab" * 32, traceparent="00-x")
    assert headers == msgspec.structs.replace(HEADERS, sha256="ab" * 32, traceparent="00-x")
    assert matches(headers, TRAJECTORY) == []


DISAGREEING: dict[str, Any] = {
    "run": "other",
    "group": "g0000000041",
    "trajectory": "g0000000042-004",
    "attempt": 3,
    "version": 4,
    "deadline": 6,
    "digest": "00" * 32,
    "worker": "w9",
    "incarnation": 8,
    "tokens": 11,
    "sampled": 6,
    "reward": None,
    "schema_version": 2,
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_header_that_disagrees_with_the_value_is_named(name: str) -> None:
    wrong = msgspec.structs.replace(HEADERS, **{name: DISAGREEING[name]})
    assert matches(wrong, TRAJECTORY) == [name]


def test_every_header_is_compared_but_two() -> None:
    assert set(Headers.__struct_fields__) - set(DISAGREEING) == {"sha256", "traceparent"}


def _outcome(pairs: Any) -> Any:
    try:
        return parse_headers(pairs)
    except SchemaError as error:
        return error.path, error.message


@given(st.data())
def test_headers_in_another_order_say_the_same(data: st.DataObject) -> None:
    pairs = list(header_pairs(HEADERS))
    for index in data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=2)):
        strange = st.sampled_from([b"", b"1", b"-0", b"1.5", b"nan", b"a\nb", b"\n", b"x" * 501])
        pairs[index] = pairs[index][0], data.draw(strange | st.binary(max_size=4))
    assert _outcome(pairs) == _outcome([*pairs, ("of a later version", b"\xff")])
    if isinstance(expected := _outcome(pairs), Headers):
        assert _outcome(pairs[::-1]) == expected


def test_text_with_a_newline_is_what_it_says() -> None:
    headers = parse_headers(pairs_with(worker=b"a\nb"))
    assert (headers.worker, headers.incarnation) == ("a\nb", HEADERS.incarnation)
