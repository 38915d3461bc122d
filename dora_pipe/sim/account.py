"""What stands in a run, kept from the records alone: a second, smaller model beside the fold.

It shares the record shapes with the orchestrator and nothing else. `facts` books control records in
fold order; what a decision does is booked by `checks`, which first asks whether it was legal.
`wrong` is told of facts that no role may write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from dora_pipe.config.model import LOGGED, Config, in_flight_batches
from dora_pipe.schemas.control import (
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    Resume,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    TrajectoriesLogged,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.sim.account_shapes import GroupAccount, RequestAccount, WorkerAccount, account_of

Wrong = Callable[[str, str], None]
"""(check, what is wrong)"""

_ROUNDING: Final = 1e-9


class Account:
    """See the head of this file."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong
        self.config: Config | None = None
        self.workers: dict[int, WorkerAccount] = {}
        self.names: dict[str, int] = {}
        """The role epoch of the newest incarnation of each name."""
        self.groups: dict[str, GroupAccount] = {}
        self.requests: dict[str, RequestAccount] = {}
        self.version = 0
        self.digests: dict[int, str] = {}
        self.training: TakeBatch | None = None
        self.attempt = 1
        self.revoked: set[tuple[int, int]] = set()
        """Batches that a user ended while they were in training."""
        self.trained: dict[str, int] = {}
        """Trajectory to the step that trained it."""
        self.staleness: dict[int, int] = {}
        self.epochs: dict[str, int] = {}
        self.paused = False
        self.stop_at: int | None = None
        self.stop_now = False
        self.ordinals = {"train": 0, "eval": 0}
        self.counted: dict[str, int] = {}
        """What became of facts: bound, superseded, fenced, ..."""

    # What stands

    @property
    def step(self) -> int:
        """s: the next step to be taken."""
        return self.version + (self.training is not None)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        assert self.config is not None
        steps = self.config.run.steps
        return steps if self.stop_at is None else min(steps, self.stop_at)

    @property
    def limit(self) -> int:
        """C * B in groups."""
        assert self.config is not None
        per_step = self.config.groups.per_step
        wanted = in_flight_batches(self.config.staleness) * per_step
        return max(per_step, math.ceil(wanted - _ROUNDING))

    def u(self) -> list[GroupAccount]:
        """The groups that count against the bound."""
        return [group for group in self.groups.values() if group.in_u]

    def overdue(self, groups: Iterable[GroupAccount], step: int) -> str:
        """The group that cannot be trained in time from `step` on; empty when all can."""
        assert self.config is not None
        line = sorted(groups, key=lambda one: one.place)
        for place, group in enumerate(line):
            turn = step + place // self.config.groups.per_step
            if group.spec.deadline < turn:
                due = group.spec.deadline
                return f"{group.spec.group} is due at step {due} and has its turn at {turn}"
        return ""

    def living(self, name: str, epoch: int) -> WorkerAccount | None:
        """The incarnation, if it still counts."""
        worker = self.workers.get(epoch)
        return worker if worker is not None and worker.name == name and not worker.out else None

    def queued(self) -> set[int]:
        """Versions with requests that wait for a worker."""
        waiting = (one for one in self.requests.values() if one.epoch < 0 and not one.over)
        return {self.groups[one.group].spec.version for one in waiting}

    def needed(self) -> dict[int, str]:
        """Versions that must lie in the store, with who needs them."""
        found = {0: "version 0", self.version: "the newest version"}
        found |= {one.spec.version: name for name, one in self.groups.items() if not one.fate}
        for one in self.workers.values():
            here = set() if one.out else {one.target, one.hosted, *one.held}
            found |= dict.fromkeys(here, one.name)
        found.pop(-1, None)
        return found

    # Facts

    def fact(self, offset: int, record: Any) -> None:
        """Book a control record; kinds that change nothing here are none of its business."""
        handler = _FACTS.get(type(record))
        if handler is not None and (self.config is not None or isinstance(record, RunStarted)):
            handler(self, offset, record)

    def _run_started(self, offset: int, record: RunStarted) -> None:
        if self.config is None:
            self.config = msgspec.convert(record.config, Config)
            self.digests[0] = record.policy.digest

    def _role_started(self, offset: int, record: RoleStarted) -> None:
        last = self.epochs.get(record.role, -1)
        if record.role_epoch <= last:
            self.wrong("epochs", f"{record.role} takes role epoch {record.role_epoch} after {last}")
        self.epochs[record.role] = record.role_epoch

    def _joined(self, offset: int, record: WorkerJoined) -> None:
        older = self.workers.get(self.names.get(record.worker, -1))
        if older is not None and not older.out:
            self.close(older, "replaced")
        self.names[record.worker] = offset
        self.workers[offset] = account_of(offset, record)

    def _ready(self, offset: int, record: WorkerReady) -> None:
        if record.digest != self.digests.get(record.version):
            what = f"{record.worker} hosts other weights than those of version {record.version}"
            self.wrong("C1", what)
        worker = self.living(record.worker, record.epoch)
        if worker is not None and record.version == worker.target:
            worker.ready(record.version)

    def _left(self, offset: int, record: WorkerLeft) -> None:
        worker = self.living(record.worker, record.epoch)
        if worker is None:
            return
        for name, resume in record.progress.items():
            if name in worker.requests:
                self.note_progress(name, resume)
        self.close(worker, "left")

    def _logged(self, offset: int, record: TrajectoriesLogged) -> None:
        for fact in record.facts():
            self._one_logged(fact)

    def _one_logged(self, fact: TrajectoryLogged) -> None:
        request = self._present(fact.worker, fact.epoch, fact.trajectory, fact.attempt)
        if request is None:
            return
        spec = self.groups[request.group].spec
        if (fact.version, fact.digest) != (spec.version, spec.digest):
            self.wrong("C1", f"{fact.trajectory} is of version {fact.version}, not {spec.version}")
        self._count("bound")
        taken = TakenTrajectory(
            trajectory=fact.trajectory,
            attempt=fact.attempt,
            epoch=fact.epoch,
            partition=fact.partition,
            offset=fact.offset,
            sha256=fact.sha256,
        )
        self.ended(fact.trajectory, taken, fact.reward)

    def _failed(self, offset: int, record: RequestFailed) -> None:
        request = self._present(record.worker, record.epoch, record.trajectory, record.attempt)
        if request is None:
            return
        self._count("failed")
        if record.retryable:
            self._lost(record.trajectory, fault=True)
        else:
            self.ended(record.trajectory, None, None)

    def _released(self, offset: int, record: RequestReleased) -> None:
        request = self._present(record.worker, record.epoch, record.trajectory, record.attempt)
        if request is None or request.moving is None:
            return
        self._count("released")
        moving = request.moving
        if record.resume is not None:
            self.note_progress(record.trajectory, record.resume)
        self._lost(record.trajectory, fault=False)
        request.moving, request.kv = moving, record.kv

    def _committed(self, offset: int, record: StepCommitted) -> None:
        key = (record.step, record.attempt)
        training = self.training
        if training is None or key != (training.step, training.attempt):
            if key not in self.revoked:
                self.wrong("commit", f"step {key[0]}, attempt {key[1]} is not in training")
            return
        if record.groups != training.groups:
            self.wrong("commit", f"step {record.step} trained other groups than its decision says")
        if record.digest_before != self.digests[self.version]:
            self.wrong("weights", f"step {record.step} began with other weights than the last left")
        if record.role_epoch != self.epochs.get("trainer"):
            self.wrong("epochs", f"step {record.step} is of a trainer that was out")
        self.training, self.attempt = None, 1
        self.version = record.step + 1
        self.digests[self.version] = record.digest_after
        for group in record.groups:
            self._trained(group, record.step)

    def _trained(self, taken: TakenGroup, step: int) -> None:
        group = self.groups[taken.group]
        if step > group.spec.deadline:
            due = group.spec.deadline
            self.wrong("deadline", f"{taken.group}, due at step {due}, is trained at {step}")
        self.end(group, "trained")
        staleness = step - group.spec.version
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        for one in taken.trajectories:
            if one.trajectory in self.trained:
                self.wrong("once", f"{one.trajectory} is trained again at step {step}")
            self.trained[one.trajectory] = step

    def _refused(self, offset: int, record: BatchRefused) -> None:
        training = self.training
        if training is None or (record.step, record.attempt) != (training.step, training.attempt):
            return
        offenders = {one.group for one in record.offenders}
        self._stop_training(training)
        for taken in training.groups:
            group = self.groups[taken.group]
            if taken.group in offenders:
                group.phase, group.due_fate = "doomed", "failed"
            else:
                group.phase = "finished"

    def _command(self, offset: int, record: Command) -> None:
        if record.verb == "set" and record.args:
            self._set(record.args)
        elif record.verb == "pause" and not record.args:
            self.paused = True
        elif record.verb == "resume" and not record.args:
            self.paused = False
        elif record.verb == "drain":
            self._drain(record.args.get("worker"))
        elif record.verb == "stop":
            self._stop(bool(record.args.get("now", False)))
        elif record.verb == "fail-batch" and self.training is not None:
            training = self.training
            if record.args.get("step", training.step) == training.step:
                self.revoked.add((training.step, training.attempt))
                self._stop_training(training)
                for taken in training.groups:
                    group = self.groups[taken.group]
                    group.phase, group.due_fate = "doomed", "failed"

    def _set(self, changes: dict[str, Any]) -> None:
        """Valid changes are in force from now on; others change nothing."""
        assert self.config is not None
        plain = msgspec.to_builtins(self.config)
        if not changes.keys() <= LOGGED:
            return
        for key, value in changes.items():
            section, _, name = key.partition(".")
            plain[section][name] = value
        try:
            config = msgspec.convert(plain, Config)
        except msgspec.ValidationError:
            return
        if in_flight_batches(config.staleness) >= 1 and config.run.steps >= self.step:
            self.config = config

    def _drain(self, name: str | None) -> None:
        for worker in self.workers.values():
            if not worker.out and name in (None, worker.name):
                worker.draining = True

    def _stop(self, now: bool) -> None:
        assert self.config is not None
        batches = 0 if now else len(self.u()) // self.config.groups.per_step
        self.stop_at = min(self.steps, self.step + batches)
        self.stop_now = self.stop_now or now

    # What follows from facts and decisions

    def close(self, worker: WorkerAccount, how: str) -> None:
        """An incarnation is out; what it had waits again, as a fault unless it left in order."""
        worker.out = how
        for name in sorted(worker.requests):
            self._lost(name, fault=how != "left")

    def note_progress(self, name: str, resume: Resume) -> None:
        """A request has come so far."""
        request = self.requests[name]
        if request.resume is None or resume.tokens > request.resume.tokens:
            request.resume = resume

    def ended(self, name: str, taken: TakenTrajectory | None, reward: float | None) -> None:
        """A sibling has ended."""
        request = self.requests[name]
        self.let_go(name)
        request.over = True
        group = self.groups[request.group]
        group.results[request.sibling], group.rewards[request.sibling] = taken, reward
        if group.phase == "generating":
            self._judge(group)

    def let_go(self, name: str) -> None:
        """A request is on no worker any more."""
        request = self.requests[name]
        worker = self.workers.get(request.epoch)
        if worker is not None:
            worker.requests.discard(name)
        request.epoch, request.moving, request.kv = -1, None, None

    def end(self, group: GroupAccount, fate: str) -> None:
        """A group has its fate."""
        if group.fate:
            self.wrong("fate", f"{group.spec.group} is {fate} after it was {group.fate}")
        group.fate, group.phase = fate, "over"

    def _lost(self, name: str, *, fault: bool) -> None:
        assert self.config is not None
        self.let_go(name)
        request = self.requests[name]
        request.faults += fault
        if fault and request.faults >= self.config.groups.attempts_max:
            self.ended(name, None, None)

    def _present(self, worker: str, epoch: int, name: str, attempt: int) -> RequestAccount | None:
        """The request that this incarnation has under this attempt; else the fact is counted."""
        if self.living(worker, epoch) is None:
            self._count("fenced")
            return None
        request = self.requests.get(name)
        if request is None or request.over or (request.epoch, request.attempt) != (epoch, attempt):
            self._count("superseded")
            return None
        return request

    def _judge(self, group: GroupAccount) -> None:
        """What a group has come to."""
        assert self.config is not None
        rules, size = self.config.groups, group.spec.size
        rewards = [one for one in group.rewards.values() if one is not None]
        lost = len(group.rewards) - len(rewards)
        done = len(group.rewards) == size
        if group.spec.purpose == "eval":
            if done:
                group.phase, group.due_fate = "doomed", "evaluated"
        elif size - lost < min(rules.min_valid_siblings, size):
            group.phase, group.due_fate = "doomed", "failed"
        elif done and rules.filter_zero_advantage and len(set(rewards)) <= 1:
            group.phase, group.due_fate = "doomed", "filtered"
        elif done:
            group.phase = "finished"

    def _stop_training(self, training: TakeBatch) -> None:
        self.training = None
        self.attempt = training.attempt + 1

    def _count(self, what: str) -> None:
        self.counted[what] = self.counted.get(what, 0) + 1


_FACTS: Final[dict[type[Any], Callable[[Account, int, Any], None]]] = {
    RunStarted: Account._run_started,
    RoleStarted: Account._role_started,
    WorkerJoined: Account._joined,
    WorkerReady: Account._ready,
    WorkerLeft: Account._left,
    TrajectoriesLogged: Account._logged,
    RequestFailed: Account._failed,
    RequestReleased: Account._released,
    StepCommitted: Account._committed,
    BatchRefused: Account._refused,
    Command: Account._command,
}
