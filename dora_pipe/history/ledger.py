"""The conserved ledger of a run, from control and decisions alone: what was dispatched, what became
of it, and which record of the log counts for it.

The ledger keeps its own books: it shares the shapes with the orchestrator and nothing else, so
that a mistake there is found here (whether the rounds also fold to the recorded states is
`check_fold`'s question). What is wrong is written down, and the books go on with the facts: a
commit is believed also where no decision allowed it, because the weights are what it made of them.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.history.accounts import Accounts
from dora_pipe.history.entries import (
    Attempted,
    Moment,
    StepEntry,
    Taken,
    VersionEntry,
    WorkerEntry,
)
from dora_pipe.history.findings import Findings
from dora_pipe.history.hosting import Hosting
from dora_pipe.history.legality import Legality
from dora_pipe.history.shelf import Shelf
from dora_pipe.history.walk import Fact, Turn
from dora_pipe.policies.adapters import stands_on
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
    VersionsDropped,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Dispatch,
    End,
    Fence,
    Move,
    Place,
    StopRun,
    TakeBatch,
)
from dora_pipe.schemas.wire import Unknown


class Ledger:
    """The books of one run; `build_ledger` makes them."""

    def __init__(self, run: str, findings: Findings) -> None:
        self.run = run
        self.findings = findings
        self.accounts = Accounts(findings)
        self.started: RunStarted | None = None
        self.config: Config | None = None
        """As of `run started`; what commands changed is the legality's to know."""
        self.steps: Shelf[int, StepEntry] = Shelf()
        """The first commit of each step, in the order of the log."""
        self.versions: Shelf[int, VersionEntry] = Shelf()
        self.version = -1
        """The newest; -1 before version 0."""
        self.takes: Shelf[tuple[int, int], Taken] = Shelf()
        """By (step, attempt)."""
        self.unread_steps: list[StepEntry] = []
        """Commits that nobody has held against the log yet, second ones of a step among them;
        whoever does empties it."""
        self.unread_versions: list[VersionEntry] = []
        self.committed = 0
        """Steps."""
        self.published = 0
        """Versions."""
        self.not_trained: list[Attempted] = []
        self.adopted: list[WeightsAdopted] = []
        self.dropped: set[int] = set()
        """Versions that commits have dropped: their files may be gone."""
        self.commands: list[Command] = []
        self.roles: list[RoleStarted] = []
        self.unknown: Counter[str] = Counter()
        """Records of kinds that this version does not know."""
        self.rounds = 0
        self.now_ns = 0
        self.stopped: Moment | None = None
        self.hosting = Hosting()
        self.legality = Legality(self)
        self.rewire()

    @property
    def interruptible(self) -> bool:
        """Whether the run declared C1 off: trajectories may mix versions."""
        return self.config is not None and self.config.staleness.interruptible

    def rewire(self) -> None:
        """Tell parts of each other, who do not know it after they were frozen."""
        self.accounts.sibling_ended = self.legality.sibling_ended
        self.accounts.groups.on_fetch = self.accounts.fetched

    def put_away(self, newest: int) -> None:
        """Let go of versions that no open group carries, of their steps and batches, and of what
        workers hosted then, if there is a place for them; the newest stay."""
        if self.versions.storage is None:
            return
        oldest = min(
            (group.spec.version for group in self.accounts.open.values()), default=self.version
        )
        before = min(oldest, self.version - newest)
        self.versions.put_away([one for one in self.versions if one < before])
        self.steps.put_away([one for one in self.steps if one < before])
        self.takes.put_away([one for one in self.takes if one[0] < before])
        for worker in self.accounts.workers.values():
            worker.hosted = {one: at for one, at in worker.hosted.items() if one >= before}

    def take(self, turn: Turn) -> None:
        """Book one turn, in the order of the fold."""
        ordinal = -1 if turn.round is None else turn.round.ordinal
        if turn.round is not None:
            self.rounds += 1
            self.now_ns = turn.round.now_ns
            self.hosting.advance(self.now_ns)
        for fact in turn.facts:
            self.findings.looked["control"] += 1
            at = Moment(round=ordinal, offset=fact.offset, now_ns=self.now_ns)
            self._fact(fact, at)
        if turn.round is None:
            return
        at = Moment(round=ordinal, offset=turn.offset, now_ns=self.now_ns)
        self.legality.round(turn.round, self.roles)
        for decision in turn.round.decisions:
            self.findings.looked["decisions"] += 1
            self._decision(decision, at)

    def _fact(self, fact: Fact, at: Moment) -> None:
        record = fact.record
        if record is None:
            return
        if isinstance(record, Unknown):
            self.unknown[record.kind] += 1
            return
        if self.started is None and not isinstance(record, RunStarted):
            self._wrong(at, "comes before `run started`")
        self._known(record, at)

    def _known(self, record: AnyControl, at: Moment) -> None:
        match record:
            case RunStarted():
                self._run_started(record, at)
            case RoleStarted():
                self.roles.append(record)
            case WorkerJoined():
                self.accounts.joined(record, at)
                self.hosting.keep(self._living())
            case WorkerReady():
                self._worker_ready(record, at)
            case WorkerLeft():
                self._worker_left(record, at)
            case TrajectoriesLogged():
                self._check_hosted(record)
                for logged in record.facts():
                    self.accounts.log(logged, at)
            case RequestReleased():
                self.accounts.released(record, at)
            case RequestFailed():
                self.accounts.failed(record, at)
            case StepCommitted():
                self._committed(record, at)
            case BatchRefused():
                self._refused(record, at)
            case Command():
                self.commands.append(record)
                self.legality.command(record)
            case WeightsAdopted():
                self.adopted.append(record)
            case VersionsDropped():
                if self.stopped is not None:
                    self.dropped.update(record.versions)

    def _wrong(self, at: Moment, message: str, expected: object = "", found: object = "") -> None:
        where = f"control:{at.offset}"
        self.findings.add("control", where, message, expected=expected, found=found)

    def _run_started(self, fact: RunStarted, at: Moment) -> None:
        if fact.run != self.run:
            self._wrong(at, "starts another run", expected=self.run, found=fact.run)
            return
        if self.started is not None:
            self._wrong(at, "starts the run a second time")
            return
        self.started = fact
        self._published(VersionEntry(version=0, manifest=fact.policy, at=at))
        try:
            self.config = msgspec.convert(fact.config, Config)
        except msgspec.ValidationError as error:
            self._wrong(at, f"the configuration cannot be read: {error}")
            return
        self.accounts.attempts_max = self.config.groups.attempts_max
        self.legality.start(self.config)

    def _published(self, version: VersionEntry) -> None:
        self.versions[version.version] = version
        self.unread_versions.append(version)
        self.version = max(self.version, version.version)
        self.published += 1

    def _worker_ready(self, fact: WorkerReady, at: Moment) -> None:
        worker = self._worker(fact.worker, fact.epoch, "is ready", at)
        version = self.versions.get(fact.version)
        if version is None:
            self._wrong(at, f"{fact.worker} hosts version {fact.version}, which nobody published")
        elif worker is not None:
            who = f"{fact.worker} at control:{at.offset}"
            message = f"hosts other weights than the published ones of version {fact.version}"
            self.findings.same("C1", who, message, expected=version.digest, found=fact.digest)
            worker.hosted.setdefault(fact.version, at.offset)
            if worker.several:
                worker.held.add(fact.version)
            if not worker.departure:
                self.hosting.ready(fact.epoch, *(sorted(worker.held) or [fact.version]))

    def _check_hosted(self, fact: TrajectoriesLogged) -> None:
        """Who hosts several versions has said so of each before it logs what it sampled under."""
        worker = self.accounts.workers.get(fact.epoch)
        if worker is None or not worker.several or fact.version in worker.hosted:
            return
        for one in fact.trajectories:
            if group_of(one.trajectory) in self.accounts.open:
                message = f"was logged by {fact.worker}, which never hosted version {fact.version}"
                self.findings.add("C1", one.trajectory, message)

    def _worker_left(self, fact: WorkerLeft, at: Moment) -> None:
        worker = self._worker(fact.worker, fact.epoch, "leaves", at)
        if worker is not None:
            self.accounts.depart(worker, "left", at)
            self.hosting.keep(self._living())

    def _worker(self, name: str, epoch: int, verb: str, at: Moment) -> WorkerEntry | None:
        worker = self.accounts.workers.get(epoch)
        if worker is None or worker.joined.worker != name:
            self._wrong(at, f"{name} {verb} under epoch {epoch}, which it never joined with")
            return None
        return worker

    def _living(self) -> set[int]:
        return {e for e, worker in self.accounts.workers.items() if not worker.departure}

    def _committed(self, fact: StepCommitted, at: Moment) -> None:
        taken = self.takes.get((fact.step, fact.attempt))
        take, taken_at = (None, None) if taken is None else (taken.take, taken.at)
        entry = StepEntry(fact=fact, at=at, take=take, taken_at=taken_at)
        self._dropped(fact, at)
        self._check_adapter(fact)
        first = self.steps.get(fact.step)
        if first is None and not self.legality.counts(fact):
            why = f"committed at control:{at.offset}, after its batch had been ended"
            self.not_trained.append(Attempted(step=fact.step, attempt=fact.attempt, why=why))
            return
        self.unread_steps.append(entry)
        if first is not None:
            places = f"control:{first.at.offset} and control:{at.offset}"
            self.findings.add("steps", f"step {fact.step}", f"is committed twice, at {places}")
            return
        self.steps[fact.step] = entry
        self.committed += 1
        self.legality.committed(entry, self.roles)
        self._published(VersionEntry(version=fact.step + 1, manifest=fact.policy, at=at))
        why = f"batch of step {fact.step}, attempt {fact.attempt}"
        for group in fact.groups:
            self.accounts.end(group.group, "trained", why, at, step=fact.step)

    def _check_adapter(self, fact: StepCommitted) -> None:
        """In a LoRA run every later version is an adapter on version 0, or that itself."""
        if self.started is None or self.config is None or not self.config.lora.rank:
            return
        first = self.started.policy.digest
        if fact.policy.digest != first and not stands_on(fact.policy, first):
            who = f"version {fact.step + 1}"
            self.findings.add("policies", who, "is no adapter on version 0", expected=first)

    def _dropped(self, fact: StepCommitted, at: Moment) -> None:
        """Versions whose files may be gone from now on; no open group may carry one."""
        self.dropped.update(fact.dropped)
        for version in fact.dropped:
            names = sorted(
                name for name, group in self.accounts.open.items() if group.spec.version == version
            )
            if names:
                message = f"drops version {version}, which {names[0]} carries"
                self.findings.add("policies", f"step {fact.step}", message)

    def _refused(self, fact: BatchRefused, at: Moment) -> None:
        found = self.takes.get((fact.step, fact.attempt))
        if found is None:
            self._wrong(at, f"refuses batch {fact.step}/{fact.attempt}, which was never taken")
            return
        take = found.take
        why = "; ".join(f"{one.trajectory or one.group}: {one.why}" for one in fact.offenders)
        self.not_trained.append(Attempted(step=fact.step, attempt=fact.attempt, why=why))
        self.legality.refused(fact, take)
        for taken in take.groups:
            group = self.accounts.open.get(taken.group)
            if group is not None:
                group.taken = None

    def _decision(self, decision: AnyDecision, at: Moment) -> None:
        self.legality.decision(decision, at)
        accounts = self.accounts
        match decision:
            case Dispatch():
                accounts.dispatched(decision, at)
            case Place():
                requests = decision.requests()
                self.legality.placed(requests, at)
                for placed in requests:
                    accounts.placed(placed, at)
            case Move():
                accounts.moved(decision)
            case Assign():
                if (worker := accounts.workers.get(decision.epoch)) is not None:
                    worker.target = decision.version
                    worker.held.difference_update(decision.drop)
            case Fence():
                if (worker := accounts.workers.get(decision.epoch)) is not None:
                    accounts.depart(worker, "fenced", at)
                    self.hosting.keep(self._living())
            case TakeBatch():
                self.takes[decision.step, decision.attempt] = Taken(take=decision, at=at)
                for taken in decision.groups:
                    if (group := accounts.groups.get(taken.group)) is not None:
                        group.taken = (decision.step, decision.attempt)
            case End():
                accounts.end(decision.group, decision.fate, decision.reason, at)
            case StopRun():
                self.stopped = at
            case _:
                pass
