"""Check that each decision follows from the log before it.

Choices that depend on more than the log (placement, time of a plan) are checked only for
violations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from dora_pipe.audit.bound_ledger import BoundLedger, outlook_of
from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.audit.entries import StepEntry, VersionEntry
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.group_ledger import AuditedGroups
from dora_pipe.audit.row_ledger import RowLedger
from dora_pipe.audit.spill import SpillDict
from dora_pipe.config.model import Config, Task
from dora_pipe.ledger.history import GroupHistory, Moment, WorkerHistory
from dora_pipe.orchestrator.curriculum import SKIPPED_MAX
from dora_pipe.schemas import identity
from dora_pipe.schemas.batch import deadline_of
from dora_pipe.schemas.control import (
    BatchRefused,
    Command,
    DataSet,
    RoleStarted,
    RunStarted,
    TakenGroup,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    EarlyStop,
    End,
    EndSamples,
    Fence,
    GroupExpired,
    GroupSpec,
    Migrate,
    Round,
    ScheduledRequest,
    ScoreGroup,
    StopRun,
    TakeBatch,
    TakePart,
)


class Booked(Protocol):
    """Ledger of a run, as the checks read it."""

    findings: Findings
    accounts: AuditedGroups
    started: RunStarted | None
    stopped: Moment | None
    version: int
    versions: SpillDict[int, VersionEntry]

    @property
    def partial_rollout(self) -> bool: ...


class Legality:
    """Check of decisions before they are booked."""

    def __init__(self, ledger: Booked) -> None:
        self._ledger = ledger
        self._findings = ledger.findings
        self.bound = BoundLedger()
        self.attempt = 1
        self.in_force: EffectiveConfig | None = None
        """None before `run started`."""
        self.ordinals: Counter[str] = Counter()
        """Dispatches by purpose and task source; skipped rows by source."""
        self.rows = RowLedger()

    def round(self, round_: Round, roles: Sequence[RoleStarted]) -> None:
        """Check that a round has the newest announced incarnation.

        While catching up, an orchestrator may not fold its own announcement; it decides nothing
        then.
        """
        newest = max(
            (role.incarnation for role in roles if role.role == "orchestrator"), default=-1
        )
        where = f"round {round_.ordinal}"
        if round_.incarnation > newest and round_.decisions:
            message = "decides before its orchestrator was announced"
            self._wrong(where, message, f"incarnation {newest}", round_.incarnation)
        if round_.incarnation < newest:
            message = "is of an orchestrator that was out"
            self._wrong(where, message, f"incarnation {newest}", round_.incarnation)

    def command(self, command: Command) -> None:
        if self.in_force is None:
            return
        bound, before = self.bound, self.in_force.config
        self.in_force.command(command, step=bound.step, waiting=bound.size)
        if self.in_force.config is not before or self.in_force.steps <= bound.step:
            bound.give_up_parts()
        if self.ended_by(command):
            bound.end_training()
            self.attempt += 1

    def ended_by(self, command: Command) -> tuple[int, int] | None:
        """Return the batch in training if the command ends it."""
        training = self.bound.training
        if command.verb != "fail-batch" or training is None:
            return None
        return training if command.args.get("step", training[0]) == training[0] else None

    def sample_ended(self, group: GroupHistory) -> None:
        if self.in_force is None:
            return
        config = self.in_force.config
        outlook = outlook_of(group, config.rollout)
        self.bound.settle(group, outlook)
        if group.spec.purpose == "train" and outlook in ("finished", "filtered"):
            self.rows.ended(group, config)

    def committed(self, entry: StepEntry, roles: Sequence[RoleStarted]) -> None:
        """Check that a commit is of the batch in training and the next step."""
        fact, bound = entry.fact, self.bound
        who = f"step {fact.step}"
        if fact.step > bound.version:
            missing = f"step {bound.version}"
            self._findings.add("steps", missing, "is missing", expected=missing, actual=who)
        newest = max((role.incarnation for role in roles if role.role == "trainer"), default=-1)
        if fact.incarnation != newest:
            message = "was committed by a fenced trainer"
            expected, actual = f"incarnation {newest}", fact.incarnation
            self._findings.add("steps", who, message, expected=expected, actual=actual)
        for taken in fact.groups:
            bound.remove(taken.group)
        self.rows.committed()
        if fact.step >= bound.version:
            bound.version, bound.training, self.attempt = fact.step + 1, None, 1

    def refused(self, fact: BatchRefused, take: TakeBatch) -> None:
        """Return a refused batch's groups to U, except the offenders."""
        offenders = {offender.group for offender in fact.offenders}
        self.bound.end_training()
        self.attempt = fact.attempt + 1
        for taken in take.groups:
            group = self._ledger.accounts.open.get(taken.group)
            if group is not None and taken.group not in offenders:
                self.bound.give_back(group.spec)

    def decision(self, decision: AnyDecision, moment: Moment) -> None:
        """Check one decision; `placed` checks placements."""
        where = f"round {moment.round}"
        if self._ledger.stopped is not None:
            self._wrong(where, "decides after the run was stopped", "nothing", _kind(decision))
        match decision:
            case Dispatch():
                self._dispatch(decision, moment)
            case Migrate():
                self._move(decision, where)
            case ScoreGroup():
                self._score(decision, where)
            case Assign():
                self._assign(decision, where)
            case Cancel() | Drain() | Fence():
                self._worker(decision.worker, decision.incarnation, where, _kind(decision))
            case TakePart():
                self._take_part(decision, where)
            case TakeBatch():
                self._take(decision, where)
            case End():
                self._end(decision, where)
            case EndSamples():
                self._end_samples(decision, where)
            case StopRun():
                self._stop(where)
            case EarlyStop() if self.in_force is not None:
                self.in_force.stop_soon(step=self.bound.step, waiting=self.bound.size)
                if self.in_force.steps <= self.bound.step:
                    self.bound.give_up_parts()

    def placed(self, requests: Sequence[ScheduledRequest], moment: Moment) -> None:
        where = f"round {moment.round}"
        for request in requests:
            self._place(request, where)

    def _wrong(
        self, subject: str, message: str, expected: object = "", actual: object = ""
    ) -> None:
        self._findings.add("decisions", subject, message, expected=expected, actual=actual)

    def _worker(self, name: str, incarnation: int, where: str, *verb: str) -> WorkerHistory | None:
        worker: WorkerHistory | None = self._ledger.accounts.workers.get(incarnation)
        if worker is None or worker.name != name:
            action = " ".join(verb)
            self._wrong(
                where, f"{action} names {name} of incarnation {incarnation}, which never joined"
            )
            return None
        if worker.gone is not None:
            action, end = " ".join(verb), "left" if worker.gone.how == "left" else "was fenced"
            message = f"{action} names {name} of incarnation {incarnation}, which {end}"
            self._wrong(where, message)
        return worker

    def _dispatch(self, decision: Dispatch, moment: Moment) -> None:
        spec, in_force = decision.spec, self.in_force
        if in_force is None:
            self._wrong(
                spec.group, f"is dispatched in round {moment.round}, before the run started"
            )
            return
        check_spec(decision, self.ordinals, self._ledger, in_force.config)
        if why := self._why_not_row(decision, in_force.config):
            self._wrong(
                spec.group, f"is dispatched in round {moment.round} in another's turn: {why}"
            )
        self.ordinals.update({spec.purpose, spec.source})
        if decision.skipped:
            self.ordinals[_skipped(spec)] += len(decision.skipped)
        if spec.purpose == "eval":
            return
        if why := self.bound.why_not_admit(spec.deadline, in_force):
            self._wrong(
                spec.group, f"is dispatched in round {moment.round} against the bound: {why}"
            )
        self.bound.add(spec)

    def _why_not_row(self, decision: Dispatch, config: Config) -> str:
        started, spec = self._ledger.started, decision.spec
        data = started and started.data(spec.source)
        task = next((task for task in config.tasks if task.name == spec.task), None)
        if spec.purpose == "eval" or not started or not data or task is None:
            return ""
        position = self.ordinals[spec.source] + self.ordinals[_skipped(spec)]
        turns = (
            identity.prompt_index(started.seed, position + skipped, data.rows)[1]
            for skipped in range(min(data.rows, SKIPPED_MAX))
        )
        return self.rows.why_not(decision, task, turns)

    def _place(self, decision: ScheduledRequest, where: str) -> None:
        who, name, accounts = decision.trajectory, decision.spec.group, self._ledger.accounts
        group = accounts.open.get(name) or accounts.groups.get(name)
        entry = None if group is None else group.requests.get(who)
        if group is None or entry is None:
            self._wrong(who, f"is scheduled in {where} but was never dispatched")
            return
        if group.spec is not decision.spec and group.spec != decision.spec:
            expected, actual = _differing(group.spec, decision.spec)
            message = f"is scheduled in {where} with another spec than its group's dispatch"
            self._wrong(who, message, expected, actual)
        attempt = entry.attempts[-1].attempt + 1 if entry.attempts else 1
        if decision.attempt != attempt:
            message = f"is scheduled in {where} under a wrong attempt"
            self._wrong(who, message, attempt, decision.attempt)
        if group.outcome is not None or entry.over:
            self._wrong(who, f"is scheduled in {where} although it has ended")
        elif group.closed:
            self._wrong(who, f"is scheduled in {where} although its group does not wait for it")
        elif entry.attempts and not entry.waiting:
            self._wrong(who, f"is scheduled in {where} while attempt {attempt - 1} runs")
        worker = self._worker(decision.worker, decision.incarnation, where, "place", who)
        if worker is not None and not self._hosts(worker, group.spec):
            message = f"is scheduled in {where} on {decision.worker}, assigned to another version"
            self._wrong(who, message, group.spec.version, worker.target)

    def _move(self, decision: Migrate, where: str) -> None:
        who, entry = decision.trajectory, self._ledger.accounts.request(decision.trajectory)
        if self._ledger.partial_rollout:
            self._wrong(who, f"moves in {where}, although nothing moves during partial rollout")
        group = self._ledger.accounts.groups.get(group_of(who))
        if entry is None or group is None:
            self._wrong(who, f"moves in {where} but was never dispatched")
            return
        present = None if entry.running is None else entry.running.key
        if present != (decision.attempt, decision.incarnation):
            actual = f"attempt {decision.attempt} on incarnation {decision.incarnation}"
            self._wrong(who, f"moves in {where} from where it does not run", present, actual)
        source = self._worker(decision.worker, decision.incarnation, where, "move", who)
        if not decision.to:
            if source is not None and source.target != NO_VERSION:
                self._wrong(
                    who, f"moves in {where} without a target, but its worker has no order to sleep"
                )
            return
        to = self._worker(decision.to, decision.to_incarnation, where, "move", who)
        if to is not None and not _has(to, group.spec.version):
            message = f"moves in {where} to {decision.to}, assigned to another version"
            self._wrong(who, message, group.spec.version, to.target)

    def _score(self, decision: ScoreGroup, where: str) -> None:
        """Check a scoring: all ended, exactly the valid ones, one worker at a time."""
        who = decision.spec.group
        group = self._ledger.accounts.open.get(who)
        if group is None or group.scoring is None:
            self._wrong(who, f"is to be scored in {where}, but is not open or has no group scoring")
            return
        self._worker(decision.worker, decision.incarnation, where, "score", who)
        scoring, results = group.scoring, group.bound
        if group.spec != decision.spec:
            self._wrong(who, f"is to be scored in {where} with another spec than its dispatch")
        if scoring.open or scoring.answer or scoring.failed:
            self._wrong(
                who,
                f"is to be scored in {where} again, though its scoring is open, answered or failed",
            )
        attempt = len(scoring.asked) + 1
        message = f"is to be scored in {where} under a wrong attempt"
        self._findings.same("decisions", who, message, expected=attempt, actual=decision.attempt)
        open_samples = () if group.closed else group.open_samples
        message = f"is to be scored in {where} before all its samples have ended"
        expected, actual = group.spec.samples, group.spec.samples - len(open_samples)
        self._findings.same("decisions", who, message, expected=expected, actual=actual)
        valid = tuple(record.taken for record in results if record.fact.reward is not None)
        message = f"is to be scored in {where} by other records than its valid samples'"
        self._findings.same("decisions", who, message, expected=valid, actual=decision.trajectories)

    def _hosts(self, worker: WorkerHistory, spec: GroupSpec) -> bool:
        """Report whether a worker may sample for a group: later versions need partial rollout."""
        if self._ledger.partial_rollout and spec.purpose == "train":
            return worker.target >= spec.version
        return _has(worker, spec.version)

    def _assign(self, decision: Assign, where: str) -> None:
        self._worker(decision.worker, decision.incarnation, where, "assign")
        worker = self._ledger.accounts.workers.get(decision.incarnation)
        if worker is not None and not self._may_be_assigned(worker, decision, where):
            return
        version = self._ledger.versions.get(decision.version)
        if version is None:
            name = f"version {decision.version}"
            self._wrong(where, f"assigns {name} to {decision.worker}, which was never published")
        elif version.digest != decision.digest:
            message = f"assigns {decision.worker} weights that are not version {decision.version}"
            self._wrong(where, message, version.digest, decision.digest)
        if worker is None or not (worker.several or decision.drop):
            return
        held = worker.held.difference(decision.drop) | {decision.version}
        most = worker.joined.max_resident_versions
        if len(held) > most or not worker.held.issuperset(decision.drop):
            message = f"assigns {decision.worker} other versions than it has room for, or had"
            self._wrong(where, message, most, sorted(held))

    def _may_be_assigned(self, worker: WorkerHistory, decision: Assign, where: str) -> bool:
        """Check sleep and wake: only a colocated worker sleeps, and it does so during a step."""
        sleeps, colocated = decision.version == NO_VERSION, worker.joined.colocated
        if sleeps and not colocated:
            self._wrong(where, f"tells {decision.worker} to sleep, which is not colocated")
        if colocated and not sleeps and self.bound.training is not None:
            self._wrong(where, f"wakes colocated {decision.worker} while a step is computed")
        return not sleeps

    def _take(self, decision: TakeBatch, where: str) -> None:
        who = f"step {decision.step}"
        for worker in self._ledger.accounts.workers.values():
            if worker.joined.colocated and worker.awake and not worker.departure:
                name = worker.joined.worker
                self._wrong(who, f"its batch is taken in {where} while colocated {name} is awake")
        if self.in_force is not None:
            names = [taken.group for taken in decision.groups]
            why = self.bound.why_not_take(decision.step, names, self.in_force, decision.parts)
            if why:
                self._wrong(who, f"its batch is taken in {where} against the rule: {why}")
            if why := self.bound.why_not_in_flight(decision.in_flight, self.in_force):
                self._wrong(who, f"its batch is taken in {where} against the rule: {why}")
            self.bound.in_flight = decision.in_flight or self.bound.in_flight
        if decision.attempt != self.attempt:
            message = f"its batch is taken in {where} under a wrong attempt"
            self._wrong(who, message, self.attempt, decision.attempt)
        for taken in decision.groups:
            self._taken_group(taken, who)
        names = [taken.group for taken in decision.groups]
        self.bound.take((decision.step, decision.attempt), names)

    def _take_part(self, decision: TakePart, where: str) -> None:
        who = f"step {decision.step}"
        if self.in_force and (why := self.bound.why_not_part(decision, self.in_force)):
            self._wrong(who, f"a part of it is taken in {where} against the rule: {why}")
        attempt = self.attempt if self.bound.training is None else 1
        if decision.attempt != attempt:
            message = f"a part of it is taken in {where} under a wrong attempt"
            self._wrong(who, message, attempt, decision.attempt)
        for taken in decision.groups:
            self._taken_group(taken, who)
        self.bound.take_part([taken.group for taken in decision.groups])

    def _taken_group(self, taken: TakenGroup, who: str) -> None:
        group = self._ledger.accounts.groups.get(taken.group)
        if group is None:
            self._wrong(taken.group, f"is taken by {who} but was never dispatched")
            return
        stamped = (group.spec.version, group.spec.deadline)
        actual = (taken.version, taken.deadline)
        message = f"is taken by {who} with another version or deadline than it was dispatched with"
        self._findings.same("C3", taken.group, message, expected=stamped, actual=actual)
        if group.closed and group.open_samples:
            self._wrong(taken.group, f"is taken by {who} before its other trajectories have ended")
        scored = {} if group.scoring is None else group.scoring.rewards
        message = f"is taken by {who} with other rewards than `group scored`"
        self._findings.same("batches", taken.group, message, expected=scored, actual=taken.rewards)

    def _end(self, decision: End, where: str) -> None:
        group = self._ledger.accounts.groups.get(decision.group)
        if group is None or self.in_force is None:
            return
        evaluation = group.spec.purpose == "eval"
        outlook = outlook_of(group, self.in_force.config.rollout)
        wrong = ""
        if decision.outcome == "trained":
            wrong = "without a commit"
        elif decision.outcome == "evaluated" and not evaluation:
            wrong = "although it is for training"
        elif decision.outcome == "filtered" and outlook != "filtered":
            wrong = "although its rewards differ or filtering is off"
        elif decision.outcome == "failed" and outlook == "running" and group.taken is None:
            wrong = "although enough of its trajectories may still be valid"
        if wrong:
            self._wrong(decision.group, f"ends as {decision.outcome} in {where} {wrong}")
        self.bound.remove(decision.group)

    def _end_samples(self, decision: EndSamples, where: str) -> None:
        group = self._ledger.accounts.open.get(decision.group)
        if group is None:
            self._wrong(decision.group, f"loses samples in {where} but is not open")
            return
        due, open_samples = group.closed or "waited for", group.open_samples
        message = f"loses samples in {where} as what they are not"
        same = self._findings.same
        same("decisions", decision.group, message, expected=due, actual=decision.outcome)
        message = f"loses other samples in {where} than have not ended"
        same("decisions", decision.group, message, expected=open_samples, actual=decision.samples)

    def expired(self, expiry: GroupExpired, moment: Moment) -> GroupHistory | None:
        """Return the group that a round reports as timed out, if possible."""
        where, group = f"round {moment.round}", self._ledger.accounts.open.get(expiry.group)
        if group is None or self.in_force is None:
            self._wrong(expiry.group, f"expires in {where} but is not open")
            return None
        rules = self.in_force.config.rollout
        if outlook_of(group, rules) != "running" or not group.open_samples:
            self._wrong(expiry.group, f"expires in {where}, although it generates no more")
            return None
        open_ns, most = moment.now_ns - group.dispatched_ns, rules.group_timeout_s
        if most is None or open_ns < int(most * 1e9):
            expected = "no bound" if most is None else f"{most:g} s"
            self._wrong(
                expiry.group, f"expires in {where} too early", expected, f"{open_ns / 1e9} s"
            )
        return group

    def _stop(self, where: str) -> None:
        if self.in_force is not None and self.bound.version < self.in_force.steps:
            message = f"is missing, although {where} stops the run"
            expected = f"{self.in_force.steps} steps"
            actual = f"{self.bound.version} steps"
            missing = f"step {self.bound.version}"
            self._findings.add("steps", missing, message, expected=expected, actual=actual)
        for name in self._ledger.accounts.open:
            self._findings.add("C2", name, f"is open although {where} stops the run")


