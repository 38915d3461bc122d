"""Check committed steps against the ledger: C3, batch, records and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_

import msgspec

from dora_pipe.audit.check_records import Seen
from dora_pipe.audit.entries import StepEntry
from dora_pipe.audit.evidence import Place
from dora_pipe.audit.ledger import Ledger
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.history import GroupHistory, RequestHistory
from dora_pipe.schemas.batch import batch_digest, staleness_of
from dora_pipe.schemas.control import TakenGroup, TakenTrajectory
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.policy import weights_digest
from dora_pipe.schemas.rounds import TakeBatch


def check_steps(ledger: Ledger, results: Seen, entries: Iterable[StepEntry]) -> None:
    """Check commits whose groups' records were checked before."""
    look = _Look(ledger, results.other_bytes)
    for entry in entries:
        ledger.findings.looked["steps"] += 1
        look.weights(entry)
        look.batch(entry)
        look.claims(entry)
        first = ledger.steps[entry.step]
        if first.at != entry.at and first.fact.groups == entry.fact.groups:
            continue  # reported elsewhere
        for group in entry.fact.groups:
            look.group(entry, group)


class _Look:
    def __init__(self, ledger: Ledger, other_bytes: Mapping[Place, str]) -> None:
        self._ledger = ledger
        self._findings = ledger.findings
        self._other_bytes = other_bytes

    def weights(self, entry: StepEntry) -> None:
        fact, who, findings = entry.fact, f"step {entry.step}", self._findings
        before = self._ledger.versions.get(fact.step)
        if before is not None:
            message = f"does not start from the weights of version {fact.step}"
            findings.same("steps", who, message, expected=before.digest, actual=fact.digest_before)
        message = "its manifest is not of the weights that it left"
        findings.same("steps", who, message, expected=fact.digest_after, actual=fact.policy.digest)
        digest = weights_digest(fact.policy.tensors)
        message = "the digest of its manifest is not that of the tensors in it"
        findings.same("steps", who, message, expected=digest, actual=fact.policy.digest)

    def batch(self, entry: StepEntry) -> None:
        fact, who, findings = entry.fact, f"step {entry.step}", self._findings
        if entry.take is not None and entry.taken_at is not None:
            self._as_taken(entry, entry.take)
            message = "`decisions_next` is not the offset after the decision that took its batch"
            behind = entry.taken_at.offset + 1
            findings.same("batches", who, message, expected=behind, actual=fact.decisions_next)
            message = "was trained in other parts than it was taken in"
            findings.same("batches", who, message, expected=entry.take.parts, actual=fact.parts)
            message = "was trained with other settings than those in force"
            findings.same(
                "batches", who, message, expected=entry.take.settings, actual=fact.settings
            )
        try:
            digest = batch_digest([self._as_logged(group) for group in fact.groups])
        except SchemaError as error:
            findings.add("C2", who, error.message)
            return
        message = "its batch digest is not that of the records in the log"
        findings.same("batches", who, message, expected=digest, actual=fact.batch_digest)

    def claims(self, entry: StepEntry) -> None:
        fact, who, findings = entry.fact, f"step {entry.step}", self._findings
        findings.looked["steps"] += 1
        if fact.adopted and not any(
            adoption.incarnation == fact.incarnation for adoption in self._ledger.adopted
        ):
            findings.add("steps", who, "adopted weights without a `weights adopted` of its trainer")
        if not fact.dropped or entry.take is None:
            return
        # Always kept (docs/storage.md).
        kept = {0, fact.step, fact.step + 1, *entry.take.pins}
        for version in sorted(kept.intersection(fact.dropped)):
            message = f"drops version {version}, which retention keeps"
            findings.add("policies", who, message, expected="kept", actual=list(fact.dropped))

    def _as_taken(self, entry: StepEntry, take: TakeBatch) -> None:
        taken = {group.group: group for group in take.groups}
        trained = {group.group: group for group in entry.fact.groups}
        for name in sorted(taken.keys() | trained.keys()):
            self._findings.looked["batches"] += 1
            if taken.get(name) != trained.get(name):
                message = f"step {entry.step} trained another group than its batch has"
                self._findings.add(
                    "batches",
                    name,
                    message,
                    expected=_in_words(taken.get(name)),
                    actual=_in_words(trained.get(name)),
                )

    def group(self, entry: StepEntry, taken: TakenGroup) -> None:
        group, findings = self._ledger.accounts.groups.get(taken.group), self._findings
        if group is None:
            return
        spec, step = group.spec, entry.step
        if spec.purpose == "eval":
            findings.add("C2", taken.group, f"is for evaluation but was trained by step {step}")
            return
        findings.looked["C3"] += 1
        if step > spec.deadline:
            message = f"was trained beyond its deadline (version {spec.version})"
            findings.add(
                "C3", taken.group, message, expected=f"step <= {spec.deadline}", actual=step
            )
        if staleness_of(step, spec.version) < 0:
            message = "was trained before its version was there"
            findings.add("C3", taken.group, message, expected=f">= {spec.version}", actual=step)
        stamped = (spec.version, spec.deadline)
        message = f"step {step} names another version or deadline than its dispatch"
        findings.same(
            "C3", taken.group, message, expected=stamped, actual=(taken.version, taken.deadline)
        )
        for trajectory in taken.trajectories:
            self._trained(trajectory, step, group.requests)
        self._whole(group, taken, step)

    def _whole(self, group: GroupHistory, taken: TakenGroup, step: int) -> None:
        bound = [logged.fact.trajectory for logged in group.bound]
        trained = [trajectory.trajectory for trajectory in taken.trajectories]
        message = f"step {step} does not hold exactly its logged trajectories, in order"
        self._findings.same("C2", taken.group, message, expected=bound, actual=trained)

    def _trained(
        self, trajectory: TakenTrajectory, step: int, samples: Mapping[str, RequestHistory]
    ) -> None:
        who, findings = trajectory.trajectory, self._findings
        entry = samples.get(who) or self._ledger.accounts.request(who)
        findings.looked["C2"] += 1
        if entry is None:
            findings.add("C2", who, f"is trained by step {step} but was never dispatched")
            return
        if entry.trained is not None:
            message = "is trained twice"
            findings.add(
                "C2", who, message, expected=f"step {entry.trained}", actual=f"step {step}"
            )
        entry.trained = step
        if entry.bound is not None and entry.bound.taken == trajectory:
            return
        logged = self._ledger.accounts.logged.get((trajectory.partition, trajectory.offset))
        where = f"trajectories:{trajectory.partition}:{trajectory.offset}"
        if logged is None or logged.fact.trajectory != who:
            findings.add(
                "batches",
                who,
                f"step {step} trained {where}, which was never logged as this trajectory",
            )
        elif logged.status != "bound":
            message = f"step {step} trained a {logged.status} record ({where})"
            bound = "nothing" if entry.bound is None else _place(entry.bound.taken)
            findings.add("batches", who, message, expected=bound, actual=_place(trajectory))
        else:
            message = f"step {step} names another record than `trajectory logged`"
            expected, actual = _place(logged.taken), _place(trajectory)
            findings.add("batches", who, message, expected=expected, actual=actual)

    def _as_logged(self, group: TakenGroup) -> TakenGroup:
        entry = self._ledger.accounts.groups.get(group.group)  # loads its records
        samples = {} if entry is None else entry.requests
        as_logged = tuple([self._found(trajectory, samples) for trajectory in group.trajectories])
        if all(map(is_, as_logged, group.trajectories)):
            return group
        return msgspec.structs.replace(group, trajectories=as_logged)

    def _found(
        self, trajectory: TakenTrajectory, samples: Mapping[str, RequestHistory]
    ) -> TakenTrajectory:
        key = (trajectory.partition, trajectory.offset)
        entry = samples.get(trajectory.trajectory) or self._ledger.accounts.request(
            trajectory.trajectory
        )
        bound, sha256 = None if entry is None else entry.bound, self._other_bytes.get(key)
        if sha256 is None and bound is not None and bound.taken == trajectory:
            return trajectory
        logged = self._ledger.accounts.logged.get(key)
        if logged is None or group_of(logged.fact.trajectory) != group_of(trajectory.trajectory):
            return trajectory
        named = logged.taken
        return named if sha256 is None else msgspec.structs.replace(named, sha256=sha256)


def _place(trajectory: TakenTrajectory) -> str:
    where = f"trajectories:{trajectory.partition}:{trajectory.offset}"
    attempt = f"attempt {trajectory.attempt} of incarnation {trajectory.incarnation}"
    return f"{attempt} at {where}, sha256 {trajectory.sha256}"


def _in_words(group: TakenGroup | None) -> str:
    if group is None:
        return "nothing"
    records = "; ".join(
        f"{trajectory.trajectory} {_place(trajectory)}" for trajectory in group.trajectories
    )
    scored = f", rewards {group.rewards}" if group.rewards else ""
    return f"version {group.version}, deadline {group.deadline}{scored}: {records}"
