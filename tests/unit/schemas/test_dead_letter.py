"""Tests of dead letters with the record or its location."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.dead_letter import (
    HEADER,
    REASON_CHARACTERS_MAX,
    decode_dead_letter,
    encode_dead_letter,
)
from tests.golden.arrow_values import DEAD_LETTER

BYTES_MAX = 100_000


def test_value_is_kept_byte_for_byte_and_the_reason_is_readable() -> None:
    value, headers = encode_dead_letter(DEAD_LETTER, max_record_bytes=BYTES_MAX)
    assert value == DEAD_LETTER.value
    letter = msgspec.json.decode(dict(headers)[HEADER])
    assert (letter["topic"], letter["offset"], letter["reason"]) == (
        "demo.trajectories",
        91,
        DEAD_LETTER.reason,
    )


def test_value_that_does_not_fit_is_left_out_but_named() -> None:
    large = replace(DEAD_LETTER, value=b"x" * BYTES_MAX)
    value, headers = encode_dead_letter(large, max_record_bytes=BYTES_MAX)
    assert value == b""
    letter = msgspec.json.decode(dict(headers)[HEADER])
    assert (letter["bytes"], letter["kept"]) == (BYTES_MAX, False)
    assert decode_dead_letter(value, headers) == replace(large, value=None)


def test_what_is_written_fits_into_its_record() -> None:
    for size in range(BYTES_MAX - 3000, BYTES_MAX, 100):
        value, headers = encode_dead_letter(
            replace(DEAD_LETTER, value=bytes(size)), max_record_bytes=BYTES_MAX
        )
        assert len(value) + sum(len(name) + len(data) for name, data in headers) < BYTES_MAX


def test_headers_that_alone_do_not_fit_are_refused() -> None:
    with pytest.raises(SchemaError, match="is above"):
        encode_dead_letter(
            replace(DEAD_LETTER, headers=(("x", bytes(BYTES_MAX)),)), max_record_bytes=BYTES_MAX
        )


def test_endless_reason_is_cut() -> None:
    value, headers = encode_dead_letter(
        replace(DEAD_LETTER, reason="y" * 10 * REASON_CHARACTERS_MAX), max_record_bytes=BYTES_MAX
    )
    assert len(decode_dead_letter(value, headers).reason) == REASON_CHARACTERS_MAX


def test_value_that_was_changed_afterwards_is_refused() -> None:
    value, headers = encode_dead_letter(DEAD_LETTER, max_record_bytes=BYTES_MAX)
    with pytest.raises(SchemaError, match="not the one that was kept") as raised:
        decode_dead_letter(value + b"x", headers)
    assert raised.value.path == "$.value"


def test_record_without_the_header_is_no_dead_letter() -> None:
    with pytest.raises(SchemaError, match="header is missing") as raised:
        decode_dead_letter(b"", [("run", b"demo")])
    assert raised.value.path == "$.headers.dead-letter"


def test_key_that_is_not_base64_is_refused() -> None:
    value, headers = encode_dead_letter(DEAD_LETTER, max_record_bytes=BYTES_MAX)
    header = headers[0][1].replace(b'"key":"', b'"key":"!')
    with pytest.raises(SchemaError, match="not base64"):
        decode_dead_letter(value, [(HEADER, header)])