def _has(worker: WorkerHistory, version: int) -> bool:
    return version in worker.held if worker.several else worker.target == version


def _kind(decision: AnyDecision) -> str:
    return str(type(decision).__struct_config__.tag)


def _differing(first: GroupSpec, second: GroupSpec) -> tuple[str, str]:
    names = [
        name for name in first.__struct_fields__ if getattr(first, name) != getattr(second, name)
    ]
    values = [
        ", ".join(f"{name} {getattr(spec, name)}" for name in names) for spec in (first, second)
    ]
    return values[0], values[1]


NO_DEADLINE = -1
"""For evaluation groups."""


def _skipped(spec: GroupSpec) -> str:
    return f"{spec.source} skipped"


def check_spec(decision: Dispatch, before: Counter[str], ledger: Booked, config: Config) -> None:
    """Check a dispatch against the log and the dispatches `before`, by purpose and source. Solved
    rows and sampler draws are checked by the fold."""
    started, spec = ledger.started, decision.spec
    assert started is not None
    findings, who = ledger.findings, spec.group
    fields = _expected(decision, started, config, before)
    findings.looked["decisions"] += len(fields)
    for name, expected in fields.items():
        if (actual := getattr(spec, name)) != expected:
            message = f"is dispatched with a wrong {name.replace('_', ' ')}"
            findings.add("decisions", who, message, expected=expected, actual=actual)
    newest = ledger.version
    message = "is not dispatched under the newest version"
    findings.same("decisions", who, message, expected=newest, actual=spec.version)
    version = ledger.versions.get(spec.version)
    if version is None:
        findings.add("C1", who, f"is dispatched under version {spec.version}, never published")
        return
    message = f"is dispatched with other weights than the published ones of version {spec.version}"
    findings.same("C1", who, message, expected=version.digest, actual=spec.digest)


