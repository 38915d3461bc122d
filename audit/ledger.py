"""Ledger of a run: dispatched groups, outcomes, records that count.

It shares only record types with the orchestrator, to find its mistakes. Commits count even without
a decision.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.audit.entries import Attempted, Serving, StepEntry, Taken, VersionEntry
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.group_ledger import AuditedGroups
from dora_pipe.audit.legality import Legality
from dora_pipe.audit.round_reader import Fact, FoldedRound
from dora_pipe.audit.spill import SpillDict, SpillFile
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.ledger.history import Moment, WorkerHistory
from dora_pipe.schemas.batch import parts_of
from dora_pipe.schemas.control import (
    RUN_STOPPED,
    AnyControl,
    BatchRefused,
    Command,
    GroupScored,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    VersionsDropped,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    config_digest,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    End,
    GroupExpired,
    Round,
    Schedule,
    StopRun,
    TakeBatch,
)
from dora_pipe.schemas.wire import Unknown
from dora_pipe.store.adapters import stands_on


class Ledger:
    def __init__(self, run: str, findings: Findings) -> None:
        self.run = run
        self.findings = findings
        self.file = SpillFile()
        self.accounts = AuditedGroups(findings, self.file)
        self.started: RunStarted | None = None
        self.config: Config | None = None
        """As started; `Legality` follows changes."""
        self.steps: SpillDict[int, StepEntry] = SpillDict(self.file, "step", StepEntry)
        self.versions: SpillDict[int, VersionEntry] = SpillDict(self.file, "version", VersionEntry)
        self.version = -1
        """-1 before version 0."""
        self.takes: SpillDict[tuple[int, int], Taken] = SpillDict(self.file, "take", Taken)
        self.unread_steps: list[StepEntry] = []
        """Not checked yet, including repeated ones."""
        self.unread_versions: list[VersionEntry] = []
        self.committed = 0
        self.published = 0
        self.not_trained: list[Attempted] = []
        self.adopted: list[WeightsAdopted] = []
        self.dropped: set[int] = set()
        """Dropped versions; their files may be missing."""
        self.commands: list[Command] = []
        self.roles: list[RoleStarted] = []
        self.unknown: Counter[str] = Counter()
        self.rounds = 0
        self.now_ns = 0
        self.stopped: Moment | None = None
        self.serving = Serving()
        self.legality = Legality(self)
        self.accounts.on_sample_ended = self.legality.sample_ended

    @property
    def partial_rollout(self) -> bool:
        """Report whether partial rollout allows mixed versions."""
        return self.config is not None and self.config.staleness.partial_rollout

    def spill(self, newest: int) -> None:
        """Spill old versions with their steps, batches and hostings."""
        oldest = min(
            (group.spec.version for group in self.accounts.open.values()), default=self.version
        )
        before = min(oldest, self.version - newest)
        self.versions.spill([version for version in self.versions if version < before])
        self.steps.spill([step for step in self.steps if step < before])
        self.takes.spill([key for key in self.takes if key[0] < before])
        for worker in self.accounts.workers.values():
            worker.first_ready = {
                v: offset for v, offset in worker.first_ready.items() if v >= before
            }
            worker.assigned = {v: time_ns for v, time_ns in worker.assigned.items() if v >= before}

    def apply(self, turn: FoldedRound) -> None:
        ordinal = -1 if turn.round is None else turn.round.ordinal
        if turn.round is not None:
            self.rounds += 1
            self.now_ns = turn.round.now_ns
            self.serving.advance(self.now_ns)
        for fact in turn.facts:
            self.findings.looked["control"] += 1
            moment = Moment(round=ordinal, offset=fact.offset, now_ns=self.now_ns)
            self.fact(fact, moment)
        if turn.round is not None:
            self.round(turn.round, Moment(round=ordinal, offset=turn.offset, now_ns=self.now_ns))

    def round(self, round_: Round, moment: Moment) -> None:
        self.legality.round(round_, self.roles)
        for observation in round_.observations:
            if isinstance(observation, GroupExpired) and (
                group := self.legality.expired(observation, moment)
            ):
                self.accounts.expire(group)
        for decision in round_.decisions:
            self.findings.looked["decisions"] += 1
            self.decision(decision, moment)

    def fact(self, fact: Fact, moment: Moment) -> None:
        record = fact.record
        if record is None:
            return
        if isinstance(record, Unknown):
            self.unknown[record.kind] += 1
            return
        if self.started is None and not isinstance(record, RunStarted):
            self._wrong(moment, "comes before `run started`")
        if fact.key and fact.key != key_of(record):
            self._wrong(moment, "has another key", key_of(record) or "none", fact.key)
        self._known(record, moment)

    def _known(self, record: AnyControl, moment: Moment) -> None:
        match record:
            case RunStarted():
                self._run_started(record, moment)
            case RoleStarted():
                self.roles.append(record)
            case WorkerJoined():
                self.accounts.note_packages(record)
                self.accounts.fact(moment.offset, record)
                self.serving.keep(self._living())
            case WorkerReady():
                self._worker_ready(record, moment)
            case WorkerLeft():
                self._worker_left(record, moment)
            case TrajectoriesLogged():
                self._check_served(record)
                self.accounts.fact(moment.offset, record)
            case RequestReleased() | RequestFailed() | GroupScored():
                self.accounts.fact(moment.offset, record)
            case StepCommitted():
                self._committed(record, moment)
            case BatchRefused():
                self._refused(record, moment)
            case Command():
                self.commands.append(record)
                self.legality.command(record)
            case WeightsAdopted():
                self.adopted.append(record)
            case VersionsDropped():
                if self.stopped is not None:
                    self.dropped.update(record.versions)

    def _wrong(
        self, moment: Moment, message: str, expected: object = "", actual: object = ""
    ) -> None:
        where = f"control:{moment.offset}"
        self.findings.add("control", where, message, expected=expected, actual=actual)

    def _run_started(self, fact: RunStarted, moment: Moment) -> None:
        if fact.run != self.run:
            self._wrong(moment, "starts another run", expected=self.run, actual=fact.run)
            return
        if self.started is not None:
            self._wrong(moment, "starts the run a second time")
            return
        self.started = fact
        self._published(VersionEntry(version=0, manifest=fact.policy, at=moment))
        try:
            self.config = logged_config(fact.config)
        except msgspec.ValidationError as error:
            self._wrong(moment, f"the configuration cannot be read: {error}")
            return
        self._check_start(fact, self.config, moment)
        self.accounts.max_attempts = self.config.rollout.max_attempts
        self.accounts.scored_together = frozenset(fact.scored_together)
        self.legality.in_force = EffectiveConfig(self.config)

    def _check_start(self, fact: RunStarted, config: Config, moment: Moment) -> None:
        where, findings = f"control:{moment.offset}", self.findings
        message = "the configuration of `run started` is not the one of its digest"
        actual = config_digest(fact.config)
        findings.same("control", where, message, expected=fact.config_digest, actual=actual)
        message = "`run started` names another run or seed than its configuration"
        expected = (config.run.name, config.run.seed)
        findings.same("control", where, message, expected=expected, actual=(fact.run, fact.seed))

    def _published(self, version: VersionEntry) -> None:
        self.versions[version.version] = version
        self.unread_versions.append(version)
        self.version = max(self.version, version.version)
        self.published += 1

    def _worker_ready(self, fact: WorkerReady, moment: Moment) -> None:
        worker = self._worker(fact.worker, fact.incarnation, "is ready", moment)
        if fact.version == NO_VERSION:
            if worker is not None:
                self._sleeps(worker, fact, moment)
                self.accounts.fact(moment.offset, fact)
            return
        version = self.versions.get(fact.version)
        if version is None:
            self._wrong(
                moment, f"{fact.worker} serves version {fact.version}, which was never published"
            )
        elif worker is not None:
            who = f"{fact.worker} at control:{moment.offset}"
            message = f"serves other weights than the published ones of version {fact.version}"
            self.findings.same("C1", who, message, expected=version.digest, actual=fact.digest)
            if fact.version not in worker.assigned and fact.version not in worker.first_ready:
                self._undecided(
                    f"{fact.worker} serves version {fact.version}", "assigned it", moment
                )
            worker.first_ready.setdefault(fact.version, moment.offset)
            self.accounts.fact(moment.offset, fact)
            # A repeated report may name a version dropped since.
            if worker.several and fact.version == worker.target:
                worker.held.add(fact.version)
            if worker.gone is None:
                self.serving.ready(fact.incarnation, *(sorted(worker.held) or [fact.version]))

    def _sleeps(self, worker: WorkerHistory, fact: WorkerReady, moment: Moment) -> None:
        if not worker.joined.colocated:
            self._undecided(f"{fact.worker} sleeps", "required it", moment)
        elif worker.target == NO_VERSION:
            worker.awake = False

    def _check_served(self, fact: TrajectoriesLogged) -> None:
        worker = self.accounts.workers.get(fact.incarnation)
        if worker is None or not worker.several or fact.version in worker.first_ready:
            return
        for trajectory in fact.trajectories:
            if group_of(trajectory.trajectory) in self.accounts.open:
                message = f"was logged by {fact.worker}, which never served version {fact.version}"
                self.findings.add("C1", trajectory.trajectory, message)

    def _worker_left(self, fact: WorkerLeft, moment: Moment) -> None:
        worker = self._worker(fact.worker, fact.incarnation, "leaves", moment)
        if fact.reason.startswith(RUN_STOPPED) and self.stopped is None:
            self._undecided(f"{fact.worker} left because the run stopped", "stopped it", moment)
        if worker is not None:
            for name in fact.progress:
                if not self.accounts.was_placed(name, fact.incarnation):
                    self._wrong(
                        moment, f"{fact.worker} leaves with progress of {name}, not scheduled there"
                    )
            self.accounts.fact(moment.offset, fact)
            self.serving.keep(self._living())

    def _undecided(self, what: str, verb: str, moment: Moment) -> None:
        self._wrong(moment, f"{what}, but no decision {verb}")

    def _worker(
        self, name: str, incarnation: int, verb: str, moment: Moment
    ) -> WorkerHistory | None:
        worker: WorkerHistory | None = self.accounts.workers.get(incarnation)
        if worker is None or worker.name != name:
            self._wrong(
                moment, f"{name} {verb} under incarnation {incarnation}, which it never joined with"
            )
            return None
        return worker

    def _living(self) -> set[int]:
        return {
            incarnation
            for incarnation, worker in self.accounts.workers.items()
            if worker.gone is None
        }

    def _committed(self, fact: StepCommitted, moment: Moment) -> None:
        taken = self.takes.get((fact.step, fact.attempt))
        take, taken_at = (None, None) if taken is None else (taken.take, taken.at)
        entry = StepEntry(fact=fact, at=moment, take=take, taken_at=taken_at)
        self._dropped(fact)
        self._check_adapter(fact)
        first = self.steps.get(fact.step)
        if first is None and not self._counts(fact, take, moment):
            return
        self.unread_steps.append(entry)
        if first is not None:
            places = f"control:{first.at.offset} and control:{moment.offset}"
            self.findings.add("steps", f"step {fact.step}", f"is committed twice, at {places}")
            return
        self.steps[fact.step] = entry
        self.committed += 1
        self.legality.committed(entry, self.roles)
        self._published(VersionEntry(version=fact.step + 1, manifest=fact.policy, at=moment))
        why = f"batch of step {fact.step}, attempt {fact.attempt}"
        for part, groups in enumerate(parts_of(fact.groups, fact.parts), 1):
            for group in groups:
                number = part if fact.parts else 0
                self.accounts.end(group.group, "trained", why, step=fact.step, part=number)

    def _counts(self, fact: StepCommitted, take: TakeBatch | None, moment: Moment) -> bool:
        """Report whether a commit is of the batch in training.

        A trainer may commit while a user ends its batch; the orchestrator then retrains the step.
        """
        if self.legality.bound.training == (fact.step, fact.attempt):
            return True
        if take is None:
            message = f"attempt {fact.attempt} was committed, which no decision took"
            self.findings.add("batches", f"step {fact.step}", message)
        else:
            why = f"committed at control:{moment.offset}, after its batch had ended"
            self.not_trained.append(Attempted(step=fact.step, attempt=fact.attempt, why=why))
        return False

    def _check_adapter(self, fact: StepCommitted) -> None:
        if self.started is None or self.config is None or not self.config.lora.rank:
            return
        first = self.started.policy.digest
        if fact.policy.digest != first and not stands_on(fact.policy, first):
            who = f"version {fact.step + 1}"
            self.findings.add("policies", who, "is no adapter on version 0", expected=first)

    def _dropped(self, fact: StepCommitted) -> None:
        for version in sorted(self.dropped.intersection(fact.dropped)):
            message = f"drops version {version}, which an earlier commit dropped"
            self.findings.add("policies", f"step {fact.step}", message)
        self.dropped.update(fact.dropped)
        for version in fact.dropped:
            names = sorted(
                name for name, group in self.accounts.open.items() if group.spec.version == version
            )
            if names:
                message = f"drops version {version}, which {names[0]} carries"
                self.findings.add("policies", f"step {fact.step}", message)

    def _refused(self, fact: BatchRefused, moment: Moment) -> None:
        batch = self.takes.get((fact.step, fact.attempt))
        if batch is None:
            self._wrong(moment, f"refuses batch {fact.step}/{fact.attempt}, which was never taken")
            return
        take = batch.take
        refused = Attempted(step=fact.step, attempt=fact.attempt, why=fact.why)
        self.not_trained.append(refused)
        self.legality.refused(fact, take)
        for taken in take.groups:
            group = self.accounts.open.get(taken.group)
            if group is not None:
                group.taken = None

    def decision(self, decision: AnyDecision, moment: Moment) -> None:
        self.legality.decision(decision, moment)
        accounts = self.accounts
        match decision:
            case Schedule():
                self.legality.placed(decision.requests(), moment)
            case Assign():
                if (worker := accounts.workers.get(decision.incarnation)) is not None:
                    worker.awake = worker.awake or decision.version != NO_VERSION
                    worker.held.difference_update(decision.drop)
            case TakeBatch():
                self.takes[decision.step, decision.attempt] = Taken(take=decision, at=moment)
                for taken in decision.groups:
                    if (group := accounts.groups.get(taken.group)) is not None:
                        group.taken = (decision.step, decision.attempt)
            case End():
                accounts.end(decision.group, decision.outcome, decision.reason)
            case StopRun():
                self.stopped = moment
            case _:
                pass
        if accounts.decision(decision, moment):
            self.serving.keep(self._living())


def key_of(record: AnyControl) -> bytes:
    """Return the allowed key of a record; empty if none."""
    match record:
        case WorkerJoined() | WorkerReady() | WorkerLeft() | TrajectoriesLogged() | GroupScored():
            return record.worker.encode()
        case RequestReleased() | RequestFailed():
            return record.trajectory.encode()
        case StepCommitted() | BatchRefused() | WeightsAdopted():
            return b"trainer"
        case RoleStarted():
            return record.role.encode()
        case Command() | VersionsDropped():
            return b"user"
        case _:
            return b""
