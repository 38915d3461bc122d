"""Everybody who pins versions, played by hand: orchestrator, workers and trainer on a small log.

The orchestrator here is real rules on a toy: it stamps the newest version it knows, assigns the
newest or one that an open group carries, and names its pins in batches. Everybody may be late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from dora_pipe.consumers.trainer.commits import CommitHistory, droppable, files_of
from dora_pipe.schemas.control import RunStarted, StepCommitted, config_digest
from dora_pipe.schemas.policy import Blob, Manifest

Choose = Callable[[Sequence[Any]], Any]
"""One of several."""

WORKERS = 3
CHECKPOINT_EVERY = 2


def commit_of(
    step: int, *, digest: str = "", checkpoint: bool = False, dropped: Sequence[int] = ()
) -> StepCommitted:
    """A commit with nothing but what retention reads."""
    found = digest or f"v{step + 1}"
    return StepCommitted(
        at_ns=0,
        step=step,
        attempt=1,
        role_epoch=0,
        groups=(),
        batch_digest="",
        digest_before="",
        digest_after=found,
        policy=Manifest(digest=found, bytes=0, tensors=()),
        contributions=Blob(sha256="", bytes=0),
        figures={},
        settings={},
        numerics={},
        decisions_next=0,
        compute_s=0.0,
        checkpoint=Blob(sha256=f"o{step + 1}", bytes=1) if checkpoint else None,
        dropped=tuple(dropped),
    )


class Commits:
    """A history of so many steps."""

    def __init__(
        self, steps: int, *, checkpoint_every: int = 0, digests: Sequence[str] = ()
    ) -> None:
        self.history = history_of([])
        for step in range(steps):
            due = bool(checkpoint_every) and (step + 1) % checkpoint_every == 0
            digest = digests[step] if digests else ""
            self.history.add(step, commit_of(step, digest=digest, checkpoint=due))

    def checkpoint(self, version: int) -> str:
        """sha256 of its optimizer state."""
        return self.history.checkpoint_of(version)


def history_of(commits: Sequence[StepCommitted]) -> CommitHistory:
    """What a trainer that starts now reads."""
    started = RunStarted(
        at_ns=0,
        run="r",
        schema_version=1,
        config={},
        config_digest=config_digest({}),
        dataset_digest="",
        dataset_rows=1,
        eval_digest="",
        eval_rows=0,
        seed=0,
        policy=Manifest(digest="v0", bytes=0, tensors=()),
        assets_digest="",
        planner="",
        package="",
    )
    history = CommitHistory(run_started=started)
    for offset, commit in enumerate(commits):
        assert history.add(offset, commit)
    return history


class Life:
    """A run from the point of view of its policy store."""

    def __init__(self, *, keep_every: int) -> None:
        self.keep_every = keep_every
        self.log: list[StepCommitted] = []
        self.files = {"v0"}
        self.known = 0
        """The newest version that the orchestrator has read of."""
        self.groups: list[int] = []
        """Versions that open groups carry."""
        self.training: tuple[int, tuple[int, ...]] | None = None
        """Step and pins of the batch decided last, until the orchestrator reads of its commit."""
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
        """The newest version."""
        return len(self.log)

    def moves(self) -> list[str]:
        """What may happen next; whether it can is looked at when it does."""
        return list(self._acts)

    def act(self, name: str, choose: Choose) -> None:
        """Let it happen."""
        self._acts[name](choose)

    def needed(self) -> set[int]:
        """Versions that somebody may open now."""
        hosted = {one for one in self.targets if one >= 0}
        return {0, self.committed, self.known, *self.groups, *hosted}

    def there(self) -> set[int]:
        """Versions whose files are there."""
        return {v for v in range(self.committed + 1) if f"v{v}" in self.files}

    def dropped(self) -> set[int]:
        """Versions that commits have dropped."""
        return {version for commit in self.log for version in commit.dropped}

    def told(self) -> str:
        """For a failure."""
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
        """Only when the last commit was read of; a batch has a group of its own."""
        if self.training is None:
            self.groups.append(self.known)
            pins = {*self.groups, *(one for one in self.targets if one >= 0)}
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
        """The orchestrator reads of the commit, at last: its batch's groups are trained."""
        if self.training is not None and self.known < self.committed:
            self.known += 1
            self.training = None

    def _restart(self, choose: Choose) -> None:
        self.trainer = history_of(self.log)


def play(*, seed: int, acts: int) -> Life:
    """A life by chance."""
    chance, life = Random(seed), Life(keep_every=1)
    for _ in range(acts):
        life.act(chance.choice(life.moves()), chance.choice)
    return life
