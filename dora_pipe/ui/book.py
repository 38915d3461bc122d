"""Folds a log into what the pages show; it decides which record of a trajectory is its own.

That is what the last batch with its group names; without one, the first that was logged for the
present attempt by an incarnation that was not out. Audit proves it, this only shows it. Memory is
about 1 kB a trajectory; sums over groups that have ended are kept, so that no page adds them up.
"""

from __future__ import annotations

from collections import Counter, deque
from sys import intern
from typing import Any, Final

from dora_pipe.history.sums import Bucket, bucket_of
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Dispatch,
    End,
    Fence,
    Place,
    Round,
    StopRun,
    TakeBatch,
)
from dora_pipe.schemas.wire import Unknown, kebab
from dora_pipe.ui.course import Course, Filling
from dora_pipe.ui.rows import (
    PHASES,
    DecisionRow,
    GroupRow,
    Placement,
    Stay,
    StepRow,
    TrajectoryRow,
    WorkerRow,
)

DECISIONS_MAX: Final = 20_000
"""Decisions that can be looked at, the newest; dispatches and placements stand with groups."""


class Book:
    """A run as far as it was read. `revision` changes with every record."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.revision = 0
        self.started: RunStarted | None = None
        self.first_ns = 0
        self.last_ns = 0
        """The latest moment that any record names."""
        self.stopped = False
        self.groups: dict[str, GroupRow] = {}
        self.trajectories: dict[str, TrajectoryRow] = {}
        self.steps: list[StepRow] = []
        self.workers: dict[int, WorkerRow] = {}
        """By role epoch."""
        self.decisions: deque[DecisionRow] = deque(maxlen=DECISIONS_MAX)
        self.counts: Counter[str] = Counter()
        """Decisions by kind, dispatches and placements among them."""
        self.not_counting = 0
        """Trajectory records that are not part of their group's result."""
        self.fates: Counter[tuple[Bucket, str]] = Counter()
        """Trajectories of training groups that have ended, by length and fate."""
        self.group_fates: Counter[str] = Counter()
        self.times: dict[Bucket, list[float]] = {}
        """Trained trajectories by length: how many, then seconds in every phase."""
        self.evaluations: dict[int, list[float]] = {}
        """Version to [valid rewards, their sum]."""
        self.sampled_from: Counter[int] = Counter()
        """Training groups by version."""
        self.tokens_course = Course(0)
        """Sampled tokens by the moment at which their trajectory was logged."""
        self._free_ns = 0
        self._takes: dict[tuple[int, int], tuple[int, str]] = {}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as `run started` has it; empty before."""
        return {} if self.started is None else self.started.config

    @property
    def version(self) -> int:
        """The newest version; -1 before there is one."""
        if self.started is None:
            return -1
        return self.steps[-1].step + 1 if self.steps else 0

    def take_fact(self, offset: int, fact: AnyControl | Unknown) -> None:
        """Fold a control record."""
        self.revision += 1
        if isinstance(fact, Unknown):
            return
        self._heard(fact.at_ns)
        match fact:
            case TrajectoriesLogged():
                self._logged(fact)
            case StepCommitted():
                self._committed(offset, fact)
            case RequestFailed():
                row = self.trajectories.get(fact.trajectory)
                if row is not None:
                    row.errors.append(f"attempt {fact.attempt}: {fact.error}: {fact.message}")
                    self._stops(row, fact.epoch, fact.at_ns)
            case RequestReleased():
                row = self.trajectories.get(fact.trajectory)
                if row is not None:
                    self._stops(row, fact.epoch, fact.at_ns)
            case RunStarted() if self.started is None:
                self.started = fact
                self.tokens_course = Course(self.first_ns)
            case _:
                self._role_fact(offset, fact)

    def _role_fact(self, offset: int, fact: AnyControl) -> None:
        """Who is there, and what is worth being told."""
        match fact:
            case RoleStarted(role=role):
                if role == "trainer":
                    self._free_ns = max(self._free_ns, fact.at_ns)
                self._tell(fact.at_ns, "role-started", role, f"role epoch {fact.role_epoch}")
            case WorkerJoined():
                self.workers[offset] = WorkerRow(
                    worker=intern(fact.worker),
                    epoch=offset,
                    engine=f"{fact.engine} {fact.engine_version} on {fact.device}",
                    slots=fact.slots,
                    joined_ns=fact.at_ns,
                    filling=Filling(self.first_ns, fact.slots, fact.at_ns),
                )
                self._tell(fact.at_ns, "worker-joined", fact.worker, f"{fact.slots} slots")
            case WorkerReady():
                if (worker := self.workers.get(fact.epoch)) is not None:
                    from_ns = fact.at_ns - int(fact.load_ms * 1e6)
                    worker.stays.append(Stay(fact.version, from_ns, fact.at_ns))
            case WorkerLeft():
                self._gone(fact.epoch, fact.at_ns, fact.reason)
                self._tell(fact.at_ns, "worker-left", fact.worker, fact.reason)
            case BatchRefused():
                why = "; ".join(f"{one.group}: {one.why}" for one in fact.offenders)
                self._tell(fact.at_ns, "batch-refused", f"step {fact.step}", why)
            case Command():
                self._tell(fact.at_ns, "command", fact.verb, f"by {fact.user}: {fact.args}")
            case WeightsAdopted():
                self._tell(fact.at_ns, "weights-adopted", f"step {fact.step}", fact.why)
            case _:
                pass

    def take_round(self, round_: Round) -> None:
        """Fold a round, behind the control records that it folds."""
        self.revision += 1
        self._heard(round_.now_ns)
        for seen in round_.observations:
            who = getattr(seen, "worker", "") or getattr(seen, "trajectory", "")
            kind = kebab(type(seen).__name__)
            if who:
                self._tell(round_.now_ns, kind, who, "", round_.ordinal)
        for decision in round_.decisions:
            self._decision(decision, round_)

    def _heard(self, at_ns: int) -> None:
        self.first_ns = min(self.first_ns, at_ns) if self.first_ns else at_ns
        self.last_ns = max(self.last_ns, at_ns)

    def _tell(self, at_ns: int, kind: str, subject: str, reason: str, ordinal: int = -1) -> None:
        self.counts[kind] += 1
        self.decisions.append(DecisionRow(at_ns, ordinal, intern(kind), subject, intern(reason)))

    def _gone(self, epoch: int, at_ns: int, why: str) -> None:
        worker = self.workers.get(epoch)
        if worker is not None and not worker.gone_ns:
            worker.gone_ns, worker.gone_why = at_ns, why
            worker.filling.until(at_ns)

    def _stops(self, row: TrajectoryRow, epoch: int, at_ns: int) -> None:
        """A worker has a request no more."""
        worker = self.workers.get(row.running)
        if row.running != epoch or worker is None:
            return
        row.running = -1
        if not worker.gone_ns:
            worker.filling.change(at_ns, -1)

    def _decision(self, decision: AnyDecision, round_: Round) -> None:
        at_ns = round_.now_ns
        match decision:
            case Dispatch():
                self.counts["dispatch"] += 1
                self._dispatched(decision, at_ns)
                return
            case Place():
                self.counts["place"] += 1
                self._placed(decision, at_ns)
                return
            case TakeBatch():
                self._taken(decision, at_ns)
                subject = f"step {decision.step}"
            case End():
                self._end(decision.group, decision.fate, decision.reason, at_ns)
                subject = decision.group
            case Fence():
                self._gone(decision.epoch, at_ns, f"fenced: {decision.reason}")
                subject = decision.worker
            case StopRun():
                self.stopped = True
                subject = self.run
            case _:
                subject = getattr(decision, "trajectory", "") or getattr(decision, "worker", "")
        kind = kebab(type(decision).__name__)
        self._tell(at_ns, kind, subject, decision.reason, round_.ordinal)

    def _dispatched(self, decision: Dispatch, at_ns: int) -> None:
        spec = decision.spec
        names = [trajectory_id(spec.group, sibling) for sibling in range(spec.size)]
        rows = tuple(TrajectoryRow(trajectory=name) for name in names)
        self.trajectories.update(zip(names, rows, strict=True))
        self.groups[spec.group] = GroupRow(
            group=spec.group,
            version=spec.version,
            deadline=spec.deadline,
            purpose=spec.purpose,
            index=spec.index,
            reason=intern(decision.reason),
            dispatched_ns=at_ns,
            trajectories=rows,
        )
        if spec.purpose == "train":
            self.sampled_from[spec.version] += 1

    def _placed(self, decision: Place, at_ns: int) -> None:
        group = self.groups.get(decision.spec.group)
        if group is None:
            return
        worker, reason = intern(decision.worker), intern(decision.reason)
        for one in decision.siblings:
            resumed = one.resume.tokens if one.resume else 0
            at = Placement(at_ns, worker, decision.epoch, one.attempt, resumed, reason)
            row = group.trajectories[one.sibling]
            self._stops(row, row.running, at_ns)
            row.placements.append(at)
            row.running = decision.epoch
        host = self.workers.get(decision.epoch)
        if host is not None and not host.gone_ns:
            host.filling.change(at_ns, len(decision.siblings))

    def _logged(self, fact: TrajectoriesLogged) -> None:
        worker = self.workers.get(fact.epoch)
        out = worker is None or worker.gone_ns > 0
        for one in fact.trajectories:
            row = self.trajectories.get(one.trajectory)
            present = row.placements[-1] if row is not None and row.placements else None
            same = present is not None and (present.epoch, present.attempt) == (
                fact.epoch,
                one.attempt,
            )
            if row is None or worker is None or out or not same or row.offset >= 0:
                self.not_counting += 1
                continue
            row.logged_ns, row.worker = fact.at_ns, worker.worker
            row.tokens, row.reward, row.finish = one.tokens, one.reward, intern(one.finish)
            row.partition, row.offset = one.partition, one.offset
            self._stops(row, fact.epoch, fact.at_ns)
            self.tokens_course.count(fact.at_ns, one.tokens)
            worker.trajectories += 1
            worker.tokens += one.tokens

    def _taken(self, take: TakeBatch, at_ns: int) -> None:
        self._takes[take.step, take.attempt] = at_ns, take.reason
        for taken in take.groups:
            if (group := self.groups.get(taken.group)) is not None:
                group.taken_ns, group.step = at_ns, take.step
            for one in taken.trajectories:
                if (row := self.trajectories.get(one.trajectory)) is not None:
                    row.partition, row.offset = one.partition, one.offset

    def _committed(self, offset: int, fact: StepCommitted) -> None:
        if self.steps and fact.step <= self.steps[-1].step:
            return  # a second commit of a step counts for nothing
        taken_ns, reason = self._takes.pop((fact.step, fact.attempt), (fact.at_ns, ""))
        rows: list[TrajectoryRow] = []
        means: list[float] = []
        for taken in fact.groups:
            self._end(taken.group, "trained", "", fact.at_ns, step=fact.step)
            own = [self.trajectories.get(one.trajectory) for one in taken.trajectories]
            found = [one for one in own if one is not None]
            valid = [one.reward for one in found if one.reward is not None]
            rows += found
            if valid:
                means.append(sum(valid) / len(valid))
        rewards = [one.reward for one in rows if one.reward is not None]
        step = StepRow(
            step=fact.step,
            attempt=fact.attempt,
            offset=offset,
            free_ns=self._free_ns or taken_ns,
            taken_ns=taken_ns,
            committed_ns=fact.at_ns,
            compute_s=fact.compute_s,
            reason=reason,
            groups=tuple(taken.group for taken in fact.groups),
            means=tuple(means),
            rewards=len(rewards),
            reward_sum=sum(rewards),
            invalid=len(rows) - len(rewards),
            staleness=tuple(staleness_of(fact.step, taken.version) for taken in fact.groups),
            bound=max((taken.deadline - taken.version for taken in fact.groups), default=0),
            tokens=tuple(sorted(one.tokens for one in rows)),
            figures=fact.figures,
            settings=fact.settings,
            digest_before=fact.digest_before,
            digest_after=fact.digest_after,
            contributions=fact.contributions.sha256,
            adopted=fact.adopted,
        )
        self.steps.append(step)
        self._free_ns = fact.at_ns

    def _end(self, name: str, fate: str, why: str, at_ns: int, *, step: int = -1) -> None:
        group = self.groups.get(name)
        if group is None or group.fate != "open":
            return
        group.fate, group.why, group.step, group.ended_ns = intern(fate), why, step, at_ns
        self.group_fates[fate] += 1
        if group.purpose == "eval":
            sums = self.evaluations.setdefault(group.version, [0.0, 0.0])
            for row in group.trajectories:
                if row.reward is not None:
                    sums[0] += 1
                    sums[1] += row.reward
            return
        for row in group.trajectories:
            self.fates[bucket_of(row.tokens), fate] += 1
        if fate == "trained":
            self._times(group)

    def _times(self, group: GroupRow) -> None:
        complete_ns = max(row.logged_ns for row in group.trajectories)
        for row in group.trajectories:
            if not row.logged_ns or not row.placements:
                continue
            marks = (
                group.dispatched_ns,
                row.placements[0].at_ns,
                row.logged_ns,
                complete_ns,
                group.taken_ns,
                group.ended_ns,
            )
            sums = self.times.setdefault(bucket_of(row.tokens), [0.0] * (1 + len(PHASES)))
            sums[0] += 1
            for place in range(len(PHASES)):
                sums[place + 1] += max(0, marks[place + 1] - marks[place]) / 1e9

    def group_of(self, trajectory: str) -> GroupRow | None:
        """The group of a trajectory."""
        return self.groups.get(group_of(trajectory))
