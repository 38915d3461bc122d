"""Proves a run that was trained again on another's trajectories: from its log and the source's.

What there is to prove is less than of an ordinary run, and something else. Its rounds decide
nothing but batches: each is the source's of that step, or what is taken again from the source's
groups by the change and the rules of the run, with its records unchanged, and with the settings
that the run says. Every commit is of the batch that was taken, starts from the weights
that the one before it left, and names files that are there; what each trajectory was worth follows
from its reward, or from the one that the change gives it. Who sampled what, and that nothing is
abandoned, is the source's to prove: `audit` of it says so.

Batches pass by one at a time, so memory does not grow with the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.audit.check_policies import PolicyCheck, close_to
from dora_pipe.audit.entries import Moment, StepEntry, VersionEntry
from dora_pipe.audit.expected_batches import KEPT, ExpectedBatches
from dora_pipe.audit.findings import Check, Findings, Violation
from dora_pipe.audit.ledger import Ledger, key_of
from dora_pipe.audit.replay_step import FLOATS
from dora_pipe.audit.report import CheckLine
from dora_pipe.audit.round_reader import Fact, FoldedRound, folded_rounds
from dora_pipe.audit.taken_again import rules_of
from dora_pipe.bus.logged import record_digest
from dora_pipe.bus.port import Bus, Record
from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.learners.settings import advantage_rule, changed_settings
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.consumers.place_reader import PlaceReader, RecordPlace
from dora_pipe.consumers.trainer.change_file import stored_change
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import ConfigError, PolicyError, SchemaError
from dora_pipe.schemas.batch import batch_digest, staleness_of
from dora_pipe.schemas.control import (
    Retrained,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    config_digest,
)
from dora_pipe.schemas.headers import parse_headers
from dora_pipe.schemas.policy import weights_digest
from dora_pipe.schemas.rounds import StopRun, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Headers
from dora_pipe.store.safetensors_file import Entry, mapped, read_entries
from dora_pipe.store.store import PolicyStore

GAP: Final = 2
"""Offsets this close are read in one go."""

HOLDS: Final[dict[Check, str]] = {
    "C1": "every trained trajectory names the version of its group, with the source's digest of it",
    "C3": "every group is trained at a step not beyond its deadline, in the steps of the source",
    "steps": "steps are contiguous and unique, each starts from the weights the last one left",
    "batches": KEPT,
    "rounds": "the chain of rounds is whole",
    "decisions": "every decision takes the batch of the next step, with the settings it shall have",
    "control": "every fact can be read, is of this run, and of the run that it names as its source",
    "records": "every trained trajectory lies in the source's log, unchanged by its sha256",
    "policies": "weights, contributions and checkpoints are there, and follow from the rewards",
}
"""What holds when a check finds nothing."""

CANNOT_SEE: Final = (
    "C2, and whether these versions sampled these trajectories: `audit` and `replay` of the source",
    "whether these trajectories made these weights: `replay`",
    "what stands once: times, hosts, users",
    "a log that somebody has rewritten from end to end, every digest and the chain included",
)


class RetrainedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `audit` has to say of such a run."""

    run: str
    source: str
    first: int
    last: int
    steps: int
    """Committed."""
    finished: bool
    records: int
    record_bytes: int
    settings: dict[str, float | int | str | bool]
    """That are otherwise than in the source's steps."""
    without: int
    """Groups and trajectories that do not count."""
    rewards: int
    """Trajectories with another reward."""
    weights: int
    """Trajectories with a weight."""
    again: dict[str, int | bool] | None
    """The rules by which batches were taken again; None: they are the source's."""
    checks: tuple[CheckLine, ...]
    violations: tuple[Violation, ...]
    violations_total: int
    notes: tuple[str, ...]
    cannot_see: tuple[str, ...] = CANNOT_SEE

    @property
    def holds(self) -> bool:
        return self.violations_total == 0


def plain(report: RetrainedReport) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    values: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return {"holds": report.holds, **values}


