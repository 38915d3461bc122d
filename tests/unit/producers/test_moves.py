"""How a request leaves its worker for another, and how it is taken up there: step by step."""

from __future__ import annotations

import pytest

from dora_pipe.core.runtime import Outputs
from dora_pipe.producers.worker.effects import (
    DropKv,
    EngineExport,
    EngineStarted,
    FetchKv,
)
from dora_pipe.producers.worker.kv_handover import label_of
from dora_pipe.producers.worker.request import Phase
from dora_pipe.producers.worker.requests import Requests
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


def _released(requests: Requests) -> RequestReleased:
    (publish,) = [one for one in requests.out.publish if not one.tag]
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
    requests = MAKE[phase]()
    requests.out = Outputs()
    before = state_of(requests)
    requests.move(TRAJECTORY, 1, NOW)
    if phase in MOVED:
        request = requests.by_key.get(KEY)
        assert (request.phase if request else None) == MOVED[phase]
        assert sum(requests.in_phase(one) for one in Phase) == len(requests.by_key)
    else:
        assert state_of(requests) == before
        assert (requests.out.publish, requests.out.effects) == ([], [])
        assert sum(requests.counts.values()) >= 1


@pytest.mark.parametrize("first", ["tokens", "kv"])
def test_running_request_is_released_when_tokens_and_cache_are_safe(first: str) -> None:
    requests = running()
    requests.out = Outputs()
    requests.move(TRAJECTORY, 1, NOW)
    assert requests.out.effects == [EngineExport(request=KEY)]
    assert not requests.generating(0)
    give(requests, "tokens", "exported with kv")
    put, chunk = requests.out.effects[1:]
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
        assert KEY in requests.by_key
        give(requests, name)
    assert requests.by_key == {} and requests.left == {}
    record = _released(requests)
    assert (record.resume, record.kv) == (Resume(tokens=20, partition=0, offset=4), BLOB)


def test_cache_that_could_not_be_kept_is_counted_and_the_request_released() -> None:
    requests = moving("tokens", "exported with kv", "kv not put", "chunk")
    give(requests, "chunk there")
    assert (_released(requests).kv, requests.by_key) == (None, {})
    assert requests.counts["KV cache not handed over: no room"] == 1


def test_progress_under_way_when_a_request_moves_is_waited_for_and_followed_by_the_rest() -> None:
    requests = after(running(), "tokens")
    requests.write_progress()
    requests.move(TRAJECTORY, 1, NOW)
    give(requests, "chunk", "tokens", "exported", "chunk there")
    assert requests.by_key[KEY].phase is Phase.RELEASING
    give(requests, "chunk", "chunk there")
    assert _released(requests).resume == Resume(tokens=40, partition=0, offset=4)


@pytest.mark.parametrize("phase", ["EXPORTING", "RELEASING"])
def test_cancelled_in_the_middle_of_a_move_nothing_is_left(phase: str) -> None:
    requests = MAKE[phase]()
    requests.out = Outputs()
    requests.cancel(TRAJECTORY, 1)
    assert (requests.by_key, requests.out.publish, requests.out.effects) == ({}, [], [])
    give(requests, "kv put")
    assert requests.out.effects == [DropKv(blob=BLOB)]
    assert not any(requests.in_phase(one) for one in Phase)


@pytest.mark.parametrize("phase", ["EXPORTING", "RELEASING"])
def test_worker_that_leaves_in_the_middle_of_a_move_completes_it(phase: str) -> None:
    requests = MAKE[phase]()
    requests.leave()
    requests.hold_versions(NOW)
    assert requests.by_key[KEY].phase.name == phase
    give(requests, *{"EXPORTING": ["exported with kv"], "RELEASING": []}[phase])
    give(requests, "kv put", "chunk", "chunk there")
    assert _released(requests).kv == BLOB and requests.left == {}


def test_cache_that_the_engine_does_not_take_is_counted_and_the_prefill_recorded() -> None:
    requests = after(fresh(RESUME, BLOB), "prompted", "chain", "kv fetched")
    requests.fill(0)
    requests.handle(EngineStarted(request=KEY, at_ns=10**18, why="another shape"), NOW)
    request = requests.by_key[KEY]
    assert (request.kv, request.sequence.prefills) == (None, [2, 4])
    give(requests, "tokens", "stopped")
    assert request.sequence.moves == 0
    assert requests.counts["KV cache not imported: another shape"] == 1


def test_cache_is_asked_for_by_the_tokens_that_it_must_cover() -> None:
    requests = fresh(RESUME, BLOB)
    give(requests, "prompted")
    requests.out = Outputs()
    give(requests, "chain")
    label = label_of(TRAJECTORY, [5, 6, 7, 8])
    assert requests.out.effects == [FetchKv(request=KEY, label=label, blob=BLOB)]


def test_episode_is_not_moved() -> None:
    requests = running(episode=True)
    before = state_of(requests)
    requests.move(TRAJECTORY, 1, NOW)
    assert state_of(requests) == before
    assert requests.counts["moves of episodes refused"] == 1
