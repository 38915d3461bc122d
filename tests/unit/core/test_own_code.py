"""Tests of the line at which a user's code raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora_pipe.core.system.own_code import importable, load_function, raised_at
from dora_pipe.producers.tasks.messages import finite

BROKEN = {
    "its own": ("def reward(text):\n    return text[5]\n", 2),
    "deeper": ("def look(a):\n    return a[5]\ndef reward(a):\n    return look(a)\n", 2),
    "in a library": ("import json\ndef reward(text):\n    return json.loads(text)\n", 3),
}


@pytest.mark.parametrize("case", BROKEN)
def test_innermost_line_of_the_users_code_is_named(case: str, tmp_path: Path) -> None:
    source, line = BROKEN[case]
    name = f"broken_{case.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(source)
    with importable(str(tmp_path)):
        reward = load_function("task.reward", f"{name}:reward")
    with pytest.raises((IndexError, json.JSONDecodeError)) as caught:
        reward("{")
    assert _without_tests(caught.value) == f"{name}.py:{line}"


def test_errors_of_this_package_have_no_line_of_the_users() -> None:
    with pytest.raises(Exception) as caught:
        finite("the reward", None)
    assert _without_tests(caught.value) == ""


def _without_tests(error: BaseException) -> str:
    assert error.__traceback__ is not None
    return raised_at(error.with_traceback(error.__traceback__.tb_next))
