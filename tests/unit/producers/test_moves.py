"""How a request leaves its worker for another, and how it is taken up there: step by step."""

from __future__ import annotations

import pytest

from dora_pipe.producers.effects import (
    DropKv,
    EngineAdd,
    EngineCancel,
    EngineExport,
    EngineStarted,
    FetchKv,
)
from dora_pipe.producers.handover import label_of
from dora_pipe.producers.moves import move
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import Phase
from dora_pipe.producers.tasks.calls import Forget
from dora_pipe.producers.transitions import take
from dora_pipe.runtime import Outputs
from dora_pipe.schemas.control import RequestReleased, Resume, decode_control
from tests.support.phases import (
    BLOB,
    KEY,
    KV,
    MAKE,
    NOW,
    RESUME,
    TRAJECTORY,
    after,
    fresh,
    give,
    moving,
    running,
    state_of,
)


def _released(book: Requests) -> RequestReleased:
    (publish,) = [one for one in book.out.publish if not one.tag]
    record = decode_control(publish.record.value)
    assert isinstance(record, RequestReleased)
    return record


MOVED: dict[str, Phase | None] = {
    "PROMPTING": None,
    "RESUMING": None,
    "FETCHING": None,
    "WAITING": None,
    "RUNNING": Phase.EXPORTING,
}
"""Where a move takes a request from a phase; None: it is released at once. Else nothing happens."""


@pytest.mark.parametrize("phase", MAKE)
def test_move_takes_a_request_where_it_can_go_and_else_changes_nothing(phase: str) -> None:
    book = MAKE[phase]()
    book.out = Outputs()
    before = state_of(book)
    move(book, TRAJECTORY, 1, NOW)
    if phase in MOVED:
        row = book.rows.get(KEY)
        assert (row.phase if row else None) == MOVED[phase]
        assert sum(book.in_phase(one) for one in Phase) == len(book.rows)
    else:
        assert state_of(book) == before
        assert (book.out.publish, book.out.effects) == ([], [])
        assert sum(book.counts.values()) >= 1


@pytest.mark.parametrize("handed", [False, True])
def test_request_that_never_ran_is_released_at_once_with_what_it_came_with(handed: bool) -> None:
    book = after(fresh(RESUME, BLOB), "prompted", "chain", "kv fetched")
    if handed:
        book.fill(0)
    book.out = Outputs()
    move(book, TRAJECTORY, 1, NOW)
    record = _released(book)
    assert (record.resume, record.kv, record.attempt, record.epoch) == (RESUME, BLOB, 1, 9)
    assert book.out.effects == [EngineCancel(request=KEY)] * handed
    assert not book.rows and not book.generating(0)


def test_request_whose_progress_was_unusable_is_released_without_its_cache() -> None:
    book = after(fresh(RESUME, BLOB), "prompted", "fetched")
    move(book, TRAJECTORY, 1, NOW)
    assert (_released(book).resume, _released(book).kv) == (None, None)


def test_move_of_a_prompt_that_is_asked_for_forgets_the_question() -> None:
    book = fresh()
    book.out = Outputs()
    move(book, TRAJECTORY, 1, NOW)
    assert book.out.effects == [Forget(request=KEY)]
    assert (_released(book).resume, _released(book).kv) == (None, None)


@pytest.mark.parametrize("first", ["tokens", "kv"])
def test_running_request_is_released_when_tokens_and_cache_are_safe(first: str) -> None:
    book = running()
    book.out = Outputs()
    move(book, TRAJECTORY, 1, NOW)
    assert book.out.effects == [EngineExport(request=KEY)]
    assert not book.generating(0)
    give(book, "tokens", "exported with kv")
    put, chunk = book.out.effects[1:]
    assert (put.kv, put.label) == (KV, label_of(TRAJECTORY, [5, 6] + [7] * 20))
    assert len(chunk.progress.token_ids) == 20
    for name in (
        ("chunk", "chunk there", "kv put")
        if first == "tokens"
        else (
            "kv put",
            "chunk",
            "chunk there",
        )
    ):
        assert KEY in book.rows
        give(book, name)
    assert book.rows == {} and book.left == {}
    record = _released(book)
    assert (record.resume, record.kv) == (Resume(tokens=20, partition=0, offset=4), BLOB)


def test_cache_that_could_not_be_kept_is_counted_and_the_request_released() -> None:
    book = moving("tokens", "exported with kv", "kv not put", "chunk")
    give(book, "chunk there")
    assert (_released(book).kv, book.rows) == (None, {})
    assert book.counts["KV cache not handed over: no room"] == 1


