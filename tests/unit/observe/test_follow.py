"""Tests of a follower: delivery once, outages, end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, ResourceError, TopicMissing
from dora_pipe.observe.following import Checkpoint
from dora_pipe.observe.traces import follow
from dora_pipe.observe.traces.follow import TraceSender
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.sinks import NotTaken
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.tracer import Traced, Tracer
from tests.support.recorded_run import RecordedRun
from tests.support.traces import traces_of
from tests.support.worker import VirtualClock


@pytest.fixture(autouse=True)
def small_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora_pipe.ledger.follower.RECORDS_MAX", 20)
    monkeypatch.setattr(follow, "FLUSH_SPANS", 50)


class Sink:
    def __init__(self, fails: Callable[[int], bool] = lambda call: False) -> None:
        self.spans: list[Span] = []
        self.calls = 0
        self._fails = fails

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        self.calls += 1
        if self._fails(self.calls):
            raise ResourceError("nobody there")
        self.spans += spans


def _sender(
    bus: SqliteBus,
    run: RecordedRun,
    sink: Sink,
    clock: VirtualClock,
    checkpoint: Checkpoint | None = None,
) -> TraceSender:
    return TraceSender(bus, run.topics, sink, clock=clock, checkpoint=checkpoint)


def test_resumed_follower_goes_on_where_it_was(
    bus: SqliteBus, recorded: RecordedRun, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path / "traces.sent")
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return True

    first, rest = Sink(lambda call: call > 3), Sink()
    sent = _sender(bus, recorded, first, VirtualClock(), checkpoint).follow(stop)
    assert not sent.whole
    assert asked
    assert checkpoint.read() > 0
    assert _sender(bus, recorded, rest, VirtualClock(), checkpoint).follow().whole
    assert first.spans + rest.spans == traces_of(bus, recorded.topics)
    assert _sender(bus, recorded, Sink(), VirtualClock(), checkpoint).follow().spans == 0


def test_endpoint_that_is_away_is_waited_for(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "run_is_over", lambda *_: False)
    clock, sink = VirtualClock(), Sink(lambda call: 2 <= call <= 8)
    assert _sender(bus, recorded, sink, clock).follow().whole
    assert sink.spans == traces_of(bus, recorded.topics)
    assert clock.ns == 7 * int(follow.RETRY_S * 1e9)


def test_endpoint_that_is_away_does_not_hold_up_a_run_that_is_over(
    bus: SqliteBus, recorded: RecordedRun
) -> None:
    clock, sink = VirtualClock(), Sink(lambda call: True)
    sent = _sender(bus, recorded, sink, clock).follow()
    assert (sent.whole, sent.spans, sink.calls) == (False, 0, 1)
    assert clock.ns == 0


def test_what_an_endpoint_took_before_it_refused_is_not_sent_again(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "run_is_over", lambda *_: False)

    class Partial(Sink):
        def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
            self.calls += 1
            taken = 5 if self.calls == 2 else len(spans)
            self.spans += spans[:taken]
            if self.calls == 2:
                raise NotTaken("busy", hint="h", taken=taken)

    sink = Partial()
    sent = _sender(bus, recorded, sink, VirtualClock()).follow()
    assert sent.whole and sent.spans == len(sink.spans)
    assert sink.spans == traces_of(bus, recorded.topics)


def test_log_that_is_away_is_waited_for(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "run_is_over", lambda *_: False)
    away = iter([True, True])

    class Away(Tracer):
        def turn(self) -> Iterator[Traced]:
            yield from super().turn()
            if next(away, False):
                raise BusError("gone")

    monkeypatch.setattr(follow, "Tracer", Away)
    clock, sink = VirtualClock(), Sink()
    assert _sender(bus, recorded, sink, clock).follow().whole
    assert sink.spans == traces_of(bus, recorded.topics)
    assert clock.ns > 0


def test_run_that_has_not_begun_is_waited_for_by_name_and_so_is_what_comes_after(
    bus: SqliteBus,
    recorded: RecordedRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    began_ns = 60 * 10**9

    def early(*args: Any, **settings: Any) -> Tracer:
        if clock.ns < began_ns:
            raise TopicMissing("no topic recorded.decisions")
        return Tracer(*args, **settings)

    monkeypatch.setattr(follow, "Tracer", early)
    monkeypatch.setattr(follow, "run_is_over", lambda *_: False)
    sink = Sink(lambda call: call == 1)
    assert _sender(bus, recorded, sink, clock).follow().whole
    assert sink.spans == traces_of(bus, recorded.topics)
    assert clock.ns < began_ns + 3 * follow.RETRY_S * 1e9
    assert caplog.messages == [
        "traces wait: the log has no run recorded",
        "traces wait: nobody there",
    ]


@pytest.mark.parametrize("content", ["", "x", None])
def test_mark_that_cannot_be_read_is_none(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "traces.sent"
    if content is not None:
        path.write_text(content)
    assert Checkpoint(path).read() is None
    Checkpoint(path).write(7)
    assert Checkpoint(path).read() == 7
    Checkpoint(tmp_path / "nowhere" / "file").write(7)
    assert Checkpoint(None).read() is None