def audit_retrained(
    bus: Bus, topics: Topics, store: PolicyStore | None, started: RunStarted, clock: Clock
) -> RetrainedReport:
    """Look at everything once; raises nothing for what is wrong. Without `store` the files are not
    looked at. Raises BusError."""
    with closing(_Audit(bus, topics, store, started, clock)) as look:
        for turn in folded_rounds(bus, topics, look.findings):
            look.turn(turn)
        return look.report()


class _Audit:
    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        store: PolicyStore | None,
        started: RunStarted,
        clock: Clock,
    ) -> None:
        assert started.retrained is not None
        self.findings = Findings()
        self._run = topics.run
        self._started = started
        self._retrained: Retrained = started.retrained
        self._source = read_history(bus, Topics(self._retrained.run), clock)
        self._batches = ExpectedBatches(bus, self._retrained, self._source, clock)
        self._rules = logged_config(started.config)
        self._records = PlaceReader(bus, topics.trajectories, clock, gap=GAP)
        self._seen = 0
        self._bytes = 0
        self._begun = False
        self._role_epoch = -1
        self._take: tuple[TakeBatch, int] | None = None
        self._next = self._retrained.first
        self._digest = self._retrained.policy.digest
        self._stopped = False
        self._trained: set[str] = set()
        self._store = store
        self.change = self._stored_change()
        ledger = Ledger(topics.run, self.findings)
        ledger.started = started
        self._policies = _Policies(ledger, self.change)
        if store is not None or self._retrained.change is None:
            self._batches.take_again(self._rules, self.change, self.findings)
        self._beginning(store)

    def close(self) -> None:
        """Let go of the log."""
        self._records.close()

    def report(self) -> RetrainedReport:
        """What it has come to; nothing more comes."""
        findings, retrained = self.findings, self._retrained
        if not self._begun:
            findings.add("control", f"{self._run}.control", "there is no `run started`")
        if self._stopped and self._next <= retrained.last:
            expected = f"steps up to {retrained.last}"
            findings.add("steps", f"step {self._next}", "is not there", expected=expected)
        self._policies.finish()
        if self._store is None:
            findings.notes.append("policy files were not looked at: no store was given")
        lines = [
            CheckLine(
                check=check,
                holds=self._batches.holds if check == "batches" else holds,
                looked=findings.looked[check],
                violations=findings.count[check],
            )
            for check, holds in HOLDS.items()
        ]
        return RetrainedReport(
            run=self._run,
            source=retrained.run,
            first=retrained.first,
            last=retrained.last,
            steps=self._next - retrained.first,
            finished=self._stopped,
            records=self._seen,
            record_bytes=self._bytes,
            settings=retrained.settings,
            without=len(self.change.without),
            rewards=len(self.change.rewards),
            weights=len(self.change.weights),
            again=None if retrained.rounds is None else rules_of(self._rules.groups),
            checks=tuple(lines),
            violations=tuple(findings.violations),
            violations_total=findings.total,
            notes=tuple(findings.notes),
        )

    def turn(self, turn: FoldedRound) -> None:
        for fact in turn.facts:
            self.findings.looked["control"] += 1
            self._fact(fact)
        if turn.round is None:
            return
        for decision in turn.round.decisions:
            self.findings.looked["decisions"] += 1
            who = f"round {turn.round.ordinal}"
            if isinstance(decision, TakeBatch):
                self._taken(decision, turn.offset, who)
            elif isinstance(decision, StopRun):
                self._stopped = True
            else:
                message = f"decides a {type(decision).__name__}: such a run takes batches"
                self.findings.add("decisions", who, message)

    # What the run begins with

    def _stored_change(self) -> BatchChange:
        self.findings.looked["policies"] += 1
        if self._store is None:
            return UNCHANGED
        try:
            return stored_change(self._store, self._retrained.change)
        except PolicyError as error:
            self.findings.add("policies", "the change of its batches", error.message)
            return UNCHANGED

    def _beginning(self, store: PolicyStore | None) -> None:
        source, retrained, findings = self._source, self._retrained, self.findings
        theirs = source.run_started
        name = f"run {retrained.run}"
        if theirs is None or theirs.at_ns != retrained.started_ns:
            found = "none" if theirs is None else theirs.at_ns
            message = "is another run of that name than the one it was trained from"
            findings.add("control", name, message, expected=retrained.started_ns, found=found)
            return
        same = {
            "version 0": (theirs.policy, self._started.policy),
            "assets": (theirs.assets_digest, self._started.assets_digest),
            f"version {retrained.first}": (
                source.digest_of(retrained.first)
                if retrained.first <= source.next_step
                else "none",
                retrained.policy.digest,
            ),
        }
        for what, (one, other) in same.items():
            message = "is not what the source has"
            findings.same("control", what, message, expected=one, found=other)
        if store is None:
            return
        at = Moment(round=-1, offset=0, now_ns=0)
        versions = {0: self._started.policy, retrained.first: retrained.policy}
        self._policies.look(
            store, [VersionEntry(version=n, manifest=one, at=at) for n, one in versions.items()], []
        )
        if retrained.optimizer is not None:
            findings.looked["policies"] += 1
            try:
                store.verify_blob("optimizer", retrained.optimizer.sha256)
            except PolicyError as error:
                findings.add("policies", "the optimizer's state it begins with", error.message)

    # What was decided

    def _taken(self, take: TakeBatch, offset: int, who: str) -> None:
        findings = self.findings
        message = "takes the batch of another step than the next one"
        findings.same("decisions", who, message, expected=self._next, found=take.step)
        self._take = take, offset
        theirs = self._batches.check(take, findings)
        if theirs is None:
            return
        who = f"step {take.step}"
        try:
            settings = dict(theirs.settings)
            if self._retrained.settings:
                changed = changed_settings(
                    settings, self._retrained.settings, max_tokens=self._rules.sampling.max_tokens
                )
                settings = dict(changed)
        except ConfigError as error:
            findings.add("decisions", who, error.message)
            return
        message = "has other settings than the source's with those of the run laid over them"
        findings.same("decisions", who, message, expected=settings, found=take.settings)

    # What was done

    def _fact(self, fact: Fact) -> None:
        record, findings, where = fact.record, self.findings, f"control:{fact.offset}"
        if not isinstance(record, RunStarted | RoleStarted | StepCommitted):
            return
        if fact.key and fact.key != key_of(record):
            findings.add("control", where, "lies under another key", found=fact.key)
        if isinstance(record, RunStarted):
            self._run_started(record, where)
        elif isinstance(record, RoleStarted):
            if record.role == "trainer":
                self._role_epoch = record.role_epoch
        else:
            self._committed(record, fact.offset)

    def _run_started(self, record: RunStarted, where: str) -> None:
        findings = self.findings
        message = "the configuration of `run started` is not the one of its digest"
        found = config_digest(record.config)
        findings.same("control", where, message, expected=record.config_digest, found=found)
        message = "starts another run"
        findings.same("control", where, message, expected=self._run, found=record.run)
        if self._begun:
            findings.add("control", where, "starts the run a second time")
        self._begun = True

    def _committed(self, fact: StepCommitted, offset: int) -> None:
        findings, who = self.findings, f"step {fact.step}"
        message = "is not the next step"
        if not findings.same("steps", who, message, expected=self._next, found=fact.step):
            return
        taken = self._take
        if taken is None or (taken[0].step, taken[0].attempt) != (fact.step, fact.attempt):
            findings.add("steps", who, "is committed, but no decision took its batch")
            return
        message = "is committed by a trainer that was replaced"
        findings.same("steps", who, message, expected=self._role_epoch, found=fact.role_epoch)
        self._weights(fact, who)
        self._as_taken(fact, taken, who)
        headers = self._batch(fact)
        self._policies.rewards = {
            name: rewards.get(name, one.reward)
            for group in fact.groups
            for rewards in (group.rewards,)
            for name, one in headers.items()
            if one.group == group.group
        }
        at = Moment(round=-1, offset=offset, now_ns=fact.at_ns)
        if self._store is not None:
            version = VersionEntry(version=fact.step + 1, manifest=fact.policy, at=at)
            entry = StepEntry(fact=fact, at=at, take=taken[0], taken_at=None)
            self._policies.look(self._store, [version], [entry])
        self._digest, self._next = fact.digest_after, fact.step + 1

    def _weights(self, fact: StepCommitted, who: str) -> None:
        findings = self.findings
        message = f"does not start from the weights of version {fact.step}"
        findings.same("steps", who, message, expected=self._digest, found=fact.digest_before)
        message = "its manifest is not of the weights that it left"
        findings.same("steps", who, message, expected=fact.digest_after, found=fact.policy.digest)
        message = "the digest of its manifest is not that of the tensors in it"
        digest = weights_digest(fact.policy.tensors)
        findings.same("steps", who, message, expected=digest, found=fact.policy.digest)

    def _as_taken(self, fact: StepCommitted, taken: tuple[TakeBatch, int], who: str) -> None:
        take, offset = taken
        same: dict[str, tuple[object, object]] = {
            "groups": (take.groups, fact.groups),
            "settings": (take.settings, fact.settings),
            "parts": (take.parts, fact.parts),
            "place to go on from": (offset + 1, fact.decisions_next),
        }
        for name, (expected, found) in same.items():
            message = f"was trained with another batch than was taken: other {name}"
            self.findings.same("batches", who, message, expected=expected, found=found)

    def _batch(self, fact: StepCommitted) -> dict[str, Headers]:
        """The records of a batch, as they lie in the source's log; their headers."""
        findings, found = self.findings, dict[str, Headers]()
        places = [
            RecordPlace(one.partition, one.offset)
            for group in fact.groups
            for one in group.trajectories
        ]
        records = {(one.partition, one.offset): one for one in self._read(places)}
        real: list[TakenGroup] = []
        for group in fact.groups:
            self._bound(group, fact.step)
            siblings = []
            for one in group.trajectories:
                record = records.get((one.partition, one.offset))
                headers, sha256 = self._record(one, group, record, fact.step)
                if headers is not None:
                    found[one.trajectory] = headers
                siblings.append(msgspec.structs.replace(one, sha256=sha256))
            real.append(msgspec.structs.replace(group, trajectories=tuple(siblings)))
        try:
            digest = batch_digest(real)
        except SchemaError as error:
            findings.add("batches", f"step {fact.step}", error.message)
            return found
        message = "its batch digest is not that of the records in the source's log"
        findings.same(
            "batches", f"step {fact.step}", message, expected=digest, found=fact.batch_digest
        )
        return found

    def _read(self, places: Sequence[RecordPlace]) -> Iterator[Record]:
        wanted = set(places)
        for record in self._records.read(dict.fromkeys(places)):
            if RecordPlace(record.partition, record.offset) in wanted:
                yield record

    def _bound(self, group: TakenGroup, step: int) -> None:
        """C3, and that no group is trained twice."""
        findings = self.findings
        findings.looked["C3"] += 1
        if step > group.deadline:
            message = f"was trained beyond its deadline (version {group.version})"
            expected = f"step <= {group.deadline}"
            findings.add("C3", group.group, message, expected=expected, found=step)
        if staleness_of(step, group.version) < 0:
            message = "was trained before its version was there"
            findings.add("C3", group.group, message, expected=f">= {group.version}", found=step)
        if group.group in self._trained:
            findings.add("batches", group.group, f"is trained again by step {step}")
        self._trained.add(group.group)

    def _record(
        self, one: TakenTrajectory, group: TakenGroup, record: Record | None, step: int
    ) -> tuple[Headers | None, str]:
        """What a record says of itself, and its sha256."""
        findings, who = self.findings, one.trajectory
        findings.looked["records"] += 1
        self._seen += 1
        where = f"trajectories:{one.partition}:{one.offset}"
        if record is None:
            findings.add("records", who, f"is not there at {where} of the source")
            return None, ""
        self._bytes += len(record.value)
        sha256 = record_digest(record)
        message = f"its bytes at {where} of the source are not those that were trained (sha256)"
        findings.same("records", who, message, expected=one.sha256, found=sha256)
        try:
            headers = parse_headers(record.headers)
        except SchemaError as error:
            findings.add("records", who, f"its headers cannot be read: {error.message}")
            return None, sha256
        same: dict[str, tuple[object, object]] = {
            "run": (self._retrained.run, headers.run),
            "trajectory": (who, headers.trajectory),
            "group": (group.group, headers.group),
            "attempt": (one.attempt, headers.attempt),
            "epoch": (one.epoch, headers.epoch),
            "deadline": (group.deadline, headers.deadline),
        }
        for name, (expected, found) in same.items():
            check: Check = "C3" if name == "deadline" else "records"
            message = f"the record of step {step} at {where} is of another {name}"
            findings.same(check, who, message, expected=expected, found=found)
        message = "it is of another version than its group"
        findings.same("C1", who, message, expected=group.version, found=headers.version)
        if 0 <= group.version <= self._source.next_step:
            message = f"was sampled from other weights than version {group.version} of the source"
            digest = self._source.digest_of(group.version)
            findings.same("C1", who, message, expected=digest, found=headers.digest)
        else:
            findings.add("C1", who, f"is of version {group.version}, which the source lacks")
        return headers, sha256