def test_request_without_a_token_of_its_own_is_released_without_its_cache() -> None:
    book = moving("exported with kv")
    assert (_released(book).resume, _released(book).kv) == (None, None)
    assert book.rows == {}


def test_progress_under_way_when_a_request_moves_is_waited_for_and_followed_by_the_rest() -> None:
    book = after(running(), "tokens")
    book.write_progress()
    move(book, TRAJECTORY, 1, NOW)
    give(book, "chunk", "tokens", "exported", "chunk there")
    assert book.rows[KEY].phase is Phase.RELEASING
    give(book, "chunk", "chunk there")
    assert _released(book).resume == Resume(tokens=40, partition=0, offset=4)


def test_request_that_ends_before_it_is_let_go_is_logged_here() -> None:
    book = moving("tokens", "stopped", "rewarded", "encoded", "trajectory there")
    assert book.rows == {} and book.counts["logged"] == 1
    assert book.counts["refused"] == 0


@pytest.mark.parametrize("phase", ["EXPORTING", "RELEASING"])
def test_cancelled_in_the_middle_of_a_move_nothing_is_left(phase: str) -> None:
    book = MAKE[phase]()
    book.out = Outputs()
    book.cancel(TRAJECTORY, 1)
    assert (book.rows, book.out.publish, book.out.effects) == ({}, [], [])
    give(book, "kv put")
    assert book.out.effects == [DropKv(blob=BLOB)]
    assert not any(book.in_phase(one) for one in Phase)


@pytest.mark.parametrize("phase", ["EXPORTING", "RELEASING"])
def test_worker_that_leaves_in_the_middle_of_a_move_completes_it(phase: str) -> None:
    book = MAKE[phase]()
    book.leave()
    book.hold_versions(NOW)
    assert book.rows[KEY].phase.name == phase
    give(book, *{"EXPORTING": ["exported with kv"], "RELEASING": []}[phase])
    give(book, "kv put", "chunk", "chunk there")
    assert _released(book).kv == BLOB and book.left == {}


def test_dropping_a_request_that_came_with_a_cache_drops_the_cache() -> None:
    for names in (["prompted"], ["prompted", "chain"], ["prompted", "chain", "kv fetched"]):
        book = after(fresh(RESUME, BLOB), *names)
        book.out = Outputs()
        book.cancel(TRAJECTORY, 1)
        assert book.out.effects == [DropKv(blob=BLOB)]


def test_cache_goes_into_the_engine_with_its_request_and_is_dropped_when_it_has_started() -> None:
    book = after(fresh(RESUME, BLOB), "prompted", "chain", "kv fetched")
    book.out = Outputs()
    book.fill(0)
    (effect,) = book.out.effects
    assert isinstance(effect, EngineAdd) and effect.request.kv is KV
    book.out = Outputs()
    take(book, EngineStarted(request=KEY, at_ns=10**18, imported=True), NOW)
    assert book.out.effects == [DropKv(blob=BLOB)]
    row = book.rows[KEY]
    assert (row.kv, row.blob, row.sequence.prefills) == (None, None, [2])
    give(book, "tokens", "stopped")
    assert row.sequence.moves == 1 and book.counts["KV caches imported"] == 1


def test_cache_that_the_engine_does_not_take_is_counted_and_the_prefill_recorded() -> None:
    book = after(fresh(RESUME, BLOB), "prompted", "chain", "kv fetched")
    book.fill(0)
    take(book, EngineStarted(request=KEY, at_ns=10**18, why="another shape"), NOW)
    row = book.rows[KEY]
    assert (row.kv, row.sequence.prefills) == (None, [2, 4])
    give(book, "tokens", "stopped")
    assert row.sequence.moves == 0
    assert book.counts["KV cache not imported: another shape"] == 1


def test_cache_is_asked_for_by_the_tokens_that_it_must_cover() -> None:
    book = fresh(RESUME, BLOB)
    give(book, "prompted")
    book.out = Outputs()
    give(book, "chain")
    label = label_of(TRAJECTORY, [5, 6, 7, 8])
    assert book.out.effects == [FetchKv(request=KEY, label=label, blob=BLOB)]


def test_episode_is_not_moved() -> None:
    book = running(episode=True)
    before = state_of(book)
    move(book, TRAJECTORY, 1, NOW)
    assert state_of(book) == before
    assert book.counts["moves of episodes refused"] == 1
