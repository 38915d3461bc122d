"""The trainer's table of phases, from–to: what comes in, what is begun, what is written."""

import itertools
from typing import Any

import pytest

from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.consumers.effects import (
    Adopted,
    BatchFetched,
    FetchBatch,
    PolicyPublished,
    PublishPolicy,
    Replayed,
    Restore,
    Restored,
    StepTrained,
    TrainStep,
    Unreadable,
)
from dora_pipe.consumers.machine import TrainerMachine, TrainerSetup
from dora_pipe.consumers.recovery import History
from dora_pipe.errors import SchemaError
from dora_pipe.runtime import CaughtUp, Now, Outputs, Published, StopAsked
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    BatchRefused,
    Offender,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    WeightsAdopted,
    decode_control,
)
from dora_pipe.schemas.dead_letter import DeadLetter, decode_dead_letter
from dora_pipe.schemas.metrics import TrainerStatus, decode_metrics
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import AnyDecision, Round, StopRun, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.trainer_stage import NO_COST

TOPICS = Topics("r")
NUMERICS = {"torch": "2"}
OFFENDER = Offender(group="g0000000000", trajectory="", why="C3: overdue")
BLOB = Blob(sha256="b" * 64, bytes=1)
HEARTBEAT_NS = 500


def digest(version: int) -> str:
    return f"{version:064d}"


def run_started() -> RunStarted:
    return RunStarted(
        at_ns=1,
        run="r",
        schema_version=1,
        config={},
        config_digest="",
        dataset_digest="",
        dataset_rows=1,
        eval_digest="",
        eval_rows=0,
        seed=0,
        policy=Manifest(digest=digest(0), bytes=0, tensors=()),
        assets_digest="",
        planner="",
        package="",
    )


def batch(step: int, attempt: int = 1, deadline: int = 9) -> TakeBatch:
    taken = TakenTrajectory(
        trajectory=f"g{step:010d}-000", attempt=0, epoch=1, partition=1, offset=40, sha256="a" * 64
    )
    group = TakenGroup(
        group=f"g{step:010d}", version=step, deadline=deadline, trajectories=(taken,)
    )
    settings: dict[str, float | int | str | bool] = {"trainer.learning_rate": 0.5}
    return TakeBatch(reason="", step=step, attempt=attempt, groups=(group,), settings=settings)


class Driver:
    """Feeds a machine and reads what it writes."""

    def __init__(self, *, checkpoint_every: int = 2, history: History | None = None) -> None:
        self.history = history or History(run_started=run_started(), role_epoch=4)
        setup = TrainerSetup(
            topics=TOPICS,
            role_epoch=5,
            checkpoint_every=checkpoint_every,
            heartbeat_ns=HEARTBEAT_NS,
        )
        self.machine = TrainerMachine(
            setup, self.history, cost=lambda: NO_COST, cached=lambda: (3, 4)
        )
        self.now_ns = 0
        self.offset = 100
        self.written: list[Any] = []
        self.letters: list[DeadLetter] = []
        self.statuses: list[TrainerStatus] = []

    def react(self, *inputs: Any, after_ns: int = 1) -> list[Any]:
        """One turn; its effects."""
        self.now_ns += after_ns
        outputs = self.machine.react(inputs, Now(mono_ns=self.now_ns, wall_ns=self.now_ns + 7))
        self._read(outputs)
        return outputs.effects

    def _read(self, outputs: Outputs) -> None:
        for one in outputs.publish:
            record = one.record
            if record.topic == TOPICS.control:
                self.written.append(decode_control(record.value))
            elif record.topic == TOPICS.metrics:
                status = decode_metrics(record.value)
                assert isinstance(status, TrainerStatus)
                self.statuses.append(status)
            else:
                assert record.topic == TOPICS.dead_letters
                self.letters.append(decode_dead_letter(record.value, record.headers))

    def decide(self, *decisions: AnyDecision) -> list[Any]:
        """A round from the log; the effects of reading it."""
        self.offset += 10
        value = encode(
            Round(ordinal=0, role_epoch=0, now_ns=0, control_next=0, decisions=decisions)
        )
        return self.react(
            Record(topic=TOPICS.decisions, partition=0, offset=self.offset, key=b"", value=value)
        )

    def to_idle(self) -> "Driver":
        """Restored and caught up."""
        effects = self.react()
        assert isinstance(effects[0], Restore)
        self.react(CaughtUp())
        self.restored()
        return self

    def restored(self) -> list[Any]:
        step = self.history.next_step
        return self.react(
            Restored(step=step, digest=self.history.digest_of(step), numerics=NUMERICS)
        )

    def to_reading(self, step: int = 0) -> "Driver":
        self.to_idle()
        assert isinstance(self.decide(batch(step))[0], FetchBatch)
        return self

    def to_training(self, step: int = 0) -> "Driver":
        self.to_reading(step)
        assert isinstance(self.fetched(step)[0], TrainStep)
        return self

    def to_publishing(self, step: int = 0) -> "Driver":
        self.to_training(step)
        assert isinstance(self.trained(step)[0], PublishPolicy)
        return self

    def to_committing(self, step: int = 0) -> "Driver":
        self.to_publishing(step)
        self.published(step)
        return self

    def fetched(self, step: int = 0, *offenders: Offender, attempt: int = 1) -> list[Any]:
        return self.react(BatchFetched(step=step, attempt=attempt, offenders=offenders))

    def trained(self, step: int = 0, attempt: int = 1) -> list[Any]:
        return self.react(
            StepTrained(step=step, attempt=attempt, figures={"loss": 0.5}, compute_s=1.5)
        )

    def published(self, step: int = 0, attempt: int = 1) -> list[Any]:
        return self.react(
            PolicyPublished(
                step=step,
                attempt=attempt,
                manifest=Manifest(digest=digest(step + 1), bytes=0, tensors=()),
                contributions=BLOB,
                checkpoint=None,
            )
        )

    def acknowledged(self, tag: str = "committed", offset: int = 900) -> list[Any]:
        return self.react(Published(tag=tag, topic=TOPICS.control, partition=0, offset=offset))

    def step(self, step: int) -> None:
        """A whole step from idle."""
        if self.phase == "idle":
            self.decide(batch(step))
        self.fetched(step)
        self.trained(step)
        self.published(step)
        self.acknowledged()

    @property
    def phase(self) -> str:
        return self.machine.phase


