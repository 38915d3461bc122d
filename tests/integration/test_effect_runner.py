"""Tests of the effect runner: ordered answers in bounded memory, also after exceptions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, ends_role, unanswered

WAIT_S = 60.0


@dataclass(frozen=True)
class Say:
    text: str
    times: int = 1


@dataclass(frozen=True)
class Said:
    text: str


def _say(effect: Say) -> Iterator[Said | None]:
    if effect.text == "wait":
        yield None
    if effect.text == "bad":
        raise ValueError("x" * 5000)
    for _ in range(effect.times):
        yield Said(effect.text)


def _not_said(effect: Say, error: Exception) -> list[Said]:
    return [Said(f"{effect.text} failed: {type(error).__name__}")]


SAY = [Handler(Say, _say, _not_said)]


def drained(runner: EffectRunner[Say, Said], count: int) -> list[Any]:
    events: list[Any] = []
    until_s = time.monotonic() + WAIT_S
    while len(events) < count and time.monotonic() < until_s:
        events += runner.poll()
        time.sleep(0.001)
    return events


@pytest.mark.parametrize("in_thread", [False, True])
def test_effects_are_done_in_order_and_a_failure_stands_in_its_place(
    in_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runner = EffectRunner[Say, Said]("test", SAY, in_thread=in_thread)
    for text in ("a", "bad", "wait", "b"):
        runner.start(Say(text))
    texts = [entry.text for entry in drained(runner, 4)]
    assert texts == ["a", "bad failed: ValueError", "wait", "b"]
    assert not runner.busy and not runner.working
    runner.close()
    lines = caplog.text.splitlines()
    assert "Say failed: ValueError: xxx" in lines[0] and len(lines[0]) < 2200
    assert "in _say" in caplog.text, "a fault of our own is logged with its place"


def test_effect_without_an_answer_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    runner = EffectRunner[Say, Said]("test", [Handler(Say, _say, unanswered)])
    runner.start(Say("bad"))
    runner.start(Say("a"))
    assert drained(runner, 1) == [Said("a")]
    assert "Say failed: ValueError" in caplog.text
    runner.close()


def test_failure_that_ends_the_role_is_raised_behind_the_events_before_it() -> None:
    runner = EffectRunner[Say, Said]("test", [Handler(Say, _say, ends_role)])
    runner.start(Say("a"))
    runner.start(Say("bad"))
    assert drained(runner, 1) == [Said("a")]
    with pytest.raises(ValueError, match="xxx"):
        drained(runner, 1)
    runner.close()


def test_what_there_is_no_room_for_has_failed() -> None:
    begun, go = threading.Event(), threading.Event()

    def held(effect: Say) -> Iterator[Said]:
        begun.set()
        assert go.wait(WAIT_S)
        yield from (entry for entry in _say(effect) if entry)

    runner = EffectRunner[Say, Said]("test", [Handler(Say, held, _not_said)], asked_max=1)
    runner.start(Say("a"))
    assert begun.wait(WAIT_S)
    runner.start(Say("b"))
    runner.start(Say("c"))
    assert runner.poll() == [Said("c failed: ResourceError")]
    go.set()
    assert drained(runner, 2) == [Said("a"), Said("b")]
    runner.close()


def test_thread_waits_where_nobody_takes_its_events_and_closing_frees_it() -> None:
    runner = EffectRunner[Say, Said]("test", SAY, events_max=3)
    runner.start(Say("a", times=10))
    until_s = time.monotonic() + WAIT_S
    while len(runner._events) < 3:
        assert time.monotonic() < until_s
    time.sleep(0.05)
    assert len(runner._events) == 3 and runner.working
    assert len(drained(runner, 10)) == 10
    runner.start(Say("b", times=10))
    runner.close()
    assert len(runner.poll()) == 10, "what was asked is done"


def test_closing_at_once_leaves_the_thread_between_two_events() -> None:
    second = threading.Event()

    def endless(effect: Say) -> Iterator[Said]:
        while True:
            yield Said("again")
            second.set()
            time.sleep(0.001)

    runner = EffectRunner[Say, Said]("test", [Handler(Say, endless, ends_role)], finish=False)
    runner.start(Say("a"))
    assert second.wait(WAIT_S)
    began_s = time.monotonic()
    runner.close()
    runner.close()
    assert time.monotonic() - began_s < WAIT_S / 2


def test_idle_work_runs_between_effects_and_what_it_raises_is_told() -> None:
    looks: list[int] = []
    opened: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        opened.append(threading.current_thread().name)
        yield
        opened.append("left")

    def idle() -> Iterator[Said]:
        looks.append(1)
        if len(looks) > 3:
            raise ResourceError("the disk is gone")
        yield Said("idle")

    runner = EffectRunner[Say, Said]("test", SAY, around=around(), idle=idle, idle_s=0.001)
    assert drained(runner, 3) == [Said("idle")] * 3
    with pytest.raises(ResourceError, match="the disk is gone"):
        drained(runner, 1)
    runner.close()
    assert opened == ["test"], "who is thrown out does not leave in order"
