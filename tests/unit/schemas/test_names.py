"""Tests of names of runs and workers."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import ConfigError
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.topics import (
    NAME_CHARACTERS_MAX,
    ROLES,
    Topics,
    check_run_name,
    check_worker_name,
    is_name,
    worker_name_error,
)
from dora_pipe.schemas.trajectory import Headers

ODD = [
    "a.b",
    "a.control",
    "wörker",
    "x" * 600,
    "x" * 101,
    "",
    ".",
    "..",
    "a/b",
    "a b",
    "-a",
    "_a",
    "a\n",
    "a\0",
    "a%s",
]


def headers_with(worker: str) -> Headers:
    return Headers(
        run="r",
        group="g0000000001",
        trajectory="g0000000001-000",
        attempt=1,
        version=0,
        deadline=1,
        digest="a" * 64,
        worker=worker,
        incarnation=0,
        tokens=1,
        sampled=1,
        reward=None,
        schema_version=1,
        sha256="b" * 64,
    )


@pytest.mark.parametrize("name", ODD)
def test_name_that_would_not_do_everywhere_is_refused_in_one_line_with_the_rule(name: str) -> None:
    assert not is_name(name)
    for check in (check_run_name, check_worker_name, Topics):
        with pytest.raises(ConfigError, match="not a ") as refused:
            check(name)
        assert "\n" not in refused.value.message and len(refused.value.message) < 200
        assert "letters, digits" in (refused.value.hint or "")


@pytest.mark.parametrize("name", sorted(ROLES))
def test_worker_is_not_called_as_a_role_is(name: str) -> None:
    check_run_name(name)
    with pytest.raises(ConfigError) as refused:
        check_worker_name(name)
    assert "are roles" in (refused.value.hint or "")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", fullmatch=True))
def test_what_the_rule_allows_is_a_header_a_file_and_a_word(name: str) -> None:
    assert is_name(name) and len(name) <= NAME_CHARACTERS_MAX
    headers = headers_with(name)
    assert parse_headers(header_pairs(headers)) == headers
    assert PurePosixPath("logs") / name == PurePosixPath(f"logs/{name}")
    assert name.split() == [name] and name.isprintable()


@given(st.text(max_size=120))
def test_rule_takes_no_name_that_could_be_mistaken(name: str) -> None:
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if is_name(name):
        assert plain and name[0] not in "-_"
    assert bool(worker_name_error(name)) == (not is_name(name) or name in ROLES)
