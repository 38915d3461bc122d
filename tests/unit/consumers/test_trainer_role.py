"""The whole trainer on a log in memory: steps, refusals, kills, replays, damages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.memory import AppendFault, MemoryBus, ScriptedFaults
from dora_pipe.bus.port import Append, TopicPartition
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.recovery import read_commits, read_history
from dora_pipe.consumers.replay import load_base, replay_steps
from dora_pipe.consumers.trainers.simulated import SimulatedTrainer
from dora_pipe.errors import (
    Fenced,
    InvariantBroken,
    LogTruncated,
    NonFinite,
    OutcomeUnknown,
    ReplayDiverged,
)
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    BatchRefused,
    RoleStarted,
    StepCommitted,
    TakenGroup,
    WeightsAdopted,
)
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.headers import describe
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory_codec import (
    decode_trajectory,
    encode_trajectory,
    header_pairs,
)
from dora_pipe.schemas.wire import encode, sha256_hex
from tests.support.batches import make_trajectory
from tests.support.trainer_stage import RUN, StagedTrainer, TrainerStage


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    made = TrainerStage(tmp_path)
    made.start_run()
    return made


def train(stage: TrainerStage, trainer: StagedTrainer, *steps: int) -> None:
    """Take and train steps, each on groups of the version it starts from."""
    for step in steps:
        stage.commits()
        stage.take_new(step)
        trainer.train_to(step + 1)


def digests(stage: TrainerStage) -> list[str]:
    return [one.digest_after for one in stage.commits()]


def test_step_is_committed_with_files_that_are_what_it_says(stage: TrainerStage) -> None:
    trainer = stage.trainer()
    decision = stage.take_new(0)
    trainer.train_to(1)
    (commit,) = stage.commits()
    assert (commit.step, commit.attempt, commit.role_epoch) == (0, 1, 0)
    assert commit.groups == decision.groups
    assert commit.batch_digest == batch_digest(decision.groups)
    assert commit.digest_before == stage.policy.digest
    assert stage.store.verify(commit.digest_after) == commit.policy
    rows = read_contributions(stage.store.verify_blob("contributions", commit.contributions.sha256))
    taken = [one.trajectory for group in decision.groups for one in group.trajectories]
    assert [row["trajectory"] for row in rows] == taken
    assert commit.figures["trajectories"] == 4
    assert commit.checkpoint is None


def test_weights_are_a_function_of_the_batch(stage: TrainerStage, tmp_path: Path) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    for one in (stage, other):
        trainer = one.trainer()
        train(one, trainer, 0, 1, 2)
    assert digests(stage) == digests(other)
    assert len(set(digests(stage))) == 3


def test_order_of_groups_in_the_decision_does_not_matter(
    stage: TrainerStage, tmp_path: Path
) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    for one, order in ((stage, 1), (other, -1)):
        groups = [one.log_group(number) for number in range(3)]
        one.take(0, groups[::order])
        one.trainer().train_to(1)
    assert digests(stage) == digests(other)


def test_checkpoints_are_named_by_the_commit_they_belong_to(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2, 3)
    kept = [one.checkpoint for one in stage.commits()]
    assert [one is not None for one in kept] == [False, True, False, True]
    assert kept[1] is not None
    stage.store.verify_blob("optimizer", kept[1].sha256)


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
    trainer.until(lambda: any(isinstance(one, BatchRefused) for one in stage.control()))
    trainer.until(lambda: trainer.idle)
    (refused,) = [one for one in stage.control() if isinstance(one, BatchRefused)]
    assert {one.group for one in refused.offenders} == {overdue.group}
    assert "C3: its headers say deadline 1, this is step 2" in refused.offenders[0].why
    assert len(stage.commits()) == 2
    # The other group comes back in the next attempt and is trained.
    stage.take(2, [good], attempt=2)
    trainer.train_to(3)
    assert stage.commits()[-1].attempt == 2


def test_group_that_was_trained_is_refused_even_after_a_restart(stage: TrainerStage) -> None:
    group = stage.log_group(0, deadline=9)
    stage.take(0, [group])
    stage.trainer().train_to(1)
    trainer = stage.trainer()
    stage.take(1, [group])
    trainer.until(lambda: any(isinstance(one, BatchRefused) for one in stage.control()))
    (refused,) = [one for one in stage.control() if isinstance(one, BatchRefused)]
    assert "was trained at step 0 already" in refused.offenders[0].why


def test_unreadable_trajectory_is_a_dead_letter_and_its_group_an_offender(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    good = stage.log_group(0)
    # Right headers, a value that no codec reads: found only when it is decoded.
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
    trainer.until(lambda: any(isinstance(one, BatchRefused) for one in stage.control()))
    (refused,) = [one for one in stage.control() if isinstance(one, BatchRefused)]
    assert [one.trajectory for one in refused.offenders] == [name]
    assert refused.offenders[0].why.startswith("unreadable: ")
    (record,) = stage.records(stage.topics.dead_letters)
    letter = decode_dead_letter(record.value, record.headers)
    assert (letter.partition, letter.offset, letter.value) == (1, offset, value)


def replace_taken(like: TakenGroup, name: str, **changes: Any) -> TakenGroup:
    """A group of one trajectory."""
    one = msgspec.structs.replace(like.trajectories[0], trajectory=name, **changes)
    return msgspec.structs.replace(like, group=name[:11], trajectories=(one,))


def test_passed_garbage_goes_to_dead_letters_without_a_batch_asking_for_it(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    stage.writer.append([Append(topic=stage.topics.trajectories, value=b"x")])
    trainer.until(lambda: bool(stage.records(stage.topics.dead_letters)))
    train(stage, trainer, 0)
    assert len(stage.records(stage.topics.dead_letters)) == 1


# Restarts


def test_restarted_trainer_replays_and_goes_on_as_if_it_had_never_stopped(
    stage: TrainerStage, tmp_path: Path
) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    unkilled = other.trainer(checkpoint_every=3)
    train(other, unkilled, *range(7))
    for step in range(7):
        trainer = stage.trainer(checkpoint_every=3)
        train(stage, trainer, step)
        trainer.close()
    assert digests(stage) == digests(other)
    epochs = [one.role_epoch for one in stage.control() if isinstance(one, RoleStarted)]
    assert epochs == list(range(7))


@pytest.mark.parametrize("phase", ["reading", "training", "publishing"])
def test_uncommitted_step_is_done_again_from_the_same_batch(
    stage: TrainerStage, phase: str
) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0)
    stage.commits()
    decision = stage.take_new(1)
    trainer.until(lambda: trainer.machine.phase == phase)
    trainer.close()
    again = stage.trainer()
    again.train_to(2)
    commit = stage.commits()[1]
    assert commit.groups == decision.groups
    assert commit.role_epoch == 1


def test_orphans_of_a_killed_trainer_are_left_alone(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=1)
    stage.take_new(0)
    trainer.until(lambda: trainer.machine.phase == "publishing")
    while not trainer.port.poll():  # the files are there, the machine never hears of it
        pass
    trainer.close()
    orphans = stage.store.orphans({stage.policy.digest, "assets"})
    assert len(orphans) == 3
    again = stage.trainer(checkpoint_every=1)
    again.train_to(1)
    # The same batch gives the same files: the commit adopts the orphans.
    (commit,) = stage.commits()
    assert commit.checkpoint is not None
    named = {
        stage.policy.digest,
        "assets",
        commit.digest_after,
        commit.contributions.sha256,
        commit.checkpoint.sha256,
    }
    assert stage.store.orphans(named) == []


def test_damaged_checkpoint_is_passed_over(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2, 3, 4)
    trainer.close()
    newest = stage.commits()[3].checkpoint
    assert newest is not None
    stage.store.optimizer_path(newest.sha256).write_bytes(b"damaged")
    older = stage.commits()[1].digest_after
    stage.store.weights_path(older).unlink()  # both checkpoints are gone: from version 0
    again = stage.trainer(checkpoint_every=2)
    train(stage, again, 5)
    assert len(stage.commits()) == 6


def test_policy_file_that_is_gone_is_made_again_by_the_replay(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2)
    trainer.close()
    last = stage.commits()[-1].digest_after
    stage.store.weights_path(last).unlink()
    again = stage.trainer(checkpoint_every=2)
    again.until(lambda: again.idle)
    assert stage.store.verify(last).digest == last


def test_older_trainer_is_fenced_and_commits_nothing(stage: TrainerStage) -> None:
    older = stage.trainer()
    stage.take_new(0)
    older.until(lambda: older.machine.phase == "publishing")
    newer = stage.trainer()
    with pytest.raises(Fenced):
        older.tick(50)
    newer.train_to(1)
    assert [one.role_epoch for one in stage.commits()] == [1]


@pytest.mark.parametrize("lands", [0, 1])
def test_commit_of_unknown_outcome_ends_the_role_and_the_next_one_reads_what_happened(
    stage: TrainerStage, lands: int
) -> None:
    class Flaky:
        """The outcome of the append of a commit is not known."""

        def on_append(self, call: int, records: Any) -> AppendFault | None:
            commit = any(b'"step-committed"' in one.value for one in records)
            return AppendFault(kind="unknown", lands=lands) if commit else None

        def on_poll(self, call: int) -> bool:
            return False

    honest = stage.open_bus
    stage.open_bus = lambda: MemoryBus(
        stage.log, faults=Flaky(), now_ms=lambda: stage.clock.ns // 1_000_000
    )
    trainer = stage.trainer()
    stage.take_new(0)
    with pytest.raises(OutcomeUnknown):
        trainer.tick(200)
    stage.open_bus = honest
    assert len(stage.commits()) == lands
    again = stage.trainer()
    again.train_to(1)
    assert len(stage.commits()) == 1
    train(stage, again, 1)
    assert len(stage.commits()) == 2


def test_replay_that_diverges_names_step_tensor_and_numerics(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0, 1)
    trainer.close()
    again = stage.trainer(trainer=SimulatedTrainer(flavour="another machine"))
    with pytest.raises(ReplayDiverged, match=r"step 0 .* tensor weights differs") as caught:
        again.tick(200)
    assert "--adopt" in str(caught.value.hint)
    assert "numerics are the same" in caught.value.message


def test_adopt_takes_the_committed_weights_and_logs_that_it_did(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0, 1)
    trainer.close()
    committed = digests(stage)
    again = stage.trainer(
        trainer=SimulatedTrainer(flavour="another machine"), adopt=True, checkpoint_every=100
    )
    train(stage, again, 2)
    adopted = [one for one in stage.control() if isinstance(one, WeightsAdopted)]
    assert [one.step for one in adopted] == [0, 1]
    assert [one.digest_committed for one in adopted] == committed
    last = stage.commits()[2]
    assert last.adopted
    assert last.digest_before == committed[1]
    assert last.checkpoint is not None  # nobody has to adopt these steps again
    again.close()
    third = stage.trainer(trainer=SimulatedTrainer(flavour="another machine"))
    train(stage, third, 3)
    assert not stage.commits()[3].adopted


def test_committed_trajectory_that_was_changed_stops_the_replay(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0)
    trainer.close()
    commit = stage.commits()[0]
    taken = commit.groups[0].trajectories[0]
    change_value(stage, taken.partition, taken.offset)
    again = stage.trainer()
    with pytest.raises(InvariantBroken, match="step 0: trajectory g"):
        again.tick(200)


def change_value(stage: TrainerStage, partition: int, offset: int) -> None:
    """Change a token of a trajectory where it lies, its own sha256 with it."""
    held = stage.log._partitions[TopicPartition(stage.topics.trajectories, partition)]
    place = held.offsets.index(offset)
    trajectory = decode_trajectory(held.records[place].value)
    token_ids = [*trajectory.token_ids]
    token_ids[-2] += 1
    value, headers = encode_trajectory(replace(trajectory, token_ids=token_ids))
    held.records[place] = replace(held.records[place], value=value, headers=header_pairs(headers))


def test_trajectory_that_is_gone_stops_the_replay(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0)
    trainer.close()
    stage.log.truncate(TopicPartition(stage.topics.trajectories, 0), 0)
    again = stage.trainer()
    with pytest.raises(LogTruncated):
        again.tick(20_000)


def test_commit_rejected_by_the_orchestrator_is_replaced_in_the_history(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0)
    stage.commits()
    groups = [stage.log_group(number, version=1, deadline=4) for number in (70, 71)]
    stage.take(1, groups)
    trainer.train_to(2)
    # `fail-batch` came first: the orchestrator decides step 1 again, on other groups.
    fresh = [stage.log_group(number, version=1, deadline=4) for number in (72, 73)]
    stage.take(1, fresh, attempt=2)
    trainer.until(lambda: [one.attempt for one in stage.commits()] == [1, 1, 2])
    train(stage, trainer, 2)
    trainer.close()
    history = read_history(stage.bus, stage.topics, stage.clock)
    assert [(note.step, note.attempt) for note in history.notes] == [(0, 1), (1, 2), (2, 1)]
    again = stage.trainer()
    train(stage, again, 3)
    assert stage.commits()[-1].digest_before == stage.commits()[-2].digest_after


def test_step_that_is_not_finite_ends_the_role_and_commits_nothing(stage: TrainerStage) -> None:
    name = trajectory_id(group_id("train", 0), 1)
    trainer = stage.trainer(trainer=SimulatedTrainer(poison=[name]))
    stage.take_new(0)
    with pytest.raises(NonFinite, match=name):
        trainer.tick(200)
    assert stage.commits() == []
    # After `fail-batch` the next attempt is taken, although the first comes first in the log.
    trainer.close()
    stage.take(0, [stage.log_group(1), stage.log_group(2)], attempt=2)
    again = stage.trainer(trainer=SimulatedTrainer(poison=[name]))
    again.train_to(1)
    assert [one.attempt for one in stage.commits()] == [2]


def test_end_of_the_run_ends_the_trainer_also_one_that_starts_after_it(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0)
    stage.stop_run()
    trainer.until(lambda: trainer.machine.finished)
    late = stage.trainer()
    late.until(lambda: late.machine.finished)
    assert len(stage.commits()) == 1


def test_log_that_is_away_for_a_while_changes_nothing(stage: TrainerStage, tmp_path: Path) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    train(other, other.trainer(), 0, 1, 2)
    stage.open_bus = lambda: MemoryBus(
        stage.log,
        faults=ScriptedFaults(polls=set(range(30, 60)), appends={2: AppendFault(kind="failed")}),
        now_ms=lambda: stage.clock.ns // 1_000_000,
    )
    train(stage, stage.trainer(), 0, 1, 2)
    assert digests(stage) == digests(other)


def test_status_tells_phase_step_and_cache(stage: TrainerStage) -> None:
    trainer = stage.trainer()
    stage.log_group(40)
    train(stage, trainer, 0)
    trainer.tick(100)
    last = stage.statuses()[-1]
    assert (last.step, last.phase, last.waits_for) == (
        1,
        "idle",
        "batch of step 1: no decision yet",
    )
    assert last.cached_records == 2  # of the group that no batch has taken
    assert last.cached_bytes > 0


# History's replay


def commits_of(stage: TrainerStage) -> list[StepCommitted]:
    history = read_history(stage.bus, stage.topics, stage.clock)
    return list(read_commits(stage.bus, stage.topics, history.notes, stage.clock))


def replayed(stage: TrainerStage, commits: list[StepCommitted], first: int) -> list[Any]:
    """Replay from the nearest checkpoint; what came out from step `first` on."""
    history = read_history(stage.bus, stage.topics, stage.clock)
    trainer = SimulatedTrainer()
    base = load_base(stage.store, trainer, stage.policy, history.notes[:first])
    assert base <= first
    steps = replay_steps(stage.bus, stage.topics, trainer, commits[base:], clock=stage.clock)
    return [one for one in steps if one.step >= first]


def test_committed_steps_are_reproduced_from_the_log_alone(stage: TrainerStage) -> None:
    train(stage, stage.trainer(checkpoint_every=2), *range(6))
    steps = replayed(stage, commits_of(stage), first=3)
    assert [(one.step, one.equal, one.tensor) for one in steps] == [
        (3, True, None),
        (4, True, None),
        (5, True, None),
    ]
    assert all(one.other_numerics == [] for one in steps)


def test_replay_names_the_first_step_and_tensor_after_a_changed_trajectory(
    stage: TrainerStage,
) -> None:
    train(stage, stage.trainer(checkpoint_every=100), *range(4))
    taken = stage.commits()[2].groups[0].trajectories[1]
    change_value(stage, taken.partition, taken.offset)
    steps = replayed(stage, commits_of(stage), first=0)
    assert [one.equal for one in steps] == [True, True, False, False]
    assert steps[2].tensor == "weights"


def test_replay_names_the_first_step_after_a_changed_setting(stage: TrainerStage) -> None:
    train(stage, stage.trainer(checkpoint_every=100), *range(3))
    commits = commits_of(stage)
    changed = dict(commits[1].settings) | {"trainer.learning_rate": 1.1e-3}
    commits[1] = msgspec.structs.replace(commits[1], settings=changed)
    assert [one.equal for one in replayed(stage, commits, first=0)] == [True, False, False]


def test_commit_that_is_gone_is_noticed(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), 0)
    history = read_history(stage.bus, stage.topics, stage.clock)
    note = replace(history.notes[0], offset=history.notes[0].offset + 1)
    with pytest.raises((LogTruncated, InvariantBroken)):
        list(read_commits(stage.bus, stage.topics, [note], stage.clock))


def test_doubled_commit_counts_once(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), 0, 1)
    stage.writer.append([Append(topic=stage.topics.control, value=encode(stage.commits()[0]))])
    stage.writer.append([Append(topic=stage.topics.control, value=encode(stage.commits()[1]))])
    history = read_history(stage.bus, stage.topics, stage.clock)
    assert [note.step for note in history.notes] == [0, 1]
