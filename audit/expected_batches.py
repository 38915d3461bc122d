"""The batches that a run shall have that was trained again on another's trajectories: the source's
of each step, or those that follow from the source's groups by the change and the run's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dora_pipe.audit.ended_groups import ended_groups
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.taken_again import BatchTaken, taken_again
from dora_pipe.bus.port import Bus
from dora_pipe.config.model import Config
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.control import Retrained, StepCommitted
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.schemas.topics import Topics

KEPT: Final = "every batch is the source's of that step, and was trained as it was taken"
AGAIN: Final = (
    "every batch follows from the source's groups, rewards and rules, and was trained as it was "
    "taken"
)
"""What holds of the batches of such a run."""


class ExpectedBatches:
    """Holds every batch against the one that it shall be; the commits are read in order."""

    def __init__(self, bus: Bus, retrained: Retrained, source: CommitHistory, clock: Clock) -> None:
        self._retrained = retrained
        self._topics = Topics(retrained.run)
        notes = source.notes[retrained.first : retrained.last + 1]
        self._commits = read_commits(bus, self._topics, notes, clock)
        self._bus = bus
        self._again: Mapping[int, BatchTaken] | None = None

    @property
    def holds(self) -> str:
        """What holds when nothing is found."""
        return KEPT if self._retrained.rounds is None else AGAIN

    def take_again(self, config: Config, change: BatchChange, findings: Findings) -> None:
        """Make the batches, where they do not have to be the source's; before the first `check`."""
        retrained = self._retrained
        if retrained.rounds is None:
            return
        who = f"run {retrained.run}"
        try:
            found = ended_groups(
                self._bus,
                self._topics,
                first=retrained.first,
                last=retrained.last,
                rounds=retrained.rounds,
            )
        except InvariantBroken as error:
            self._again = {}
            findings.add("batches", who, error.message)
            return
        message = "lacks rounds that its batches were taken again from"
        expected = retrained.rounds
        findings.same("batches", who, message, expected=expected, found=found.rounds)
        batches = taken_again(found, config.groups, change, parts=config.trainer.parts)
        self._again = {one.step: one for one in batches}

    def check(self, take: TakeBatch, findings: Findings) -> StepCommitted | None:
        """Compare; the source's commit of the step, where there is one."""
        theirs, who = self._of_source(take.step), f"step {take.step}"
        if theirs is None:
            findings.add("batches", who, "is none of the source's steps")
            return None
        if self._retrained.rounds is None:
            self._same(theirs, take, "than the source's", findings)
        elif self._again is not None:
            batch = self._again.get(take.step)
            if batch is None:
                findings.add("batches", who, "no whole batch of the source's groups is left for it")
            else:
                self._same(batch, take, "than follow from the source's groups", findings)
        return theirs

    def _same(
        self, batch: StepCommitted | BatchTaken, take: TakeBatch, than: str, findings: Findings
    ) -> None:
        same: dict[str, tuple[object, object]] = {
            "groups": (batch.groups, take.groups),
            "parts": (batch.parts, take.parts),
        }
        for name, (one, other) in same.items():
            message = f"its batch has other {name} {than}"
            findings.same("batches", f"step {take.step}", message, expected=one, found=other)

    def _of_source(self, step: int) -> StepCommitted | None:
        """The source's commit of a step; they are read in order."""
        for commit in self._commits:
            if commit.step == step:
                return commit
        return None