class _Policies(PolicyCheck):
    """Its contributions have rows of what counts, and follow from the rewards that count."""

    def __init__(self, ledger: Ledger, change: BatchChange) -> None:
        super().__init__(ledger)
        self._change = change
        self.rewards: Mapping[str, float | None] = {}
        """As the log has them, of the batch that is looked at."""

    def rows_of(self, entry: StepEntry) -> list[str]:
        return sorted(one.trajectory for group in self._kept(entry) for one in group.trajectories)

    def _kept(self, entry: StepEntry) -> list[TakenGroup]:
        groups = (one for one in entry.fact.groups if one.group not in self._change.without)
        return sorted(groups, key=lambda group: group.group)

    def _rows(self, entry: StepEntry, rows: dict[str, dict[str, Any]]) -> None:
        groups = self._kept(entry)
        siblings = [sorted(one.trajectory for one in group.trajectories) for group in groups]
        rewards = [[self._reward(name) for name in names] for names in siblings]
        versioned = [(group.version, of) for group, of in zip(groups, rewards, strict=True)]
        advantages = batch_advantages(versioned, *advantage_rule(entry.fact.settings))
        for group, names, of_group, values in zip(
            groups, siblings, rewards, advantages, strict=True
        ):
            for name, reward, advantage in zip(names, of_group, values, strict=True):
                row = rows[name]
                expected = {
                    "group": group.group,
                    "version": group.version,
                    "staleness": staleness_of(entry.step, group.version),
                    "reward": reward,
                }
                for column, value in expected.items():
                    self._row(entry.step, name, column, value, row[column])
                if not close_to(advantage, row["advantage"]):
                    self._row(entry.step, name, "advantage", advantage, row["advantage"])

    def _reward(self, name: str) -> float | None:
        """That counts."""
        if name in self._change.without:
            return None
        return self._change.rewards.get(name, self.rewards.get(name))


def weights_distance(one: Path, other: Path) -> float:
    """The norm of the difference of two safetensors files over the norm of the other one.

    Over all tensors of numbers, one by one. Raises PolicyError where they are not of one shape.
    """
    ours = {entry.name: entry for entry in read_entries(one)}
    theirs = {entry.name: entry for entry in read_entries(other)}
    if {n: e.shape for n, e in ours.items()} != {n: e.shape for n, e in theirs.items()}:
        raise PolicyError(f"{one} and {other} have other tensors")
    apart, size = 0.0, 0.0
    with mapped(one) as a, mapped(other) as b:
        for name, entry in ours.items():
            if entry.dtype in FLOATS and theirs[name].dtype in FLOATS:
                here, there = _numbers(a, entry), _numbers(b, theirs[name])
                apart += float(np.square(here - there).sum())
                size += float(np.square(there).sum())
    return math.sqrt(apart / size) if size else 0.0


def _numbers(data: Any, entry: Entry) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = np.frombuffer(data[entry.start : entry.end], FLOATS[entry.dtype])
    if entry.dtype == "BF16":
        found = (found.astype("<u4") << 16).view("<f4")
    return found.astype(np.float64)