def test_it_begins_by_restoring_and_reads_decisions_from_behind_the_last_commit() -> None:
    driver = Driver()
    driver.history.decisions_next = 33
    assert driver.machine.positions() == {TopicPartition("r.decisions", 0): 33}
    assert driver.machine.wake_at() == 0
    assert driver.react() == [Restore(step=0, notes=())]
    assert driver.phase == "restoring"
    assert not driver.machine.finished


def test_restoring_to_idle() -> None:
    driver = Driver().to_idle()
    assert driver.phase == "idle"


def test_nothing_is_begun_before_the_log_was_read_to_its_end() -> None:
    driver = Driver()
    driver.react()
    driver.restored()
    driver.decide(batch(0))
    assert driver.phase == "idle"
    # The second attempt was decided before this start too: the first must not be trained.
    driver.decide(batch(0, attempt=2))
    (effect,) = driver.react(CaughtUp())
    assert effect.decision.attempt == 2


def test_idle_to_reading_with_what_the_checks_need() -> None:
    driver = Driver().to_idle()
    (effect,) = driver.decide(batch(0))
    assert driver.phase == "reading"
    assert effect.decision == batch(0)
    assert effect.known.next_step == 0
    assert effect.known.digests == {0: digest(0)}
    assert effect.known.run == "r"


def test_batch_of_another_step_is_kept_for_later_and_not_begun() -> None:
    driver = Driver().to_idle()
    assert driver.decide(batch(1)) == []
    assert driver.phase == "idle"
    driver.step(0)
    assert driver.phase == "reading"  # of step 1, at once


def test_reading_to_training_with_the_settings_of_the_decision() -> None:
    driver = Driver().to_reading()
    (effect,) = driver.fetched()
    assert effect == TrainStep(step=0, attempt=1, settings={"trainer.learning_rate": 0.5})
    assert driver.phase == "training"


def test_reading_to_refusing_names_the_offenders() -> None:
    driver = Driver().to_reading()
    assert driver.fetched(0, OFFENDER) == []
    assert driver.phase == "refusing"
    (refused,) = driver.written
    assert refused == BatchRefused(
        at_ns=refused.at_ns, step=0, attempt=1, role_epoch=5, offenders=(OFFENDER,)
    )


def test_refusing_to_idle_and_the_refused_attempt_is_not_begun_again() -> None:
    driver = Driver().to_reading()
    driver.fetched(0, OFFENDER)
    assert driver.acknowledged("refused") == []
    assert driver.phase == "idle"
    (effect,) = driver.decide(batch(0, attempt=2))
    assert effect.decision.attempt == 2


def test_training_to_publishing() -> None:
    driver = Driver(checkpoint_every=2).to_training()
    assert driver.trained() == [PublishPolicy(step=0, attempt=1, checkpoint=False)]
    assert driver.phase == "publishing"


def test_every_so_many_steps_a_checkpoint_is_kept() -> None:
    driver = Driver(checkpoint_every=2).to_idle()
    driver.step(0)
    driver.decide(batch(1))
    driver.fetched(1)
    assert driver.trained(1) == [PublishPolicy(step=1, attempt=1, checkpoint=True)]


def test_publishing_to_committing_writes_every_field_of_the_commit() -> None:
    driver = Driver().to_publishing()
    assert driver.published() == []
    assert driver.phase == "committing"
    (commit,) = driver.written
    assert commit == StepCommitted(
        at_ns=driver.now_ns + 7,
        step=0,
        attempt=1,
        role_epoch=5,
        groups=batch(0).groups,
        batch_digest=batch_digest(batch(0).groups),
        digest_before=digest(0),
        digest_after=digest(1),
        policy=Manifest(digest=digest(1), bytes=0, tensors=()),
        contributions=BLOB,
        figures={"loss": 0.5},
        settings={"trainer.learning_rate": 0.5},
        numerics=NUMERICS,
        decisions_next=driver.offset + 1,
        compute_s=1.5,
        checkpoint=None,
        adopted=False,
    )


