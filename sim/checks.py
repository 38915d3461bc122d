"""Live checks of every appended record.

Audit's ledger processes each record; the first finding ends the seed. `LiveLedger` adds progress,
KV caches of moves, room and loaded versions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.audit import findings
from dora_pipe.audit.bound_ledger import outlook_of, why_infeasible
from dora_pipe.audit.check_records import Seen
from dora_pipe.audit.check_steps import check_steps
from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.audit.findings import Check, Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.round_reader import Fact, FoldedRound
from dora_pipe.ledger.history import GroupHistory, Moment, RequestHistory, WorkerHistory
from dora_pipe.orchestrator.entities import OPEN_TIMES
from dora_pipe.schemas.control import (
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    Resume,
    TrajectoriesLogged,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    End,
    EndSamples,
    Fence,
    Halt,
    LeaseExpired,
    Migrate,
    OffEngine,
    Progressed,
    Round,
    Schedule,
    ScheduledRequest,
    TakeBatch,
)

Wrong = Callable[[str, str], None]

CHECKS: Final[dict[str, str]] = {
    **{str(check): holds for check, holds in findings.CHECKS.items()},
    "outcome": "S1: a group ends with the outcome of its trajectories; none is placed later",
    "feasible": "S3: every dispatched, untaken group can still be trained in time",
    "placement": "S5, S24: a request is placed where its version is loaded, in a free slot",
    "binding": "S6, S7: a batch contains the records that count, of live incarnations only",
    "assign": "S10: a worker changes its version only while it is empty and loads nothing",
    "lease": "S11: no role is fenced that sent a status, or while the orchestrator did not read",
    "progress": "S14: a request that is placed again continues from its newest known progress",
    "admission": "S16: nothing is admitted while paused or while no worker serves an older version",
    "move": "S18: a request moves only to a worker that serves its version, once at a time",
    "incarnations": "R4: incarnations count up; nothing is decided or committed under an older one",
    "retired": "S19: an incarnation that has left appends no records",
    "kept": "S20: a version that an open group carries, or a worker has, is available in the store",
    "calls": "S26: an agent receives the logged answers, also repeated; its record equals them",
    "contexts": "S27: a token shared by calls is recorded once",
    "waiting": "S28: a session without an open call holds no slot",
    "replay": "S29: an environment is replayed with the original turns",
    "written": "S30: no update part starts while its weights are written",
    "digest": "R3: the incremental state digest of an orchestrator equals the full digest",
    "log": "R1: the audit of the whole log finds nothing",
    "role": "no role reports a broken invariant",
    "live": "L2: after the last fault the run ends; every wait until then has a name",
}


class _FirstFinding(Findings):
    def __init__(self, wrong: Wrong) -> None:
        super().__init__()
        self._raise = wrong

    def add(
        self,
        check: Check,
        subject: str,
        message: str,
        *,
        expected: object = "",
        actual: object = "",
    ) -> None:
        super().add(check, subject, message, expected=expected, actual=actual)
        self._raise(check, self.violations[-1].line.removeprefix(f"{check} "))


@dataclass(slots=True)
class WorkerNotes:
    """Additional facts about an incarnation."""

    loaded: int = -1
    """Last version loaded as assigned."""
    draining: bool = False
    silent: bool = False
    off_engine: int = 0
    """Off-engine requests at the last observation, minus those that left."""
    came: int = 0
    """Requests then or placed since."""


@dataclass(slots=True)
class RequestNotes:
    resume: Resume | None = None
    known_tokens: int = 0
    """Tokens that its lost worker had reported; it must resume there or later."""
    kv: Blob | None = None


class LiveLedger(Ledger):
    """Ledger that calls `wrong`, which may raise."""

    def __init__(self, run: str, wrong: Wrong) -> None:
        super().__init__(run, _FirstFinding(wrong))
        self.counted: Counter[str] = Counter()
        """Effective facts of requests."""
        self._on_wrong = wrong
        self._paused = False
        self._stopped_now = False
        self._failed: set[str] = set()
        """Groups refused or ended by a user."""
        self._workers: defaultdict[int, WorkerNotes] = defaultdict(WorkerNotes)
        self._requests: defaultdict[str, RequestNotes] = defaultdict(RequestNotes)

    @property
    def steps_committed(self) -> int:
        return self.legality.bound.version

    def placed_on(self, incarnation: int) -> list[str]:
        return [
            name
            for name, entry in self._open_requests()
            if entry.running is not None and entry.running.incarnation == incarnation
        ]

    def known(self, trajectory: str, tokens: int) -> None:
        notes = self._requests[trajectory]
        notes.known_tokens = max(notes.known_tokens, tokens)

    def needed(self) -> dict[int, str]:
        versions = {0: "version 0", self.version: "the newest version"}
        versions |= {group.spec.version: name for name, group in self.accounts.open.items()}
        for incarnation, worker in self._there():
            here = {worker.target, self._workers[incarnation].loaded, *worker.held}
            versions |= dict.fromkeys(here, worker.joined.worker)
        versions.pop(-1, None)
        return versions

    @property
    def _in_force(self) -> EffectiveConfig:
        in_force = self.legality.in_force
        assert in_force is not None
        return in_force

    def _there(self) -> Iterator[tuple[int, WorkerHistory]]:
        return (
            (incarnation, worker)
            for incarnation, worker in self.accounts.workers.items()
            if worker.gone is None
        )

    def _open_requests(self) -> Iterator[tuple[str, RequestHistory]]:
        return (pair for group in self.accounts.open.values() for pair in group.requests.items())

    def _present(self, fact: Any) -> RequestHistory | None:
        entry = self.accounts.request(fact.trajectory)
        worker = self.accounts.workers.get(fact.incarnation)
        attempt = None if entry is None or worker is None or worker.gone else entry.running
        if attempt is None or attempt.key != (fact.attempt, fact.incarnation):
            return None
        return entry

    def _has(self, incarnation: int, worker: WorkerHistory, version: int) -> bool:
        if worker.several:
            return version in worker.held
        return worker.target == self._workers[incarnation].loaded == version

    def _due_outcome(self, group: GroupHistory) -> str:
        if group.spec.group in self._failed:
            return "failed"
        outlook = outlook_of(group, self._in_force.config.rollout)
        return "" if outlook in ("running", "finished") else outlook

    def _require(self, check: str, holds: bool, otherwise: str) -> None:
        if not holds:
            self._on_wrong(check, otherwise)

    def states(self) -> Counter[str]:
        """Return counts of outcomes and staleness."""
        accounts, sums, counts = self.accounts, self.accounts.summed(), Counter[str]()
        for name, count in self.counted.items():
            counts[f"fact {name}"] += count
        for logged in accounts.logged.values():
            counts[f"fact {logged.status}"] += 1
        for outcome, count in sums.groups.items():
            counts[f"group {outcome}"] += count
        for worker in accounts.workers.values():
            counts[f"worker {worker.departure or 'there'}"] += 1
        for staleness, count in sums.staleness.items():
            counts[f"staleness {staleness}"] += count
        return counts

    def apply(self, turn: FoldedRound) -> None:
        super().apply(turn)
        steps, self.unread_steps = self.unread_steps, []
        check_steps(self, Seen(), steps)
        if self.config is not None:
            bound, per_step = self.legality.bound, self._in_force.config.rollout.prompts_per_step
            why = why_infeasible(bound.deadlines, bound.step, per_step)
            self._require("feasible", not why, why)

    def round(self, round_: Round, moment: Moment) -> None:
        for observation in round_.observations:
            if isinstance(observation, LeaseExpired):
                self._workers[observation.incarnation].silent = True
            elif isinstance(observation, Progressed):
                self._note_progress(observation.trajectory, observation.resume)
            elif isinstance(observation, OffEngine):
                notes, here = (
                    self._workers[observation.incarnation],
                    len(self.placed_on(observation.incarnation)),
                )
                notes.off_engine, notes.came = min(observation.requests, here), here
        super().round(round_, moment)

    def _note_progress(self, trajectory: str, resume: Resume) -> None:
        notes = self._requests[trajectory]
        if notes.resume is None or resume.tokens > notes.resume.tokens:
            notes.resume = resume

    def fact(self, fact: Fact, moment: Moment) -> None:
        match record := fact.record:
            case WorkerLeft():
                there = set(self.placed_on(record.incarnation))
                for name, resume in record.progress.items():
                    if name in there:
                        self._note_progress(name, resume)
            case RequestReleased():
                self._released(record)
            case RequestFailed():
                self.counted["failed"] += self._present(record) is not None
            case TrajectoriesLogged():
                for logged in record.facts():
                    group = self.accounts.open.get(group_of(logged.trajectory))
                    holds = group is None or logged.version == group.spec.version
                    self._require(
                        "C1", holds, f"{logged.trajectory} is of version {logged.version}"
                    )
            case BatchRefused():
                if self.legality.bound.training == (record.step, record.attempt):
                    self._failed.update(offender.group for offender in record.offenders)
            case Command():
                self._command(record)
        super().fact(fact, moment)
        if isinstance(record, WorkerReady):
            worker = self.accounts.workers.get(record.incarnation)
            if worker is not None and worker.gone is None and record.version == worker.target:
                self._workers[record.incarnation].loaded = record.version

    def _released(self, fact: RequestReleased) -> None:
        entry = self._present(fact)
        if entry is None or not entry.moving:
            return
        self.counted["released"] += 1
        if fact.resume is not None:
            self._note_progress(fact.trajectory, fact.resume)
        self._requests[fact.trajectory].kv = fact.kv

    def _command(self, command: Command) -> None:
        if command.verb in ("pause", "resume") and not command.args:
            self._paused = command.verb == "pause"
        elif command.verb == "drain":
            name = command.args.get("worker")
            for incarnation, worker in self._there():
                if name in (None, worker.joined.worker):
                    self._workers[incarnation].draining = True
        elif command.verb == "stop":
            self._stopped_now |= bool(command.args.get("now", False))
        elif ended := self.legality.ended_by(command):
            self._failed.update(group.group for group in self.takes[ended].take.groups)

    def decision(self, decision: AnyDecision, moment: Moment) -> None:
        match decision:
            case Dispatch():
                self._dispatch(decision)
            case TakeBatch():
                self._take(decision)
            case End():
                self._end(decision)
            case EndSamples():
                self._end_samples(decision)
            case Halt():
                self._halt()
            case Schedule():
                self._place(decision)
            case Migrate():
                self._move(decision)
            case Cancel():
                self._cancel(decision)
            case Assign():
                self._assign(decision)
            case Fence():
                silent = self._workers[decision.incarnation].silent
                what = f"{decision.worker} is fenced without an observed silence"
                self._require("lease", silent, what)
        super().decision(decision, moment)

    def _dispatch(self, decision: Dispatch) -> None:
        who = decision.spec.group
        self._require("admission", not self._paused, f"{who} is dispatched while the run is paused")
        if decision.spec.purpose == "eval":
            return
        served = {
            version
            for incarnation, worker in self._there()
            if not self._workers[incarnation].draining
            for version in (worker.target, *worker.held)
        }
        queued = {
            group.spec.version
            for group in self.accounts.open.values()
            for entry in group.requests.values()
            if self._queued(entry)
        }
        orphans = sorted(queued - served)
        what = f"{who} is admitted while version {orphans[:1]} has no worker"
        self._require("admission", not orphans, what)

    def _queued(self, entry: RequestHistory) -> bool:
        return entry.waiting or not (entry.over or entry.attempts)

    def _take(self, batch: TakeBatch) -> None:
        for taken in batch.groups:
            group = self.accounts.open.get(taken.group)
            counts = () if group is None else tuple(record.taken for record in group.bound)
            what = f"batch {batch.step}/{batch.attempt} has other records of {taken.group}"
            self._require("binding", taken.trajectories == counts, what)

    def _end(self, decision: End) -> None:
        name, in_force, bound = decision.group, self._in_force, self.legality.bound
        group = self.accounts.open.get(name)
        if group is None:
            return
        running = [who for who, entry in group.requests.items() if entry.running]
        self._require("outcome", not running, f"{name} ends while {running[:1]} is placed")
        due = self._due_outcome(group)
        if decision.outcome == "cancelled" and not due:
            remaining = (in_force.steps - bound.step) * in_force.config.rollout.prompts_per_step
            redundant = (
                bound.size > remaining if group.spec.purpose == "train" else self._stopped_now
            )
            self._require(
                "outcome", redundant, f"{name} is cancelled, although a step is left for it"
            )
        else:
            what = f"{name} ends as {decision.outcome}, but it is {due or 'not over'}"
            self._require("outcome", decision.outcome == due, what)

    def _end_samples(self, decision: EndSamples) -> None:
        group = self.accounts.open.get(decision.group)
        entries = {} if group is None else group.requests
        running = [who for who, entry in entries.items() if entry.running]
        what = f"{decision.group} ends trajectories while {running[:1]} is placed"
        self._require("outcome", not running, what)

    def _halt(self) -> None:
        rollout = self._in_force.config.rollout
        share, per_step = rollout.max_failed_share, rollout.prompts_per_step
        failed = self.accounts.summed().groups["failed"]
        enough = share is not None and failed >= min(2 * per_step, share * 4 * per_step)
        self._require("outcome", enough, f"the run is halted although only {failed} groups failed")

    def _place(self, decision: Schedule) -> None:
        spec, incarnation = decision.spec, decision.incarnation
        group, worker = self.accounts.open.get(spec.group), self.accounts.workers.get(incarnation)
        if group is None or worker is None:
            return
        due, who = self._due_outcome(group), f"{spec.group} is placed on {decision.worker}"
        self._require("placement", not due, f"{who}, but it is {due}")
        self._require("placement", not self._workers[incarnation].draining, f"{who}, which drains")
        what = (
            f"{who}, which has loaded {self._workers[incarnation].loaded}, target {worker.target}"
        )
        self._require("placement", self._has(incarnation, worker, spec.version), what)
        self._fits(decision, worker, who)
        for request in decision.requests():
            self._place_one(request)

    def _fits(self, decision: Schedule, worker: WorkerHistory, who: str) -> None:
        """Check that requests have a slot or prefetch room, and that off-engine requests are
        bounded."""
        notes, here = self._workers[decision.incarnation], len(self.placed_on(decision.incarnation))
        many, size = here + len(decision.samples), worker.joined.slots + worker.joined.prefetch
        off_engine = max(0, notes.off_engine - (notes.came - here))
        entries = (self.accounts.request(request.trajectory) for request in decision.requests())
        # Reserved slots remain reserved even if other requests need a slot again.
        kept = notes.came > 0 and all(entry is not None and entry.moving for entry in entries)
        fits = many <= min(size + off_engine, OPEN_TIMES * size)
        self._require("placement", fits or kept, f"{who}, which has {many} then: too many")
        notes.came += len(decision.samples)

    def _place_one(self, request: ScheduledRequest) -> None:
        who, notes = request.trajectory, self._requests[request.trajectory]
        tokens = 0 if request.resume is None else request.resume.tokens
        known_tokens = max(0 if notes.resume is None else notes.resume.tokens, notes.known_tokens)
        newest = request.resume == notes.resume and tokens >= known_tokens
        self._require(
            "progress", newest, f"{who} continues from {tokens} tokens of {known_tokens} known"
        )
        self._require("move", request.kv == notes.kv, f"{who} gets another KV cache than it left")
        notes.kv = None

    def _move(self, decision: Migrate) -> None:
        who, entry = decision.trajectory, self.accounts.request(decision.trajectory)
        group = self.accounts.open.get(group_of(who))
        to = self.accounts.workers.get(decision.to_incarnation)
        if entry is None or group is None or to is None:
            return
        self._require("move", not entry.moving, f"{who} is moved while it moves")
        there = self._has(decision.to_incarnation, to, group.spec.version)
        there &= not self._workers[decision.to_incarnation].draining
        self._require("move", there, f"{who} moves to {decision.to}, which does not host it")
        self._require(
            "move", decision.to_incarnation != decision.incarnation, f"{who} moves to where it is"
        )

    def _cancel(self, decision: Cancel) -> None:
        what = f"{decision.trajectory} is cancelled where it is not placed"
        self._require("placement", self._present(decision) is not None, what)

    def _assign(self, decision: Assign) -> None:
        worker = self.accounts.workers.get(decision.incarnation)
        if worker is None:
            return
        notes, placed = self._workers[decision.incarnation], self.placed_on(decision.incarnation)
        who = f"{decision.worker} gets version {decision.version}"
        self._require("assign", not notes.draining, f"{who}, but it drains")
        what = f"{who}, but it has {len(placed)} requests, target {worker.target}"
        free = worker.several or not placed or decision.version == NO_VERSION
        self._require("assign", free and worker.target == notes.loaded, what)
        used = {self.accounts.open[group_of(trajectory)].spec.version for trajectory in placed}
        what = f"{who} and drops {decision.drop}, {sorted(used)} are in use"
        self._require("assign", used.isdisjoint(decision.drop), what)
