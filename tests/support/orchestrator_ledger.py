"""An account of a run kept from the log alone, by other means than State: what must hold, holds."""

from __future__ import annotations

from dora_pipe.config.model import Config
from dora_pipe.schemas.control import AnyControl, StepCommitted, WorkerJoined
from dora_pipe.schemas.rounds import (
    Dispatch,
    End,
    Fence,
    GroupSpec,
    Move,
    Place,
    Round,
    TakeBatch,
)


class Ledger:
    """Checks as it watches; `check_end` checks what only the end can show."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.specs: dict[str, GroupSpec] = {}
        self.fates: dict[str, str] = {}
        self.trained: dict[str, int] = {}
        """Trajectory id to the step that trained it."""
        self.placements: dict[str, dict[int, int]] = {}
        """Trajectory id to role epochs by attempt."""
        self.taken: dict[tuple[int, int], TakeBatch] = {}
        self.moves: dict[str, int] = {}
        """Trajectory id to how often it was asked to move."""
        self.fenced: set[int] = set()
        self.epochs: dict[str, int] = {}
        self.staleness: dict[int, int] = {}
        self.step = 0
        self.rounds = 0
        self._offset = 0

    def next_offset(self) -> int:
        """Where the next trajectory lies."""
        self._offset += 3
        return self._offset

    def fact(self, offset: int, record: AnyControl) -> None:
        """Something was appended to control."""
        if isinstance(record, WorkerJoined):
            if record.worker in self.epochs:
                self.fenced.add(self.epochs[record.worker])
            self.epochs[record.worker] = offset
        elif isinstance(record, StepCommitted):
            self._commit(record)

    def round(self, round_: Round) -> None:
        """A round was appended."""
        assert round_.ordinal == self.rounds
        self.rounds += 1
        for decision in round_.decisions:
            assert decision.reason, "a decision without a reason"
            if isinstance(decision, Dispatch):
                assert decision.spec.group not in self.specs, "dispatched twice"
                self.specs[decision.spec.group] = decision.spec
            elif isinstance(decision, Place):
                assert decision.spec == self.specs[decision.spec.group]
                for one in decision.requests():
                    attempts = self.placements.setdefault(one.trajectory, {})
                    assert one.attempt == len(attempts) + 1, "attempts are not contiguous"
                    attempts[one.attempt] = decision.epoch
            elif isinstance(decision, Move):
                placed = self.placements[decision.trajectory]
                assert placed[decision.attempt] == decision.epoch, "moves from where it is not"
                assert decision.attempt == len(placed), "moves under an old attempt"
                assert decision.to_epoch not in self.fenced
                self.moves[decision.trajectory] = self.moves.get(decision.trajectory, 0) + 1
            elif isinstance(decision, TakeBatch):
                self._take(decision)
            elif isinstance(decision, End):
                self._end(decision.group, decision.fate)
            elif isinstance(decision, Fence):
                self.fenced.add(decision.epoch)

    def check_end(self) -> None:
        """Every group has exactly one fate, and all steps are trained."""
        assert self.step == self.config.run.steps
        assert self.specs.keys() == self.fates.keys(), "a group without a fate"
        trained = [group for group, fate in self.fates.items() if fate == "trained"]
        assert len(trained) == self.config.run.steps * self.config.groups.per_step
        for group, spec in self.specs.items():
            ends = ("evaluated",) if spec.purpose == "eval" else ("trained", "filtered", "failed")
            assert self.fates[group] in ends

    def _take(self, batch: TakeBatch) -> None:
        assert batch.step == self.step, "not the next step"
        assert (batch.step, batch.attempt) not in self.taken
        assert len(batch.groups) == self.config.groups.per_step
        for group in batch.groups:
            spec = self.specs[group.group]
            assert spec.purpose == "train"
            assert (group.version, group.deadline) == (spec.version, spec.deadline)
            assert spec.version <= batch.step <= spec.deadline, "C3"
            assert group.group not in self.fates, "taken after its end"
            for one in group.trajectories:
                placed = self.placements[one.trajectory][one.attempt]
                assert one.epoch == placed, "a trajectory of an incarnation it was not placed on"
        self.taken[batch.step, batch.attempt] = batch

    def _commit(self, record: StepCommitted) -> None:
        batch = self.taken[record.step, record.attempt]
        assert batch.groups == record.groups
        if record.step != self.step:
            return
        self.step += 1
        for group in record.groups:
            self._end(group.group, "trained")
            spec = self.specs[group.group]
            staleness = record.step - spec.version
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            for one in group.trajectories:
                assert one.trajectory not in self.trained, "trained twice"
                self.trained[one.trajectory] = record.step

    def _end(self, group: str, fate: str) -> None:
        assert group not in self.fates, f"{group} ends twice"
        self.fates[group] = fate
