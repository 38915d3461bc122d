"""Tests of digests that name their form."""

from __future__ import annotations

from hashlib import sha256

import pytest
from blake3 import blake3

from dora_pipe.schemas.wire import BLAKE3_BYTES_MIN, DIGEST, digest_as, value_digest

LARGE = bytes(range(256)) * (BLAKE3_BYTES_MIN // 256)


def test_a_large_value_has_a_digest_that_says_its_form_and_others_have_the_one_they_had() -> None:
    assert value_digest(LARGE) == "blake3-" + blake3(LARGE).hexdigest()
    assert value_digest(LARGE[:-1]) == sha256(LARGE[:-1]).hexdigest()


def test_a_value_is_digested_in_the_form_that_was_named_whatever_its_size() -> None:
    named = sha256(LARGE).hexdigest()
    assert digest_as(named, LARGE) == named, "logs of older versions stay what they were"
    assert digest_as("blake3-" + "0" * 64, b"x") == "blake3-" + blake3(b"x").hexdigest()
    assert digest_as("", b"x") == digest_as("what is this", b"x") == sha256(b"x").hexdigest()


def test_a_value_that_shows_itself_where_it_lies_has_the_same_digest() -> None:
    assert value_digest(memoryview(LARGE)) == value_digest(LARGE)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a" * 63, "a" * 65, "A" * 64, "blake3-", "blake2-" + "a" * 64])
def test_what_is_no_digest_of_either_form_is_none(text: str) -> None:
    assert DIGEST.fullmatch(text) is None
    assert DIGEST.fullmatch("a" * 64) and DIGEST.fullmatch("blake3-" + "a" * 64)
