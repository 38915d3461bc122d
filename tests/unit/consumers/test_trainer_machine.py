"""Tests of the trainer's phases and transitions."""

import msgspec

from dora_pipe.consumers.trainer.effects import (
    PartTrained,
    Restore,
)
from dora_pipe.core.pure.machine import CaughtUp
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import TakePart
from tests.support.trainer_driver import BLOB, NUMERICS, OFFENDER, Driver, batch, digest


def test_nothing_is_begun_before_the_log_was_read_to_its_end() -> None:
    driver = Driver()
    driver.react()
    driver.restored()
    driver.decide(batch(0))
    assert driver.phase == "idle"
    # The second attempt precedes this start too: the first must not be trained.
    driver.decide(batch(0, attempt=2))
    (effect,) = driver.react(CaughtUp())
    assert effect.decision.attempt == 2


def test_refusing_to_idle_and_the_refused_attempt_is_not_begun_again() -> None:
    driver = Driver().to_reading()
    driver.fetched(0, OFFENDER)
    assert driver.acknowledged("refused") == []
    assert driver.phase == "idle"
    (effect,) = driver.decide(batch(0, attempt=2))
    assert effect.decision.attempt == 2


def test_publishing_to_committing_writes_every_field_of_the_commit() -> None:
    driver = Driver().to_publishing()
    assert driver.published() == []
    assert driver.phase == "committing"
    (commit,) = driver.written
    assert commit == StepCommitted(
        at_ns=driver.now_ns + 7,
        step=0,
        attempt=1,
        incarnation=5,
        groups=batch(0).groups,
        batch_digest=batch_digest(batch(0).groups),
        digest_before=digest(0),
        digest_after=digest(1),
        policy=Manifest(digest=digest(1), bytes=0, tensors=()),
        contributions=BLOB,
        metrics={"loss": 0.5},
        settings={"trainer.learning_rate": 0.5},
        numerics=NUMERICS,
        decisions_next=driver.offset + 1,
        compute_s=1.5,
        checkpoint=None,
        adopted=False,
    )


def test_training_to_restoring_when_its_batch_was_replaced() -> None:
    driver = Driver().to_training()
    driver.decide(batch(0, attempt=2))
    assert driver.trained() == [Restore(step=0, notes=())]
    assert driver.phase == "restoring"
    assert driver.written == []
    (effect,) = driver.restored()
    assert effect.decision.attempt == 2


def test_commit_that_was_rejected_is_taken_back() -> None:
    driver = Driver().to_idle()
    driver.step(0)
    # A user ended the batch before the commit was folded: the step is decided again.
    assert driver.decide(batch(0, attempt=2)) == [Restore(step=0, notes=())]
    assert driver.history.next_step == 0
    (effect,) = driver.restored()
    assert effect.decision.attempt == 2
    assert effect.known.trained == {}


def part(number: int, *, step: int = 0, attempt: int = 1) -> TakePart:
    of_batch = batch(step)
    return TakePart(
        reason="",
        step=step,
        attempt=attempt,
        part=number,
        groups=of_batch.groups,
        settings=of_batch.settings,
    )


def part_trained(number: int, step: int = 0) -> PartTrained:
    return PartTrained(step=step, attempt=1, part=number, seconds=2.0)


def test_commit_says_which_parts_there_were_and_what_was_spent_ahead() -> None:
    driver = Driver().to_idle()
    driver.decide(part(0))
    driver.react(part_trained(0), after_ns=2 * 10**9)
    taken = msgspec.structs.replace(batch(0), parts=(1,))
    driver.decide(taken)
    driver.fetched()
    driver.trained()
    driver.published()
    (commit,) = driver.written
    assert isinstance(commit, StepCommitted)
    assert (commit.parts, commit.early_s, commit.overlap_s) == ((1,), (2.0,), 0.0)


def test_part_that_names_a_group_of_the_batch_in_publication_knows_it_as_trained() -> None:
    driver = Driver().to_publishing()
    twice = msgspec.structs.replace(part(0, step=1), groups=batch(0).groups)
    (effect,) = driver.decide(twice)
    assert effect.known.trained == {batch(0).groups[0].group: 0}


def test_what_a_part_takes_beside_a_publication_is_no_time_that_was_free() -> None:
    driver = Driver().to_publishing()
    driver.decide(part(0, step=1))
    driver.react(part_trained(0, step=1), after_ns=2 * 10**9)
    driver.published()
    driver.acknowledged()
    driver.decide(msgspec.structs.replace(batch(1), parts=(1,)))
    driver.fetched(step=1)
    driver.trained(step=1)
    driver.published(step=1)
    commit = driver.written[-1]
    assert isinstance(commit, StepCommitted)
    assert (commit.parts, commit.early_s, commit.overlap_s) == ((1,), (0.0,), 2.0)
