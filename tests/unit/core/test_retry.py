"""Tests of retries while the log is unavailable."""

from __future__ import annotations

import pytest

from dora_pipe.core.errors import BusError, BusFull, OutcomeUnknown, SchemaError
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S, FINAL_ERRORS, RETRY_PAUSE_S, retry_bus
from tests.support.worker import VirtualClock


class Flaky:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "there"


def test_call_is_repeated_until_the_log_is_back(caplog: pytest.LogCaptureFixture) -> None:
    clock, flaky = VirtualClock(), Flaky(BusError("away"), BusError("away"), BusFull("full"))
    assert retry_bus("reading", flaky, clock) == "there"
    assert flaky.calls == 4
    assert clock.ns == 3 * int(RETRY_PAUSE_S * 1e9)
    # Each new reason is reported once.
    texts = ["reading: away; trying again", "reading: full; trying again"]
    assert [record.message for record in caplog.records] == texts


def test_patience_ends_after_the_delivery_timeout_with_the_last_error() -> None:
    clock = VirtualClock()
    with pytest.raises(BusError, match="away"):
        retry_bus("reading", Flaky(*(BusError("away") for _ in range(10_000))), clock)
    assert DELIVERY_TIMEOUT_S * 1e9 <= clock.ns < (DELIVERY_TIMEOUT_S + 1) * 1e9


@pytest.mark.parametrize("kind", [*FINAL_ERRORS, SchemaError])
def test_what_no_wait_mends_is_raised_at_once(kind: type[Exception]) -> None:
    clock, flaky = VirtualClock(), Flaky(kind("over"))
    with pytest.raises(kind):
        retry_bus("appending", flaky, clock)
    assert (flaky.calls, clock.ns) == (1, 0)


def test_exclusive_writer_does_not_append_again_after_an_unknown_outcome() -> None:
    flaky = Flaky(OutcomeUnknown("lost"))
    with pytest.raises(OutcomeUnknown):
        retry_bus("appending", flaky, VirtualClock(), exclusive=True)
    assert flaky.calls == 1
    assert retry_bus("appending", Flaky(OutcomeUnknown("lost")), VirtualClock()) == "there"
