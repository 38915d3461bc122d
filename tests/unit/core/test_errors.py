"""Tests of one-line, terminal-safe errors."""

import pytest

from dora_pipe.core.errors import MESSAGE_CHARACTERS_MAX, ConfigError, SchemaError, install_hint


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    error = ConfigError("unknown key `a\nb\x1b[2J\ud800`")
    assert error.message == str(error) == "unknown key `a\\nb\\x1b[2J\\ud800`"


@pytest.mark.parametrize("length", [MESSAGE_CHARACTERS_MAX, MESSAGE_CHARACTERS_MAX + 1, 10**6])
def test_message_is_not_endless(length: int) -> None:
    assert len(ConfigError("x" * length).message) == MESSAGE_CHARACTERS_MAX


def test_place_stands_behind_a_message_that_was_cut() -> None:
    error = SchemaError("x" * 10**6, path="$.trajectory")
    assert error.message.endswith("... (at $.trajectory)")
    assert len(SchemaError("x" * 10**6, path="y" * 10**6).message) <= MESSAGE_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("checkout", "command"),
    [
        (True, "pip install -e '.[chat]'"),
        (False, "pip install 'dora_pipe-VERSION-py3-none-any.whl[chat]'"),
    ],
)
def test_an_extra_is_installed_from_a_checkout_or_a_wheel(checkout: bool, command: str) -> None:
    assert install_hint("chat", checkout=checkout) == command