def test_committing_to_idle_when_the_commit_is_durable() -> None:
    driver = Driver().to_committing()
    assert driver.history.next_step == 0
    assert driver.acknowledged() == []
    assert driver.phase == "idle"
    assert driver.history.next_step == 1
    (effect,) = driver.decide(batch(1))
    assert effect.known.digests == {1: digest(1)}


def test_trained_groups_are_remembered_as_long_as_a_batch_could_take_them() -> None:
    driver = Driver().to_idle()
    driver.step(0)
    again = batch(1)
    again = TakeBatch(reason="", step=1, attempt=1, groups=batch(0).groups, settings=again.settings)
    (effect,) = driver.decide(again)
    assert effect.known.trained == {batch(0).groups[0].group: 0}


def test_reading_to_reading_when_a_newer_attempt_appears() -> None:
    driver = Driver().to_reading()
    assert driver.decide(batch(0, attempt=2)) == []
    (effect,) = driver.fetched()
    assert isinstance(effect, FetchBatch)
    assert effect.decision.attempt == 2


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


def test_publishing_to_restoring_when_its_batch_was_replaced() -> None:
    driver = Driver().to_publishing()
    driver.decide(batch(0, attempt=2))
    assert driver.published() == [Restore(step=0, notes=())]
    assert driver.written == []


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


def test_adopted_weights_are_written_and_the_next_commit_says_so() -> None:
    driver = Driver(checkpoint_every=100)
    driver.react()
    driver.react(CaughtUp())
    driver.react(Adopted(step=0, digest_committed="c", digest_replayed="d", why="other torch"))
    driver.restored()
    (adopted,) = driver.written
    assert isinstance(adopted, WeightsAdopted)
    assert (adopted.step, adopted.role_epoch, adopted.why) == (0, 5, "other torch")
    driver.decide(batch(0))
    driver.fetched()
    assert driver.trained() == [PublishPolicy(step=0, attempt=1, checkpoint=True)]
    driver.published()
    driver.acknowledged()
    driver.decide(batch(1))
    driver.fetched(1)
    assert driver.trained(1) == [PublishPolicy(step=1, attempt=1, checkpoint=False)]
    driver.published(1)
    assert [one.adopted for one in driver.written if isinstance(one, StepCommitted)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("begin", ["to_idle", "to_reading"])
def test_stop_before_training_ends_at_once(begin: str) -> None:
    driver = getattr(Driver(), begin)()
    driver.react(StopAsked())
    assert driver.phase == "ended"
    assert driver.machine.finished


def test_stop_while_restoring_ends_at_once() -> None:
    driver = Driver()
    driver.react()
    driver.react(StopAsked())
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


def test_end_of_the_run_ends_an_idle_trainer() -> None:
    driver = Driver().to_idle()
    driver.decide(StopRun(reason=""))
    assert driver.machine.finished


def test_end_of_the_run_waits_for_the_present_step() -> None:
    driver = Driver().to_training()
    driver.decide(StopRun(reason=""))
    driver.trained()
    driver.published()
    assert not driver.machine.finished
    driver.acknowledged()
    assert driver.machine.finished


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
    said = [(one.phase, one.waits_for) for one in driver.statuses]
    assert [one for one, _ in itertools.groupby(said)] == [
        ("restoring", ""),
        ("idle", "decisions: those made before this start are being read"),
        ("idle", "batch of step 0: no decision yet"),
        ("reading", "batch of step 0: its trajectories are being read"),
        ("refusing", "batch of step 0: its refusal is not acknowledged yet"),
        ("idle", "batch of step 0: attempt 1 was refused, no other yet"),
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
    assert [one.waits_for for one in again.statuses] == [
        "replay of the committed steps: at step 0 of 2",
        "replay of the committed steps: at step 1 of 2",
    ]


def test_unreadable_record_goes_to_dead_letters_as_it_came() -> None:
    driver = Driver().to_idle()
    letter = DeadLetter(
        topic="r.trajectories",
        partition=1,
        offset=17,
        why="not a zstd frame",
        path="$",
        at_ns=5,
        key=b"k",
        value=b"\xff\x00",
        headers=(("run", b"r"),),
    )
    driver.react(Unreadable(letter=letter))
    assert driver.letters == [letter]


def test_round_that_cannot_be_read_ends_the_role_naming_its_offset() -> None:
    driver = Driver().to_idle()
    record = Record(
        topic=TOPICS.decisions, partition=0, offset=77, key=b"", value=b'{"ordinal": "x"}'
    )
    with pytest.raises(SchemaError, match="decisions offset 77"):
        driver.react(record)
