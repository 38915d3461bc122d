"""The table of phases: every event in every phase either does what the table says, or nothing."""

from __future__ import annotations

import pytest

from dora_pipe.core.runtime import Outputs
from dora_pipe.producers.tasks.calls import Forget
from dora_pipe.producers.worker.effects import (
    DropKv,
    EncodeProgress,
)
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import RequestFailed, Resume, decode_control
from dora_pipe.schemas.trajectory import Progress
from tests.support.phases import (
    BLOB,
    EVENTS,
    KEY,
    MAKE,
    NOW,
    TRAJECTORY,
    after,
    give,
    running,
    state_of,
)
from tests.unit.producers.test_sessions import PHASES

TABLE: dict[tuple[str, str], Phase | None] = {
    ("PROMPTING", "prompted"): Phase.WAITING,
    ("PROMPTING", "episode"): Phase.WAITING,
    ("PROMPTING", "task failed"): None,
    ("PROMPTING", "episode lost"): Phase.PROMPTING,
    ("RESUMING", "fetched"): Phase.WAITING,
    ("RESUMING", "chain"): Phase.WAITING,
    ("WAITING", "started"): Phase.RUNNING,
    ("WAITING", "episode lost"): Phase.PROMPTING,
    ("RUNNING", "tokens"): Phase.RUNNING,
    ("RUNNING", "stopped"): Phase.REWARDING,
    ("RUNNING", "engine error"): Phase.ENCODING,
    ("RUNNING", "chunk"): Phase.RUNNING,
    ("RUNNING", "chunk there"): Phase.RUNNING,
    ("RUNNING", "encode failed"): None,
    ("RUNNING", "episode lost"): Phase.PROMPTING,
    ("ENVIRONMENT", "observed"): Phase.WAITING,
    ("ENVIRONMENT", "done"): Phase.REWARDING,
    ("ENVIRONMENT", "task failed"): Phase.ENCODING,
    ("ENVIRONMENT", "episode lost"): Phase.PROMPTING,
    ("REWARDING", "rewarded"): Phase.ENCODING,
    ("REWARDING", "task failed"): Phase.ENCODING,
    ("REWARDING", "episode lost"): Phase.PROMPTING,
    ("REWARDING", "chunk"): Phase.REWARDING,
    ("REWARDING", "chunk there"): Phase.REWARDING,
    ("ENCODING", "encoded"): Phase.LOGGING,
    ("ENCODING", "too large"): None,
    ("ENCODING", "encode failed"): None,
    ("ENCODING", "chunk"): Phase.ENCODING,
    ("ENCODING", "chunk there"): Phase.ENCODING,
    ("LOGGING", "trajectory there"): None,
    ("LOGGING", "chunk"): Phase.LOGGING,
    ("LOGGING", "chunk there"): Phase.LOGGING,
    ("FETCHING", "kv fetched"): Phase.WAITING,
    ("FETCHING", "kv not fetched"): Phase.WAITING,
    ("EXPORTING", "tokens"): Phase.EXPORTING,
    ("EXPORTING", "stopped"): Phase.REWARDING,
    ("EXPORTING", "engine error"): Phase.ENCODING,
    ("EXPORTING", "exported"): Phase.RELEASING,
    ("EXPORTING", "exported with kv"): Phase.RELEASING,
    ("EXPORTING", "chunk"): Phase.EXPORTING,
    ("EXPORTING", "chunk there"): Phase.EXPORTING,
    ("EXPORTING", "encode failed"): None,
    ("RELEASING", "kv put"): Phase.RELEASING,
    ("RELEASING", "kv not put"): Phase.RELEASING,
    ("RELEASING", "chunk"): Phase.RELEASING,
    ("RELEASING", "chunk there"): Phase.RELEASING,
    ("RELEASING", "encode failed"): None,
    ("LEAVING", "chunk"): Phase.LEAVING,
    ("LEAVING", "chunk there"): None,
    ("LEAVING", "encode failed"): None,
}
"""From a phase, by an event, to a phase; None: the request is gone. All else is refused."""


@pytest.mark.parametrize("phase", MAKE)
def test_every_phase_is_reached_by_its_recipe(phase: str) -> None:
    requests = MAKE[phase]()
    assert requests.by_key[KEY].phase.name == phase
    assert requests.in_phase(Phase[phase]) == 1
    assert requests.counts["refused"] == 0


def test_recipes_cover_every_phase() -> None:
    assert set(MAKE) | PHASES == {phase.name for phase in Phase}


