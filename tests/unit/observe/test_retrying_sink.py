"""How long a busy endpoint is waited for, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from email.utils import format_datetime
from typing import Any

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.observe.traces.sinks import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    BUSY_MAX_S,
    EndpointAnswer,
    NotTaken,
    RetryingSink,
)
from tests.support.worker import VirtualClock

RUN: Any = None
SPANS: Any = list(range(10))
BUSY = EndpointAnswer(503, "Service Unavailable")


class Endpoint:
    """Takes so many of a call's spans as `takes` says of it, with the answer to the others."""

    def __init__(self, takes: Callable[[int], tuple[int, EndpointAnswer | None] | None]) -> None:
        self.spans: list[Any] = []
        self.calls = 0
        self._takes = takes

    def send(self, run: Any, spans: Sequence[Any]) -> None:
        self.calls += 1
        found = self._takes(self.calls)
        if found is None:
            self.spans += spans
            return
        taken, answer = found
        self.spans += spans[:taken]
        raise NotTaken("e is busy", hint="h", taken=taken, answer=answer)

    def close(self) -> None:
        """Nothing."""


def _patient(endpoint: Endpoint, clock: VirtualClock, chance: float = 0.5) -> RetryingSink:
    return RetryingSink(endpoint, clock=clock, chance=lambda: chance, notify=lambda line: None)


def test_hundred_requests_are_taken_and_then_a_full_queue_is_waited_out() -> None:
    endpoint = Endpoint(lambda call: (0, BUSY) if 106 < call <= 112 else None)
    clock = VirtualClock()
    sink = _patient(endpoint, clock)
    for number in range(120):
        one: Any = number
        sink.send(RUN, [one])
    assert endpoint.spans == list(range(120)), "each once, in order"
    pauses = [min(BACKOFF_FIRST_S * 2**n, BACKOFF_MAX_S) for n in range(6)]
    assert clock.ns / 1e9 == pytest.approx(sum(pauses))


def test_only_what_was_not_taken_is_sent_again() -> None:
    endpoint = Endpoint(lambda call: (4, BUSY) if call == 1 else None)
    sink = _patient(endpoint, VirtualClock())
    sink.send(RUN, SPANS)
    assert endpoint.spans == SPANS and sink.sent == 10


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_pauses_are_varied_by_the_chance_that_is_handed_in(chance: float) -> None:
    clock = VirtualClock()
    _patient(Endpoint(lambda call: (0, BUSY) if call < 2 else None), clock, chance).send(RUN, SPANS)
    assert clock.ns / 1e9 == pytest.approx(BACKOFF_FIRST_S * (0.5 + chance))


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_endpoint_is_left_alone_for_as_long_as_it_asks(status: int) -> None:
    clock = VirtualClock()
    at = EndpointAnswer(status, "", "37")
    _patient(Endpoint(lambda call: (0, at) if call < 3 else None), clock).send(RUN, SPANS)
    assert clock.ns / 1e9 == pytest.approx(2 * 37)


def test_time_of_the_next_try_may_be_a_date() -> None:
    from datetime import UTC, datetime

    now = datetime(2026, 11, 23, 12, 0, 0, tzinfo=UTC)
    later = EndpointAnswer(503, "", format_datetime(now.replace(minute=2), usegmt=True))
    wall_ns = int(now.timestamp() * 1e9)
    assert later.retry_after_s(wall_ns) == 120.0
    assert later.retry_after_s(wall_ns + 10**12) == 0.0, "it is over"
    assert EndpointAnswer(503, "", "tomorrow or so").retry_after_s(wall_ns) is None
    assert EndpointAnswer(503, "", "-3").retry_after_s(wall_ns) is None
    assert EndpointAnswer(503, "").retry_after_s(wall_ns) is None


def test_endpoint_that_stays_busy_is_given_up_in_bounded_time() -> None:
    clock = VirtualClock()
    sink = _patient(Endpoint(lambda call: (0, BUSY) if call > 2 else None), clock)
    sink.send(RUN, SPANS)
    sink.send(RUN, SPANS)
    with pytest.raises(ResourceError, match="20 spans were sent, then none for") as error:
        sink.send(RUN, SPANS)
    assert BUSY_MAX_S - BACKOFF_MAX_S <= clock.ns / 1e9 <= BUSY_MAX_S
    assert "goes on where" in (error.value.hint or "")


@pytest.mark.parametrize(
    "answer", [EndpointAnswer(400, "Bad Request"), EndpointAnswer(404, "Not Found"), None]
)
def test_what_no_wait_mends_is_not_waited_for(answer: EndpointAnswer | None) -> None:
    clock = VirtualClock()
    with pytest.raises(NotTaken):
        _patient(Endpoint(lambda call: (0, answer)), clock).send(RUN, SPANS)
    assert clock.ns == 0


def test_endpoint_that_was_there_before_is_waited_for_when_it_is_away() -> None:
    clock = VirtualClock()
    endpoint = Endpoint(lambda call: (0, None) if 1 < call < 4 else None)
    sink = _patient(endpoint, clock)
    sink.send(RUN, SPANS[:1])
    sink.send(RUN, SPANS[1:2])
    assert endpoint.spans == [0, 1] and clock.ns > 0