def _expected(
    decision: Dispatch, started: RunStarted, config: Config, before: Counter[str]
) -> dict[str, int | str]:
    spec = decision.spec
    seed, ordinal = started.seed, before[spec.purpose]
    evaluated = {evaluation.name: evaluation for evaluation in config.evaluations}.get(
        spec.evaluation
    )
    train = spec.purpose == "train"
    task = _task(config, before) if train else config.task_of(evaluated or config.evaluation)
    source = identity.source_of(spec.purpose, task.name if train else spec.evaluation)
    data = started.data(source) or DataSet(digest=f"no data set of {source}", rows=1)
    common: dict[str, int | str] = {
        "ordinal": ordinal,
        "group": identity.group_id(spec.purpose, ordinal),
        "partition": identity.partition_of(ordinal, config.bus.partitions),
        "dataset_digest": data.digest,
        "task": task.name,
    }
    spare = config.rollout.group_redundancy if train else 0
    if spare or spec.redundancy:
        common["redundancy"] = spare
    if not train:
        return common | {
            "deadline": NO_DEADLINE,
            "evaluation": spec.evaluation if evaluated else f"one of {len(config.evaluations)}",
            "seed": identity.group_seed(seed, "eval", spec.index),
            "size": (evaluated or config.evaluation).group_size,
        }
    position = before[source] + before[_skipped(spec)]
    if task.sampler:
        data_epoch, index = position // data.rows, max(0, min(spec.index, data.rows - 1))
    else:
        position += _in_turn(decision.skipped, seed, position, data.rows)
        data_epoch, index = identity.prompt_index(seed, position, data.rows)
    return common | {
        "deadline": deadline_of(spec.version, config.staleness.max_staleness),
        "data_epoch": data_epoch,
        "index": index,
        "evaluation": "",
        "seed": identity.group_seed(seed, "train", ordinal),
        "size": config.rollout.group_size,
    }


def _in_turn(skipped: Sequence[int], seed: int, position: int, rows: int) -> int:
    """Return how many of these rows match the order from `schedule` on."""
    turns = (
        identity.prompt_index(seed, position + index, rows)[1] for index in range(len(skipped))
    )
    return sum(row == other for row, other in zip(skipped, turns, strict=True))


def _task(config: Config, before: Counter[str]) -> Task:
    shares = identity.whole_shares(tuple(task.ratio for task in config.tasks))
    given = [before[identity.source_of("train", task.name)] for task in config.tasks]
    return config.tasks[identity.next_task(shares, given)]
