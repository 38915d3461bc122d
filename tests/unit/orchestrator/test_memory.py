"""Garbage is looked for where the loop waits: what is new each time, everything now and then."""

from __future__ import annotations

import gc

import pytest

from dora_pipe.orchestrator.role import FULL_EVERY, GARBAGE_MAX, Tidying, settle_memory


def test_everything_is_looked_at_now_and_then_and_what_is_new_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(gc, "collect", asked.append)
    tidy = Tidying()
    for _ in range(FULL_EVERY):
        tidy()
    assert asked == [1] * (FULL_EVERY - 1) + [2]


def test_a_turn_looks_for_garbage_only_after_very_much_of_it() -> None:
    before = gc.get_threshold()
    try:
        settle_memory()
        assert gc.isenabled() and gc.get_threshold()[0] == GARBAGE_MAX
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
