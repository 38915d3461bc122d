"""Tests of watching a run through outages and a cut log."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.core.errors import BusError, InvariantBroken, LogTruncated
from dora_pipe.launch.run import RunConsole


class Scripted:
    def __init__(self, *answers: list[str] | BusError) -> None:
        self._answers = list(answers)

    def lines(self) -> list[str]:
        answer = self._answers.pop(0)
        if isinstance(answer, BusError):
            raise answer
        return answer


def console(reply: list[str], *answers: list[str] | BusError) -> RunConsole:
    view: Any = Scripted(*answers)
    return RunConsole(view, reply.append)


def test_an_outage_is_told_once_and_so_is_its_end() -> None:
    replies: list[str] = []
    away = BusError("nobody answers")
    looks = console(replies, ["step 0"], away, away, away, ["step 1"], [])
    for _ in range(6):
        looks.turn()
    assert replies == [
        "step 0",
        "the log is not reachable (nobody answers); the roles wait",
        "the log is reachable again",
        "step 1",
    ]


def test_a_log_that_was_cut_breaks_the_promise() -> None:
    replies: list[str] = []
    looks = console(replies, LogTruncated("it ends at 5, before the position 9", hint="a copy"))
    with pytest.raises(InvariantBroken, match="ends at 5") as caught:
        looks.turn()
    assert caught.value.hint == "a copy"
    assert replies == []