@pytest.mark.parametrize("phase", MAKE)
def test_events_take_a_request_where_the_table_says_or_change_nothing(phase: str) -> None:
    for event in EVENTS:
        requests = MAKE[phase]()
        requests.out = Outputs()
        before = state_of(requests)
        give(requests, event)
        if (phase, event) in TABLE:
            request = requests.by_key.get(KEY)
            assert (request.phase if request else None) == TABLE[phase, event], event
            assert requests.counts["refused"] == 0, event
            total = sum(requests.in_phase(one) for one in Phase)
            assert total == len(requests.by_key), event
        else:
            assert requests.counts["refused"] == 1, event
            assert (requests.out.publish, requests.out.effects) == ([], []), event
            assert state_of(requests) == before, event


@pytest.mark.parametrize("event", EVENTS)
def test_event_of_a_request_that_was_dropped_is_ignored(event: str) -> None:
    requests = running()
    requests.cancel(TRAJECTORY, 1)
    requests.out = Outputs()
    before = state_of(requests)
    give(requests, event)
    assert requests.counts["ignored"] == 1
    left_behind = [DropKv(blob=BLOB)] if event == "kv put" else []
    assert (requests.out.publish, requests.out.effects) == ([], left_behind)
    assert state_of(requests) == before


@pytest.mark.parametrize(
    ("phase", "drops"), [("REWARDING", True), ("ENCODING", False), ("LOGGING", False)]
)
def test_cancellation_ends_the_wait_for_a_reward_but_not_what_has_one(
    phase: str, drops: bool
) -> None:
    requests = MAKE[phase]()
    requests.out = Outputs()
    requests.cancel(TRAJECTORY, 1)
    assert (KEY not in requests.by_key) is drops
    assert [type(effect) for effect in requests.out.effects] == ([Forget] if drops else [])
    assert requests.counts["cancelled too late"] == (not drops)


def test_one_progress_record_is_under_way_at_a_time() -> None:
    requests = running()
    requests.out = Outputs()
    for _ in range(3):
        give(requests, "tokens")
        requests.write_progress()
    (effect,) = requests.out.effects
    assert isinstance(effect, EncodeProgress) and isinstance(effect.progress, Progress)
    assert (effect.progress.start, len(effect.progress.token_ids)) == (0, 20)
    give(requests, "chunk", "chunk there")
    requests.write_progress()
    last = requests.out.effects[-1]
    assert isinstance(last, EncodeProgress) and isinstance(last.progress, Progress)
    assert (last.progress.start, len(last.progress.token_ids)) == (20, 40)
    assert last.progress.previous == 4


def test_leaving_waits_for_a_progress_record_that_is_under_way_and_writes_the_rest() -> None:
    requests = after(running(), "tokens")
    requests.write_progress()
    give(requests, "tokens")
    requests.leave()
    assert requests.by_key[KEY].phase is Phase.LEAVING
    give(requests, "chunk", "chunk there")
    assert requests.by_key[KEY].phase is Phase.LEAVING
    give(requests, "chunk", "chunk there")
    assert requests.by_key == {}
    assert requests.left == {TRAJECTORY: Resume(tokens=40, partition=0, offset=4)}


@pytest.mark.parametrize("phase", ["ENVIRONMENT", "WAITING", "RUNNING"])
def test_episode_of_a_version_that_is_not_held_any_more_ends_here(phase: str) -> None:
    requests = MAKE[phase]()
    requests.by_key[KEY].episode = True
    requests.out = Outputs()
    requests.hold_versions(NOW, 1)
    record = decode_control(requests.out.publish[0].record.value)
    assert isinstance(record, RequestFailed) and record.error == "Retargeted"
    assert Forget(request=KEY, source="train") in requests.out.effects


@pytest.mark.parametrize(
    ("phase", "event", "error"),
    [
        ("PROMPTING", "task failed", "KeyError"),
        ("RUNNING", "encode failed", "SchemaError"),
        ("ENCODING", "too large", "RecordTooLarge"),
        ("ENCODING", "encode failed", "SchemaError"),
    ],
)
def test_request_that_would_fail_again_is_reported_as_not_retryable(
    phase: str, event: str, error: str
) -> None:
    requests = MAKE[phase]()
    requests.out = Outputs()
    give(requests, event)
    record = decode_control(requests.out.publish[0].record.value)
    assert isinstance(record, RequestFailed)
    assert (record.error, record.retryable, record.epoch) == (error, False, 9)
