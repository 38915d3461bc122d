"""Tests of the trainer machine's end, status and bad records."""

import itertools

import pytest

from dora_pipe.consumers.trainer.effects import Replayed
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.machine import CaughtUp, StopAsked
from dora_pipe.core.pure.records import Record
from dora_pipe.core.pure.wait_tracker import DEFAULT_LIMITS
from dora_pipe.schemas.metrics import Blocker
from tests.support.trainer_driver import HEARTBEAT_NS, OFFENDER, TOPICS, Driver, batch


@pytest.mark.parametrize("begin", ["to_idle", "to_reading"])
def test_stop_before_training_ends_at_once(begin: str) -> None:
    driver = getattr(Driver(), begin)()
    driver.react(StopAsked())
    assert driver.phase == "ended"
    assert driver.machine.finished


@pytest.mark.parametrize("begin", ["to_training", "to_publishing", "to_committing"])
def test_stop_finishes_the_present_step_first(begin: str) -> None:
    driver = getattr(Driver(), begin)()
    driver.react(StopAsked())
    assert not driver.machine.finished
    driver.decide(batch(1))
    if driver.phase == "training":
        driver.trained()
    if driver.phase == "publishing":
        driver.published()
    assert driver.acknowledged() == []
    assert driver.machine.finished
    assert driver.history.next_step == 1


def test_status_at_every_heartbeat_names_what_it_waits_for() -> None:
    driver = Driver()
    driver.react()
    driver.react(after_ns=HEARTBEAT_NS - 1)
    assert len(driver.statuses) == 1
    assert driver.machine.wake_at() == 1 + HEARTBEAT_NS
    driver.restored()
    driver.react(after_ns=HEARTBEAT_NS)
    driver.react(CaughtUp())
    driver.react(after_ns=HEARTBEAT_NS)
    driver.decide(batch(0))
    driver.react(after_ns=HEARTBEAT_NS)
    driver.fetched(0, OFFENDER)
    driver.react(after_ns=HEARTBEAT_NS)
    driver.acknowledged("refused")
    driver.react(after_ns=HEARTBEAT_NS)
    driver.decide(batch(0, attempt=2))
    driver.fetched(0, attempt=2)
    driver.react(after_ns=HEARTBEAT_NS)
    driver.trained(0, attempt=2)
    driver.published(0, attempt=2)
    driver.react(after_ns=HEARTBEAT_NS)
    phases = [(status.phase, status.waits_for) for status in driver.statuses]
    assert [entry for entry, _ in itertools.groupby(phases)] == [
        ("restoring", ""),
        ("idle", "decisions: reading those made before this start"),
        ("idle", "batch of step 0: no decision yet"),
        ("reading", "batch of step 0: its trajectories are being read"),
        ("refusing", "batch of step 0: its refusal is not acknowledged yet"),
        ("idle", "batch of step 0: attempt 1 was refused, no new decision yet"),
        ("training", ""),
        ("committing", "commit of step 0: not acknowledged yet"),
    ]
    assert (driver.statuses[0].cached_records, driver.statuses[0].cached_bytes) == (3, 4)


def test_status_of_a_replay_says_how_far_it_is() -> None:
    driver = Driver()
    driver.to_idle()
    driver.step(0)
    driver.decide(batch(1))
    driver.step(1)
    again = Driver(history=driver.history)
    again.react()
    again.react(Replayed(step=0), after_ns=HEARTBEAT_NS)
    assert [status.waits_for for status in again.statuses] == [
        "replay of the committed steps: at step 0 of 2",
        "replay of the committed steps: at step 1 of 2",
    ]


def test_round_that_cannot_be_read_ends_the_role_naming_its_offset() -> None:
    driver = Driver().to_idle()
    record = Record(
        topic=TOPICS.decisions, partition=0, offset=77, key=b"", value=b'{"ordinal": "x"}'
    )
    with pytest.raises(SchemaError, match="decisions offset 77"):
        driver.react(record)


def test_commit_that_is_not_acknowledged_is_an_alarm_that_names_the_topic() -> None:
    driver = Driver().to_committing()
    driver.react(after_ns=int(DEFAULT_LIMITS.short_s * 1e9))
    assert driver.statuses[-1].waits[0].overdue is False
    driver.react(after_ns=HEARTBEAT_NS)
    (wait,) = driver.statuses[-1].waits
    assert (wait.name, wait.overdue) == ("commit", True)
    assert wait.blockers[0] == Blocker("topic", "control")
