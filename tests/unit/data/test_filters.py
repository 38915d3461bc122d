"""Tests of the language of `task.filter`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.data.filters import compile_filter

ROW: dict[str, Any] = {"level": 3, "source": "math", "two words": "x", "tags": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("level >= 3", True),
        ("level > 3 or source == 'math'", True),
        ("not (1 < level < 3)", True),
        ("source in ('gsm8k', 'math') and 'a' in tags", True),
        ("row['two words'] == 'y'", False),
        ("row.get('missing') is None", True),
        ("len(source) % 2 == 0 and source.startswith('ma')", True),
        ("tags[0] == 'b' or tags[-1:] == ['a']", False),
        ("-level < min(0, 1) and int(str(level)) // 2 == 1", True),
        ("source", True),
    ],
)
def test_expression_over_the_columns(text: str, keeps: bool) -> None:
    assert compile_filter(text)(ROW) is keeps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("level >=", "is not an expression"),
        ("level = 3", "is not an expression"),
        ("__import__('os').system('x')", "`.system` is not supported"),
        ("__import__('os')", "no function `__import__`"),
        ("source.__class__", "`.__class__` is not supported"),
        ("(lambda: 1)()", "not a supported call"),
        ("[x for x in tags]", "ListComp"),
        ("lenn(source) > 1", "did you mean `len`?"),
        ("f'{level}'", "JoinedStr"),
        ("(level := 4)", "NamedExpr"),
        ("tags[0](1)", "not a supported call"),
        ("2 ** 999999999", "Pow"),
        ("level\0", "is not an expression"),
    ],
)
def test_anything_else_is_refused_before_a_row_is_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_filter(text)
    assert message in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levle > 3", "no column `levle` did you mean `level`?"),
        ("row['sorce'] > 'a'", "no column `sorce` did you mean `source`?"),
        ("level > 'a'", "not supported between"),
        ("level.startswith('a')", "no attribute 'startswith'"),
        ("tags[7] == 'a'", "index out of range"),
        ("1 / (level - 3) > 1", "division by zero"),
    ],
)
def test_row_that_does_not_fit_is_said(text: str, message: str) -> None:
    keeps = compile_filter(text)
    with pytest.raises(TaskError) as caught:
        keeps(ROW)
    assert message in f"{caught.value.message} {caught.value.hint}"


@given(st.text(max_size=30))
def test_any_text_is_an_expression_or_a_clear_error(text: str) -> None:
    try:
        keeps = compile_filter(text)
    except ConfigError as error:
        assert error.message.startswith("task.filter: ")
        return
    try:
        assert keeps(ROW) in (True, False)
    except TaskError as error:
        assert error.message.startswith("task.filter: ")
