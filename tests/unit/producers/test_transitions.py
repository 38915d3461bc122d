"""The table of phases: every event in every phase either does what the table says, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from dora_pipe.producers.effects import (
    EncodeFailed,
    EncodeProgress,
    EncodeTrajectory,
    EngineAdd,
    EngineCancel,
    EngineStarted,
    FetchProgress,
    Observed,
    ProgressEncoded,
    ProgressFetched,
    Prompted,
    Score,
    StepEnvironment,
    TrajectoryEncoded,
)
from dora_pipe.producers.engines.port import RequestFinished, TokensSampled
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import Phase, Row
from dora_pipe.producers.tasks.calls import EpisodeLost, Forget, PromptCall, Rewarded, TaskFailed
from dora_pipe.producers.transitions import VALUE_BYTES_MAX, take, take_published
from dora_pipe.runtime import Now, Outputs, Published
from dora_pipe.schemas.control import RequestFailed, Resume, decode_control
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import PlacedRequest
from tests.support.worker import setup_of, spec_of

NOW = Now(mono_ns=5, wall_ns=10**18)
TRAJECTORY = trajectory_id(spec_of(0).group, 0)
KEY = f"{TRAJECTORY}/1"
RESUME = Resume(tokens=2, partition=0, offset=3)

EVENTS: dict[str, Any] = {
    "prompted": Prompted(request=KEY, token_ids=[5, 6], episode=False),
    "episode": Prompted(request=KEY, token_ids=[5, 6], episode=True),
    "fetched": ProgressFetched(request=KEY, chunks=(), why="gone"),
    "started": EngineStarted(request=KEY, at_ns=10**18),
    "tokens": TokensSampled(
        request=KEY,
        token_ids=[7] * 20,
        logprobs=[-1.0] * 20,
        sampler_logprobs=[-1.0] * 20,
        first_token_ns=1,
    ),
    "stopped": RequestFinished(request=KEY, reason="stop"),
    "engine error": RequestFinished(request=KEY, reason="error", error="no more memory"),
    "observed": Observed(request=KEY, token_ids=[8], done=False, tool="", ok=True),
    "done": Observed(request=KEY, token_ids=[8], done=True, tool="", ok=True),
    "rewarded": Rewarded(request=KEY, reward=0.5, raw=None, parts={}),
    "task failed": TaskFailed(request=KEY, error="KeyError", message="'x'"),
    "episode lost": EpisodeLost(request=KEY, message="killed"),
    "encoded": TrajectoryEncoded(request=KEY, value=b"v", headers=(), sha256="0" * 64),
    "too large": TrajectoryEncoded(
        request=KEY, value=bytes(VALUE_BYTES_MAX + 1), headers=(), sha256="0" * 64
    ),
    "encode failed": EncodeFailed(request=KEY, message="log-prob is not <= 0"),
    "chunk": ProgressEncoded(request=KEY, value=b"p"),
    "trajectory there": Published(tag=f"t:{KEY}", topic="r.trajectories", partition=0, offset=4),
    "chunk there": Published(tag=f"p:{KEY}", topic="r.progress", partition=0, offset=4),
}

TABLE: dict[tuple[str, str], Phase | None] = {
    ("PROMPTING", "prompted"): Phase.WAITING,
    ("PROMPTING", "episode"): Phase.WAITING,
    ("PROMPTING", "task failed"): None,
    ("PROMPTING", "episode lost"): Phase.PROMPTING,
    ("RESUMING", "fetched"): Phase.WAITING,
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
    ("LEAVING", "chunk"): Phase.LEAVING,
    ("LEAVING", "chunk there"): None,
    ("LEAVING", "encode failed"): None,
}
"""From a phase, by an event, to a phase; None: the request is gone. All else is refused."""


def _fresh(resume: Resume | None = None) -> Requests:
    book = Requests(setup_of(epoch=9, stop_timeout_ns=10**9))
    book.versions = frozenset({0})
    place = PlacedRequest(
        reason="t",
        spec=spec_of(0),
        trajectory=TRAJECTORY,
        sibling=0,
        attempt=1,
        worker="w0",
        epoch=9,
        resume=resume,
    )
    book.place(place, NOW)
    return book


def _give(book: Requests, *names: str) -> None:
    for name in names:
        event = EVENTS[name]
        if isinstance(event, Published):
            take_published(book, event, NOW)
        else:
            take(book, event, NOW)


def _running(*, episode: bool = False) -> Requests:
    book = _fresh()
    _give(book, "episode" if episode else "prompted")
    book.fill(0)
    _give(book, "started")
    return book


def _resuming() -> Requests:
    book = _fresh(RESUME)
    _give(book, "prompted")
    return book


def _with(book: Requests, *names: str) -> Requests:
    _give(book, *names)
    return book


def _leaving() -> Requests:
    book = _with(_running(), "tokens")
    book.leave()
    return book


def _waiting() -> Requests:
    return _with(_fresh(), "prompted")


MAKE: dict[str, Callable[[], Requests]] = {
    "PROMPTING": _fresh,
    "RESUMING": _resuming,
    "WAITING": _waiting,
    "RUNNING": _running,
    "ENVIRONMENT": lambda: _with(_running(episode=True), "tokens", "stopped"),
    "REWARDING": lambda: _with(_running(), "tokens", "stopped"),
    "ENCODING": lambda: _with(_running(), "tokens", "stopped", "rewarded"),
    "LOGGING": lambda: _with(_running(), "tokens", "stopped", "rewarded", "encoded"),
    "LEAVING": _leaving,
}


def _state(book: Requests) -> Any:
    """All that a refused event must not change."""
    row = book.rows.get(KEY)
    plain = {
        name: deepcopy(value)
        for name, value in vars(book).items()
        if name not in ("rows", "counts", "out", "setup", "_phases")
    }
    fields = {}
    if row is not None:
        names = [name for name in Row.__dataclass_fields__ if name != "sequence"]
        fields = {name: deepcopy(getattr(row, name)) for name in names}
        fields["tokens"] = list(row.sequence.token_ids)
        fields["segments"] = list(row.sequence.segments)
    return plain, fields, list(book.rows), {k: v for k, v in vars(book)["_phases"].items() if v}


@pytest.mark.parametrize("phase", MAKE)
def test_every_phase_is_reached_by_its_recipe(phase: str) -> None:
    book = MAKE[phase]()
    assert book.rows[KEY].phase.name == phase
    assert book.in_phase(Phase[phase]) == 1
    assert book.counts["refused"] == 0


def test_recipes_cover_every_phase() -> None:
    assert set(MAKE) == {phase.name for phase in Phase}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", MAKE)
def test_event_takes_a_request_where_the_table_says_or_changes_nothing(
    phase: str, event: str
) -> None:
    book = MAKE[phase]()
    book.out = Outputs()
    before = _state(book)
    _give(book, event)
    if (phase, event) in TABLE:
        row = book.rows.get(KEY)
        assert (row.phase if row else None) == TABLE[phase, event]
        assert book.counts["refused"] == 0
        total = sum(book.in_phase(one) for one in Phase)
        assert total == len(book.rows)
    else:
        assert book.counts["refused"] == 1
        assert (book.out.publish, book.out.effects) == ([], [])
        assert _state(book) == before


@pytest.mark.parametrize("event", EVENTS)
def test_event_of_a_request_that_was_dropped_is_ignored(event: str) -> None:
    book = _running()
    book.cancel(TRAJECTORY, 1)
    book.out = Outputs()
    before = _state(book)
    _give(book, event)
    assert book.counts["ignored"] == 1
    assert (book.out.publish, book.out.effects) == ([], [])
    assert _state(book) == before


EFFECTS: list[tuple[str, str, list[type]]] = [
    ("PROMPTING", "prompted", []),
    ("WAITING", "episode lost", [PromptCall]),
    ("RUNNING", "episode lost", [EngineCancel, PromptCall]),
    ("RUNNING", "stopped", [Score]),
    ("RUNNING", "engine error", [EncodeTrajectory]),
    ("RUNNING", "encode failed", [EngineCancel]),
    ("ENVIRONMENT", "done", [Score]),
    ("ENVIRONMENT", "task failed", [Forget, EncodeTrajectory]),
    ("REWARDING", "rewarded", [EncodeTrajectory]),
]


@pytest.mark.parametrize(("phase", "event", "effects"), EFFECTS)
def test_transition_asks_its_ports_for_what_comes_next(
    phase: str, event: str, effects: list[type]
) -> None:
    book = MAKE[phase]()
    book.out = Outputs()
    _give(book, event)
    assert [type(effect) for effect in book.out.effects] == effects


def test_waiting_request_is_handed_to_the_engine_with_prompt_seed_and_settings() -> None:
    book = _waiting()
    book.out = Outputs()
    book.fill(0)
    (effect,) = book.out.effects
    assert isinstance(effect, EngineAdd)
    request = effect.request
    assert (request.request, list(request.token_ids), request.sampled) == (KEY, [5, 6], 0)
    assert request.seed == book.rows[KEY].seed
    assert (request.params.max_tokens, request.emit_every) == (64, 16)


def test_request_handed_ahead_of_a_slot_is_waiting_and_let_go_when_it_is_dropped() -> None:
    book = _waiting()
    book.fill(0)
    assert book.rows[KEY].phase is Phase.WAITING
    book.out = Outputs()
    book.fill(0)
    assert book.out.effects == []
    book.cancel(TRAJECTORY, 1)
    assert book.out.effects == [EngineCancel(request=KEY)]


def test_waiting_request_of_another_version_is_not_handed_to_the_engine() -> None:
    book = _waiting()
    book.out = Outputs()
    book.fill(1)
    assert book.out.effects == []


def test_running_episode_to_environment_hands_it_the_turn() -> None:
    book = _running(episode=True)
    book.out = Outputs()
    _give(book, "tokens", "stopped")
    assert book.out.effects == [StepEnvironment(request=KEY, token_ids=[7] * 20)]


def test_prompting_to_resuming_asks_for_the_chain() -> None:
    book = _fresh(RESUME)
    book.out = Outputs()
    _give(book, "prompted")
    assert book.out.effects == [FetchProgress(request=KEY, resume=RESUME)]


def test_episode_never_resumes() -> None:
    book = _fresh(RESUME)
    _give(book, "episode")
    assert book.rows[KEY].phase is Phase.WAITING
    assert book.progress() == {}


def test_one_progress_record_is_under_way_at_a_time() -> None:
    book = _running()
    book.out = Outputs()
    for _ in range(3):
        _give(book, "tokens")
        book.write_progress()
    (effect,) = book.out.effects
    assert isinstance(effect, EncodeProgress)
    assert (effect.progress.start, len(effect.progress.token_ids)) == (0, 20)
    _give(book, "chunk", "chunk there")
    book.write_progress()
    last = book.out.effects[-1]
    assert isinstance(last, EncodeProgress)
    assert (last.progress.start, len(last.progress.token_ids)) == (20, 40)
    assert last.progress.previous == 4


def test_leaving_waits_for_a_progress_record_that_is_under_way_and_writes_the_rest() -> None:
    book = _with(_running(), "tokens")
    book.write_progress()
    _give(book, "tokens")
    book.leave()
    assert book.rows[KEY].phase is Phase.LEAVING
    _give(book, "chunk", "chunk there")
    assert book.rows[KEY].phase is Phase.LEAVING
    _give(book, "chunk", "chunk there")
    assert book.rows == {}
    assert book.left == {TRAJECTORY: Resume(tokens=40, partition=0, offset=4)}


def test_lost_episode_of_a_version_that_is_not_held_any_more_is_handed_back() -> None:
    book = MAKE["REWARDING"]()
    book.versions = frozenset({1})
    book.out = Outputs()
    _give(book, "episode lost")
    record = decode_control(book.out.publish[0].record.value)
    assert isinstance(record, RequestFailed)
    assert (record.error, record.retryable) == ("Retargeted", True)
    assert book.rows == {}


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
    book = MAKE[phase]()
    book.out = Outputs()
    _give(book, event)
    record = decode_control(book.out.publish[0].record.value)
    assert isinstance(record, RequestFailed)
    assert (record.error, record.retryable, record.epoch) == (error, False, 9)
