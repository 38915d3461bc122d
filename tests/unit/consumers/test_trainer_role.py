"""Tests of the trainer role on a memory log."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import BatchRefused, TakenGroup
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.headers import describe, header_pairs
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.wire import sha256_hex
from tests.support.batches import make_trajectory
from tests.support.trainer_stage import RUN, TrainerStage, digests, train


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    return stage


def test_step_is_committed_with_files_that_are_what_it_says(stage: TrainerStage) -> None:
    trainer = stage.trainer()
    decision = stage.take_new(0)
    trainer.train_to(1)
    (commit,) = stage.commits()
    assert (commit.step, commit.attempt, commit.incarnation) == (0, 1, 0)
    assert commit.groups == decision.groups
    assert commit.batch_digest == batch_digest(decision.groups)
    assert commit.digest_before == stage.policy.digest
    assert stage.store.verify(commit.digest_after) == commit.policy
    rows = read_contributions(stage.store.verify_blob("contributions", commit.contributions.sha256))
    taken = [
        trajectory.trajectory for group in decision.groups for trajectory in group.trajectories
    ]
    assert [row["trajectory"] for row in rows] == taken
    assert commit.metrics["trajectories"] == 4
    assert commit.checkpoint is None


def test_order_of_groups_in_the_decision_does_not_matter(
    stage: TrainerStage, tmp_path: Path
) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    for opened, order in ((stage, 1), (other, -1)):
        groups = [opened.log_group(number) for number in range(3)]
        opened.take(0, groups[::order])
        opened.trainer().train_to(1)
    assert digests(stage) == digests(other)


def test_forged_take_batch_with_an_overdue_group_is_refused(stage: TrainerStage) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0, 1)
    stage.commits()
    overdue = stage.log_group(50, version=0, deadline=1)
    good = stage.log_group(51, version=2, deadline=4)
    forged = TakenGroup(
        group=overdue.group, version=0, deadline=2, trajectories=overdue.trajectories
    )
    stage.take(2, [forged, good])
    trainer.until(lambda: any(isinstance(event, BatchRefused) for event in stage.control()))
    trainer.until(lambda: trainer.idle)
    (refused,) = [event for event in stage.control() if isinstance(event, BatchRefused)]
    assert {offender.group for offender in refused.offenders} == {overdue.group}
    assert "C3: its headers say deadline 1, this is step 2" in refused.offenders[0].reason
    assert len(stage.commits()) == 2
    # The other group returns in the next attempt and is trained.
    stage.take(2, [good], attempt=2)
    trainer.train_to(3)
    assert stage.commits()[-1].attempt == 2


def test_group_that_was_trained_is_refused_even_after_a_restart(stage: TrainerStage) -> None:
    group = stage.log_group(0, deadline=9)
    stage.take(0, [group])
    stage.trainer().train_to(1)
    trainer = stage.trainer()
    stage.take(1, [group])
    trainer.until(lambda: any(isinstance(event, BatchRefused) for event in stage.control()))
    (refused,) = [event for event in stage.control() if isinstance(event, BatchRefused)]
    assert "was already trained at step 0" in refused.offenders[0].reason


def test_unreadable_trajectory_is_a_dead_letter_and_its_group_an_offender(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    good = stage.log_group(0)
    # Right headers with an unreadable value, detected when decoded.
    value = b"no zstd frame"
    name = trajectory_id(group_id("train", 1), 0)
    headers = describe(make_trajectory(name, run=RUN, deadline=9), sha256=sha256_hex(value))
    (offset,) = stage.writer.append(
        [
            Append(
                topic=stage.topics.trajectories,
                partition=1,
                value=value,
                headers=header_pairs(headers),
            )
        ]
    )
    taken = replace_taken(good, name, partition=1, offset=offset, sha256=headers.sha256)
    stage.take(0, [good, taken])
    trainer.until(lambda: any(isinstance(event, BatchRefused) for event in stage.control()))
    (refused,) = [event for event in stage.control() if isinstance(event, BatchRefused)]
    assert [offender.trajectory for offender in refused.offenders] == [name]
    assert refused.offenders[0].reason.startswith("unreadable: ")
    (record,) = stage.records(stage.topics.dead_letters)
    letter = decode_dead_letter(record.value, record.headers)
    assert (letter.partition, letter.offset, letter.value) == (1, offset, value)


def replace_taken(like: TakenGroup, name: str, **changes: Any) -> TakenGroup:
    entry = msgspec.structs.replace(like.trajectories[0], trajectory=name, **changes)
    return msgspec.structs.replace(like, group=name[:11], trajectories=(entry,))
