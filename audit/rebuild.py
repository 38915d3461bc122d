"""Makes versions again that retention has deleted: replay from the nearest checkpoint there is.

What comes out must have the committed digest, else nothing is written. Which versions the store
may lack, `consumers.retention` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.bus.port import Bus
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.replay_steps import load_base, replay_steps
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, PolicyError, ReplayDiverged, UsageError
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A version that the store lacks, and how it is made again.

    Example: ``Rebuilt(version=7, digest="ab..", base=4, steps=3)``: from the checkpoint of version
    4, by three steps.
    """

    version: int
    digest: str
    base: int
    """The version that the replay began at; 0 is the model that the run was started with."""
    steps: int

    @property
    def line(self) -> str:
        """For people."""
        from_ = f"the checkpoint of version {self.base}" if self.base else "version 0"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"version {self.version} is not in the store: made again from {from_} by {steps}, "
            f"weights {self.digest[:12]}..."
        )


class Rebuilder:
    """Gives the weights of any committed version. The trainer is made when it is first needed.

    `on_rebuilt` hears of every version that is made again, before its steps are trained. Versions
    asked for in ascending order share their way from a checkpoint.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        store: PolicyStore,
        *,
        make_learner: Callable[[RunStarted], Learner],
        clock: Clock,
        on_rebuilt: Callable[[Rebuilt], None] = lambda rebuilt: LOG.warning("%s", rebuilt.line),
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._store = store
        self._make_trainer = make_learner
        self._clock = clock
        self._on_rebuilt = on_rebuilt
        self._history: CommitHistory | None = None
        self._trainer: Learner | None = None
        self._base = self._at = -1
        """Where the trainer began, and the version that it has now; -1: nowhere."""

    def weights(self, version: int) -> Path:
        """The file of a version, made again if the store lacks it.

        Raises UsageError for a version that was not committed, ReplayDiverged when this machine
        makes other bytes, PolicyError, BusError.
        """
        history = self._read()
        if version and not 0 <= version <= history.next_step:
            raise UsageError(
                f"version {version} was not published",
                hint=f"there are versions 0 to {history.next_step}",
            )
        digest = history.digest_of(version)
        if version and not self._is_there(digest):
            self._rebuild(version, digest)
        return self._store.weights(digest)

    def _is_there(self, digest: str) -> bool:
        """Whether the store can give it: what patches are damaged or lost is made again, too."""
        if not self._store.has_weights(digest):
            return False
        try:
            self._store.weights(digest)
        except PolicyError as error:
            LOG.warning("%s", error.message)
            return False
        return True

    def _rebuild(self, version: int, digest: str) -> None:
        learner = self.before(version, told=self._on_rebuilt)
        manifest = self._store.publish_weights(learner.save_weights)
        if manifest.digest != digest:
            self._at = -1
            raise InvariantBroken(f"version {version} was made again as {manifest.digest}")

    def before(self, step: int, told: Callable[[Rebuilt], None] = lambda rebuilt: None) -> Learner:
        """The trainer as it was before a step, with the optimizer's state; `told` hears of the way
        before it is gone. Raises as `weights`."""
        history = self._read()
        assert history.run_started is not None
        if self._trainer is None:
            self._trainer = self._make_trainer(history.run_started)
        learner, notes = self._trainer, history.notes
        goes_on = 0 <= self._at <= step
        if not goes_on or any(note.checkpoint for note in notes[self._at : step]):
            self._base = self._at = load_base(
                self._store, learner, history.run_started, notes[:step]
            )
        digest, steps = history.digest_of(step), step - self._base
        told(Rebuilt(version=step, digest=digest, base=self._base, steps=steps))
        commits = read_commits(self._bus, self._topics, notes[self._at : step], self._clock)
        self._at = -1  # Somewhere in between, until it has come through.
        for again in replay_steps(
            self._bus, self._topics, self._store, history, learner, commits, clock=self._clock
        ):
            if not again.equal:
                other = again.other_numerics
                raise ReplayDiverged(
                    f"version {step} cannot be made again here: step {again.step} gives other "
                    f"weights, first in {again.tensor}",
                    hint=f"other {', '.join(other)} than in the run" if other else None,
                )
        self._at = step
        return learner

    def _read(self) -> CommitHistory:
        if self._history is None:
            history = read_history(self._bus, self._topics, self._clock)
            if history.run_started is None:
                raise InvariantBroken(f"{self._topics.control} has no `run started`")
            self._history = history
        return self._history
