"""Tests of output: escaped control characters, complete identifiers."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.cli import output
from dora_pipe.cli.log import record_line
from dora_pipe.cli.tables import Table
from dora_pipe.core.errors import ConfigError, printable
from dora_pipe.core.pure.records import Record
from dora_pipe.core.system import console

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u2028\u2029\u202e\u2066\r\n\ud800"
DIGEST = "0ba9d3565d780551516b98e3aaebb9fc112e31d1074af28f12dcdb0dfafb9d5f"


def is_harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    "emit",
    [
        lambda: output.emit_line(HOSTILE),
        lambda: output.emit_text(f"{HOSTILE}\n{HOSTILE}"),
        lambda: output.emit_json({HOSTILE: [HOSTILE]}),
        lambda: output.emit_table((HOSTILE, "b"), [(HOSTILE, 1)], title=HOSTILE),
        lambda: output.emit_pairs({HOSTILE: HOSTILE}, title=HOSTILE),
        lambda: console.say(HOSTILE),
        lambda: console.complain(ConfigError(HOSTILE, hint=HOSTILE)),
    ],
)
def test_no_way_to_print_lets_an_escape_sequence_through(
    emit: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    emit()
    printed = capsys.readouterr()
    assert printed.out + printed.err
    assert is_harmless(printed.out + printed.err)


@given(text=st.text())
def test_json_that_is_printed_is_the_same_value_and_harmless(text: str) -> None:
    kept, sys.stdout = sys.stdout, io.StringIO()
    try:
        output.emit_json([text])
        printed = sys.stdout.getvalue()
    finally:
        sys.stdout = kept
    assert json.loads(printed) == [text]
    assert is_harmless(printed)


def test_a_log_is_lines_of_plain_text_but_for_a_traceback() -> None:
    record = logging.LogRecord("x", logging.INFO, "p", 1, "said %s", (HOSTILE,), None)
    lines = console.LogLines("%(levelname)s %(message)s")
    assert lines.format(record) == f"INFO said {printable(HOSTILE)}"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    text = lines.format(record)
    assert is_harmless(text)
    assert "ValueError" in text
    assert text.count("\n") >= 3


def test_stdout_of_ascii_alone_gets_escapes_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.speak()
    output.emit_table(("köln",), [("│ 漢",)])
    sys.stdout.flush()
    assert raw.getvalue().decode("ascii").split() == ["k\\xf6ln", "\\u2502", "\\u6f22"]


def drawn(table: Table) -> str:
    stream = io.StringIO()
    table.print(stream, styled=False)
    return stream.getvalue()


def test_the_last_columns_go_until_every_identifier_is_whole() -> None:
    columns, row = ("place", "worker", "sha256", "digest"), ["control:7", "w0", DIGEST, DIGEST]
    table = Table(columns, [row])
    assert table.fit(100) == ["digest"]
    assert drawn(table).split() == ["place", "worker", "sha256", "control:7", "w0", DIGEST]
    again = Table(columns, [row])
    assert again.fit(30) == ["digest", "sha256"]


def test_sentences_wrap_between_words_and_no_identifier_is_folded_or_cut() -> None:
    table = Table(("id", "why"), [["g0000000042-003", "the earliest deadlines go first " * 5]])
    assert table.fit(40) == []
    text = drawn(table)
    assert "g0000000042-003" in text
    assert max(map(len, text.splitlines())) <= 40
    wide = Table((), [["weights", DIGEST]])
    wide.fit(30)
    assert DIGEST in drawn(wide)


def test_a_pipe_gets_every_column_and_lines_as_long_as_they_are() -> None:
    table = Table(("a", "b"), [["words " * 100, DIGEST]])
    assert table.fit(None) == []
    assert len(drawn(table).splitlines()) == 2


def _record(key: bytes = b"") -> Record:
    return Record(topic="x.control", partition=0, offset=7, key=key, value=b"")


def test_a_record_is_one_line_that_fits_with_every_value_whole() -> None:
    content = {"kind": "step-committed", "at_ns": 1, "digest": DIGEST, "step": 3, "groups": [1, 2]}
    line = record_line(_record(key=b"trainer"), content, 60)
    assert line == "0:7  step-committed  trainer  step=3  groups=[2]  +2"
    assert DIGEST in record_line(_record(), content, None)
    assert "\n" not in record_line(_record(), content, None)


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (("run", "run", "why"), ["run", "run (2)", "why"]),
        (("run", "run (2)", "run"), ["run", "run (2)", "run (3)"]),
        (("id",), ["id"]),
    ],
)
def test_no_table_has_two_columns_of_one_name(
    capsys: pytest.CaptureFixture[str], columns: tuple[str, ...], heads: list[str]
) -> None:
    output.emit_table(columns, [["x"] * len(columns)])
    assert re.split(r" {2,}", capsys.readouterr().out.splitlines()[0].strip()) == heads
