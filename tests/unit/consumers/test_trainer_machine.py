"""Tests of the trainer's phases and transitions."""

import msgspec
import pytest

from dora_pipe.consumers.trainer.effects import (
    FetchBatch,
    PartTrained,
    PublishPolicy,
    Restore,
    TrainPart,
    TrainStep,
)
from dora_pipe.core.pure.machine import CaughtUp, StopAsked
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


def test_older_attempt_than_the_one_at_work_is_ignored() -> None:
    driver = Driver().to_idle()
    driver.decide(batch(0, attempt=3))
    driver.decide(batch(0, attempt=2))
    assert isinstance(driver.fetched(attempt=3)[0], TrainStep)


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


def test_step_decided_again_under_the_committed_attempt_changes_nothing() -> None:
    driver = Driver().to_idle()
    driver.step(0)
    assert driver.decide(batch(0)) == []
    assert driver.phase == "idle"
    assert driver.history.next_step == 1


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


def test_parts_are_computed_in_order_while_the_batch_is_not_decided() -> None:
    driver = Driver().to_idle()
    (first,) = driver.decide(part(0))
    assert isinstance(first, TrainPart)
    assert (first.decision, driver.phase) == (part(0), "part")
    assert first.known.next_step == 0
    assert driver.decide(part(1)) == []
    (second,) = driver.react(part_trained(0))
    assert second.decision.part == 1
    assert driver.react(part_trained(1)) == []
    assert driver.phase == "idle"


def test_batch_waits_for_the_part_in_work_and_goes_before_the_next_one() -> None:
    driver = Driver().to_idle()
    driver.decide(part(0), part(1))
    assert driver.decide(batch(0)) == []
    (effect,) = driver.react(part_trained(0))
    assert isinstance(effect, FetchBatch)


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


def test_parts_that_were_given_up_are_replaced_from_their_number_on() -> None:
    driver = Driver().to_idle()
    driver.decide(part(0), part(1))
    driver.react(part_trained(0))
    driver.react(part_trained(1))
    (effect,) = driver.decide(part(0, attempt=2))
    assert effect.decision.attempt == 2
    assert driver.react(part_trained(0)) == []


def test_first_part_of_the_next_step_is_computed_while_the_present_one_is_published() -> None:
    driver = Driver().to_publishing()
    (effect,) = driver.decide(part(0, step=1))
    assert isinstance(effect, TrainPart)
    assert effect.known.next_step == 1
    assert effect.known.trained == {}
    assert driver.phase == "publishing"
    driver.published()
    assert driver.phase == "committing"
    driver.acknowledged()
    assert driver.phase == "part", "the commit is durable, and the part still in work"
    assert driver.decide(batch(1)) == []
    (fetch,) = driver.react(part_trained(0, step=1))
    assert isinstance(fetch, FetchBatch)


def test_part_that_names_a_group_of_the_batch_in_publication_knows_it_as_trained() -> None:
    driver = Driver().to_publishing()
    twice = msgspec.structs.replace(part(0, step=1), groups=batch(0).groups)
    (effect,) = driver.decide(twice)
    assert effect.known.trained == {batch(0).groups[0].group: 0}


def test_part_ahead_of_a_commit_waits_for_weights_that_only_that_names() -> None:
    driver = Driver().to_publishing()
    settings = {**batch(1).settings, "trainer.reference": 1}
    assert driver.decide(msgspec.structs.replace(part(0, step=1), settings=settings)) == []
    assert driver.published() == []
    (effect,) = driver.acknowledged()
    assert isinstance(effect, TrainPart)


def test_part_that_is_an_update_waits_until_the_weights_before_it_are_written() -> None:
    driver = Driver().to_publishing()
    settings = {**part(0).settings, "trainer.minibatches": 4}
    update = msgspec.structs.replace(part(0, step=1), settings=settings)
    assert driver.decide(update) == []
    (effect,) = driver.published()
    assert (effect.decision, driver.phase) == (update, "committing")


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


@pytest.mark.parametrize("ended_first", [True, False])
def test_part_of_the_step_after_a_batch_that_was_replaced_is_computed_again(
    ended_first: bool,
) -> None:
    driver = Driver().to_publishing()
    driver.decide(part(0, step=1))
    if ended_first:
        driver.react(part_trained(0, step=1))
    driver.decide(batch(0, attempt=2))
    assert driver.published() == [Restore(step=0, notes=())]
    if not ended_first:
        assert driver.react(part_trained(0, step=1)) == []
    (effect,) = driver.restored()
    assert isinstance(effect, FetchBatch)
    driver.decide(part(0, step=1))
    driver.fetched(attempt=2)
    assert [type(event) for event in driver.trained(attempt=2)] == [PublishPolicy, TrainPart]


def test_no_part_is_begun_beside_a_publication_after_a_stop_or_for_a_batch_that_is_replaced() -> (
    None
):
    stopped, replaced = Driver().to_publishing(), Driver().to_publishing()
    stopped.react(StopAsked())
    assert stopped.decide(part(0, step=1)) == []
    replaced.decide(batch(0, attempt=2))
    assert replaced.decide(part(0, step=1)) == []
