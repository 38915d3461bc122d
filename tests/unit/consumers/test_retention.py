"""Tests of retention of versions and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.consumers.trainer.commits import (
    DROPPED_MAX,
    CommitHistory,
    droppable,
    files_of,
    retained,
)
from dora_pipe.consumers.trainer.effects import DropFiles
from dora_pipe.core.errors import ResourceError
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import Blob, Manifest
from tests.support.trainer_driver import run_started
from tests.support.trainer_stage import TrainerStage

Choose = Callable[[Sequence[Any]], Any]
"""Chooses one of several."""

WORKERS = 3
CHECKPOINT_EVERY = 2


def commit_of(
    step: int, *, digest: str = "", checkpoint: bool = False, dropped: Sequence[int] = ()
) -> StepCommitted:
    result = digest or f"v{step + 1}"
    return StepCommitted(
        at_ns=0,
        step=step,
        attempt=1,
        incarnation=0,
        groups=(),
        batch_digest="",
        digest_before="",
        digest_after=result,
        policy=Manifest(digest=result, bytes=0, tensors=()),
        contributions=Blob(sha256="", bytes=0),
        metrics={},
        settings={},
        numerics={},
        decisions_next=0,
        compute_s=0.0,
        checkpoint=Blob(sha256=f"o{step + 1}", bytes=1) if checkpoint else None,
        dropped=tuple(dropped),
    )


class Commits:
    def __init__(
        self, steps: int, *, checkpoint_every: int = 0, digests: Sequence[str] = ()
    ) -> None:
        self.history = history_of([])
        for step in range(steps):
            due = bool(checkpoint_every) and (step + 1) % checkpoint_every == 0
            digest = digests[step] if digests else ""
            self.history.add(step, commit_of(step, digest=digest, checkpoint=due))

    def checkpoint(self, version: int) -> str:
        return self.history.checkpoint_of(version)


def history_of(commits: Sequence[StepCommitted]) -> CommitHistory:
    history = CommitHistory(run_started=run_started("v0"))
    for offset, commit in enumerate(commits):
        assert history.add(offset, commit)
    return history


class Life:
    def __init__(self, *, keep_every: int) -> None:
        self.keep_every = keep_every
        self.log: list[StepCommitted] = []
        self.files = {"v0"}
        self.known = 0
        """Newest version known to the orchestrator."""
        self.groups: list[int] = []
        """Versions of open groups."""
        self.training: tuple[int, tuple[int, ...]] | None = None
        """Step and pins of the last decided batch, until its commit is read."""
        self.targets: list[int] = [-1] * WORKERS
        self.loading = [False] * WORKERS
        self.trainer = history_of([])
        self._acts: dict[str, Callable[[Choose], None]] = {
            "dispatch": lambda choose: self.groups.append(self.known),
            "end": self._end,
            "assign": self._assign,
            "ready": self._ready,
            "take": self._take,
            "commit": self._commit,
            "read": self._read,
            "restart trainer": self._restart,
        }

    @property
    def committed(self) -> int:
        return len(self.log)

    def moves(self) -> list[str]:
        return list(self._acts)

    def act(self, name: str, choose: Choose) -> None:
        self._acts[name](choose)

    def needed(self) -> set[int]:
        served = {target for target in self.targets if target >= 0}
        return {0, self.committed, self.known, *self.groups, *served}

    def there(self) -> set[int]:
        return {v for v in range(self.committed + 1) if f"v{v}" in self.files}

    def dropped(self) -> set[int]:
        return {version for commit in self.log for version in commit.dropped}

    def told(self) -> str:
        return f"needed {sorted(self.needed())}, there {sorted(self.there())}"

    def _end(self, choose: Choose) -> None:
        if self.groups:
            del self.groups[choose(range(len(self.groups)))]

    def _assign(self, choose: Choose) -> None:
        worker = choose(range(WORKERS))
        if not self.loading[worker]:
            choices = sorted({self.known, *self.groups})
            self.targets[worker] = choose(choices)
            self.loading[worker] = True

    def _ready(self, choose: Choose) -> None:
        self.loading[choose(range(WORKERS))] = False

    def _take(self, choose: Choose) -> None:
        if self.training is None:
            self.groups.append(self.known)
            pins = {*self.groups, *(target for target in self.targets if target >= 0)}
            self.training = self.known, tuple(sorted(pins))

    def _commit(self, choose: Choose) -> None:
        if self.training is None or self.training[0] != self.committed:
            return
        step, pins = self.training
        due = (step + 1) % CHECKPOINT_EVERY == 0
        blob = Blob(sha256=f"o{step + 1}", bytes=1) if due else None
        dropped = droppable(self.trainer, blob, pins, self.keep_every)
        self.files.add(f"v{step + 1}")
        self.log.append(commit_of(step, checkpoint=due, dropped=dropped))
        assert self.trainer.add(step, self.log[-1])
        if choose((True, False)):  # else it dies before it deletes
            self.files -= set(files_of(self.trainer, dropped).weights)

    def _read(self, choose: Choose) -> None:
        if self.training is not None and self.known < self.committed:
            self.known += 1
            self.training = None

    def _restart(self, choose: Choose) -> None:
        self.trainer = history_of(self.log)


CHECKPOINT = Blob(sha256="c" * 64, bytes=1)


def commits(steps: int, checkpoint_every: int) -> list[Blob | None]:
    return [CHECKPOINT if (step + 1) % checkpoint_every == 0 else None for step in range(steps)]


def test_without_keep_every_everything_stays() -> None:
    assert retained(commits(31, 3), {29}, 0) == set(range(32))


@given(
    steps=st.integers(0, 60),
    checkpoint_every=st.integers(1, 7),
    keep_every=st.integers(1, 5),
    pins=st.sets(st.integers(0, 60), min_size=1),
)
def test_what_stays_is_what_the_design_names_and_nothing_else(
    steps: int, checkpoint_every: int, keep_every: int, pins: set[int]
) -> None:
    stays = retained(commits(steps, checkpoint_every), pins, keep_every)
    assert {0, steps} | {pin for pin in pins if pin <= steps} <= stays <= set(range(steps + 1))
    indices = [version for version in range(1, steps + 1) if version % checkpoint_every == 0]
    numbered = {version for number, version in enumerate(indices, 1) if number % keep_every == 0}
    assert numbered | set(indices[-2:]) <= stays
    named = {0, steps, max(0, steps - 1)} | pins | numbered | set(indices[-2:])
    assert stays <= named


@given(steps=st.integers(1, 60), keep_every=st.integers(1, 5), pins=st.sets(st.integers(0, 60)))
def test_a_checkpoint_that_was_kept_for_its_number_is_kept_by_every_later_commit(
    steps: int, keep_every: int, pins: set[int]
) -> None:
    now = retained(commits(steps, 2), {*pins, steps}, keep_every)
    later = retained(commits(steps + 5, 2), {steps + 5}, keep_every)
    numbered = {version for version in now if version and version % (2 * keep_every) == 0}
    assert numbered <= later


def test_versions_that_are_references_stay() -> None:
    history = Commits(40).history
    config = {"objective": {"reference_every": 7}}
    started = run_started("v0")
    history.run_started = msgspec.structs.replace(started, config=config)
    removed = droppable(history, None, (history.next_step,), 1)
    assert removed and not [version for version in removed if version % 7 == 0]
    history.run_started = started
    assert set(removed) < set(droppable(history, None, (history.next_step,), 1))


def test_one_commit_drops_a_bounded_number_and_the_next_ones_the_rest() -> None:
    history = Commits(DROPPED_MAX + 50).history
    first = droppable(history, None, (history.next_step,), 1)
    assert len(first) == DROPPED_MAX
    history.kept.difference_update(first)
    rest = droppable(history, None, (history.next_step,), 1)
    assert 0 < len(rest) <= 50


def test_a_file_that_a_kept_version_has_too_is_not_deleted() -> None:
    commits = Commits(4, digests=["a", "b", "a", "c"])
    commits.history.kept -= {1, 2}
    files = files_of(commits.history, [1, 2])
    assert files.weights == ("b",)


def test_optimizer_states_go_with_their_versions() -> None:
    commits = Commits(4, checkpoint_every=2)
    commits.history.kept -= {1, 2}
    assert files_of(commits.history, [1, 2]).optimizers == (commits.checkpoint(2),)


@given(st.data())
def test_no_version_that_is_carried_or_served_is_ever_deleted_however_slow_anybody_is(
    data: st.DataObject,
) -> None:
    def choose(options: Sequence[Any]) -> Any:
        return data.draw(st.sampled_from(options))

    life = Life(keep_every=choose((1, 2, 3)))
    for _ in range(data.draw(st.integers(10, 60))):
        life.act(choose(life.moves()), choose)
        assert life.needed() <= life.there(), life.told()
    assert life.dropped() <= set(range(life.committed))


# Machine and store


def test_trainer_drops_after_the_commit_that_says_so(tmp_path: Path) -> None:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    trainer = stage.trainer(keep_every=2)
    for step in range(9):
        stage.commits()
        stage.take_new(step, pins=(step,))
        trainer.train_to(step + 1)
        trainer.tick(3)
    commits = stage.commits()
    # Checkpoints are 2, 4, 6, 8; every second of them 4 and 8; the newest two 6 and 8.
    assert sorted(v for commit in commits for v in commit.dropped) == [1, 2, 3, 5, 7]
    digests = [stage.policy.digest, *(commit.digest_after for commit in commits)]
    there = [version for version, digest in enumerate(digests) if stage.store.has_weights(digest)]
    assert there == [0, 4, 6, 8, 9]
    optimizers = [commit.step + 1 for commit in commits if commit.checkpoint]
    kept = [v for v in optimizers if stage.store.has_blob("optimizer", _checkpoint(commits[v - 1]))]
    assert optimizers == [2, 4, 6, 8] and kept == [4, 6, 8]


def test_restart_deletes_nothing_and_the_next_commit_goes_on(tmp_path: Path) -> None:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    first = stage.trainer()
    for step in range(5):
        stage.commits()
        stage.take_new(step, pins=(step,))
        first.train_to(step + 1)
    first.close()
    names = {file.name for file in stage.store.everything()}
    again = stage.trainer(keep_every=2)
    again.train_to(5)
    again.tick(20)
    assert {file.name for file in stage.store.everything()} == names
    stage.commits()
    stage.take_new(5, pins=(3, 5))
    again.train_to(6)
    again.tick(3)
    assert stage.commits()[-1].dropped == (1, 2)


def test_store_that_cannot_delete_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = TrainerStage(tmp_path)
    stage.start_run()

    def away(digest: str) -> bool:
        raise ResourceError("the store is away")

    monkeypatch.setattr(stage.store, "drop_weights", away)
    trainer = stage.trainer(keep_every=1, checkpoint_every=50)
    for step in range(4):
        stage.commits()
        stage.take_new(step, pins=(step,))
        trainer.train_to(step + 1)
        trainer.tick(3)
    assert len(stage.commits()) == 4
    assert "dropped versions stay in the store: the store is away" in caplog.text


def test_killed_before_it_deletes_what_was_dropped_stays_and_harms_nobody(tmp_path: Path) -> None:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    trainer = stage.trainer(keep_every=1, checkpoint_every=50)
    effects: list[Any] = []
    start = trainer.port.start
    trainer.port.start = (  # type: ignore[method-assign]
        lambda effect: effects.append(effect) if isinstance(effect, DropFiles) else start(effect)
    )
    for step in range(4):
        stage.commits()
        stage.take_new(step, pins=(step,))
        trainer.train_to(step + 1)
    trainer.close()
    assert [len(effect.weights) for effect in effects] == [1, 1]
    again = stage.trainer(keep_every=1, checkpoint_every=50)
    again.train_to(4)
    again.tick(10)
    assert all(stage.store.has_weights(effect.weights[0]) for effect in effects)
    assert again.machine.history.kept == {0, 3, 4}


def _checkpoint(commit: Any) -> str:
    assert commit.checkpoint is not None
    return str(commit.checkpoint.sha256)
