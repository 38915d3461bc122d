"""Tests of audit rules on impossible decisions and events.

One decision or event of a recorded run is changed and the chain recomputed; audit must name the
rule. Fields that the fold does not read are checked against a second record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from dora_pipe.schemas.control import (
    RoleStarted,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerReady,
)
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Dispatch,
    End,
    Fence,
    Schedule,
    StopRun,
    TakeBatch,
)
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper

One = TypeVar("One", bound=msgspec.Struct)
NOBODY = "f" * 64
PLACE = 12
"""Which decision of its kind is changed: one in the middle of the run."""


def _decide(
    log: Tamper,
    kind: type[One],
    change: Callable[[One], AnyDecision | None],
    *,
    index: int = PLACE,
    such: Callable[[One], bool] = lambda value: True,
) -> One:
    matched: list[One] = []

    def otherwise(decision: Any) -> Any:
        if not isinstance(decision, kind) or not such(decision):
            return decision
        matched.append(decision)
        return change(decision) if len(matched) == index + 1 else decision

    assert log.decide_otherwise(otherwise) == 1
    return matched[index]


def _spec(decision: Dispatch, **changes: Any) -> Dispatch:
    return msgspec.structs.replace(decision, spec=msgspec.structs.replace(decision.spec, **changes))


def _of_training(decision: Dispatch | Schedule) -> bool:
    return decision.spec.purpose == "train"


def _dispatched(**changes: Callable[[Any], Any]) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        def change(dispatch: Dispatch) -> Dispatch:
            return _spec(
                dispatch, **{name: to(getattr(dispatch.spec, name)) for name, to in changes.items()}
            )

        return _decide(log, Dispatch, change, such=_of_training).spec.group

    return damage


def _placed(attempt: int | None = None, **changes: Any) -> Callable[[Tamper], str]:
    def change(schedule: Schedule) -> Schedule:
        samples = list(schedule.samples)
        if attempt is not None:
            samples[0] = msgspec.structs.replace(samples[0], attempt=attempt)
        return msgspec.structs.replace(schedule, samples=tuple(samples), **changes)

    def damage(log: Tamper) -> str:
        index = _decide(log, Schedule, change, such=lambda value: value.samples[0].attempt == 1)
        return index.requests()[0].trajectory

    return damage


def _logged(entry: dict[str, Any], **changes: Any) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        row, record = log.facts(TrajectoriesLogged)[15]
        first = msgspec.structs.replace(record.trajectories[0], **entry)
        entries = (first, *record.trajectories[1:])
        log.rewrite(row, msgspec.structs.replace(record, trajectories=entries, **changes))
        return f"control:{row.offset}"

    return damage


def _admitted_against_the_bound(log: Tamper) -> str:
    (moved,) = log.rounds()[-12:-11]
    specs = [
        decision
        for _, round_ in log.rounds()
        for decision in round_.decisions
        if isinstance(decision, Dispatch) and _of_training(decision)
    ]
    last = specs[-1].spec
    more = [
        _spec(specs[-1], ordinal=last.ordinal + extra, group=f"g{last.ordinal + extra:010d}")
        for extra in range(1, 12)
    ]
    row, round_ = moved
    decisions = (*round_.decisions, *more)
    log.rewrite(row, msgspec.structs.replace(round_, decisions=decisions))
    return more[-1].spec.group


def _assigned_other_weights(log: Tamper) -> str:
    subject = _decide(
        log, Assign, lambda value: msgspec.structs.replace(value, digest=NOBODY), index=3
    )
    return f"version {subject.version}"


def _assigned_unpublished(log: Tamper) -> str:
    _decide(log, Assign, lambda value: msgspec.structs.replace(value, version=99), index=3)
    return "version 99"


def _placed_on_a_fenced_worker(log: Tamper) -> str:
    fenced = next(
        decision
        for _, round_ in log.rounds()
        for decision in round_.decisions
        if isinstance(decision, Fence)
    )
    _decide(
        log,
        Schedule,
        lambda value: msgspec.structs.replace(
            value, worker=fenced.worker, incarnation=fenced.incarnation
        ),
        index=60,
    )
    return fenced.worker


def _another_batch(log: Tamper) -> str:
    subject = _decide(
        log,
        TakeBatch,
        lambda value: msgspec.structs.replace(value, groups=value.groups[1:]),
        index=6,
    )
    return f"step {subject.step}"


def _batch_under_another_attempt(log: Tamper) -> str:
    subject = _decide(
        log, TakeBatch, lambda value: msgspec.structs.replace(value, attempt=2), index=6
    )
    return f"step {subject.step}"


def _other_settings(log: Tamper) -> str:
    subject = _decide(
        log,
        TakeBatch,
        lambda value: msgspec.structs.replace(
            value, settings={**value.settings, "objective.kl_coef": 0.5}
        ),
        index=6,
    )
    return f"step {subject.step}"


def _stopped_early(log: Tamper) -> str:
    row, round_ = log.rounds()[60]
    stop = StopRun(reason="enough")
    log.rewrite(row, msgspec.structs.replace(round_, decisions=(*round_.decisions, stop)))
    return f"round {round_.ordinal}"


def _decided_after_the_stop(log: Tamper) -> str:
    _stopped_early(log)
    behind = (round_ for _, round_ in log.rounds()[61:] if round_.decisions)
    return f"round {next(behind).ordinal}"


def _joined_under_another_name(log: Tamper) -> str:
    row, fact = log.facts(WorkerJoined)[0]
    log.rewrite(row, msgspec.structs.replace(fact, worker="x"))
    return f"{fact.worker} is ready under incarnation {row.offset}"


def _ended(outcome: str, which: str) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        commits = [fact for _, fact in log.facts(StepCommitted)]
        row, round_ = log.rounds()[100]
        before = next(commit for commit in commits if commit.step == 2)
        newest = max(
            (
                decision.spec.group
                for _, earlier in log.rounds()[:100]
                for decision in earlier.decisions
                if isinstance(decision, Dispatch) and _of_training(decision)
            )
        )
        name = {"open": newest, "trained": before.groups[0].group, "strange": "g0000009999"}[which]
        end = msgspec.convert({"kind": "end", "reason": "", "group": name, "outcome": outcome}, End)
        log.rewrite(row, msgspec.structs.replace(round_, decisions=(*round_.decisions, end)))
        return name

    return damage


def _fact(kind: type[One], index: int = 3, **changes: Any) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        row, fact = log.facts(kind)[index]
        log.rewrite(row, msgspec.structs.replace(fact, **changes))
        return f"control:{row.offset}"

    return damage


def _hosts_other_weights(log: Tamper) -> str:
    row, fact = log.facts(WorkerReady)[3]
    log.rewrite(row, msgspec.structs.replace(fact, digest=NOBODY))
    return fact.worker


def _commit(**changes: Any) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        row, fact = log.facts(StepCommitted)[6]
        log.rewrite(row, msgspec.structs.replace(fact, **changes))
        return f"step {fact.step}"

    return damage


def _committed_by_a_trainer_that_was_out(log: Tamper) -> str:
    row, fact = log.facts(StepCommitted)[-1]
    assert fact.incarnation > 0, "the recorded run's trainer was started again"
    log.rewrite(row, msgspec.structs.replace(fact, incarnation=0))
    return f"step {fact.step}"


def _round_of_an_orchestrator_that_was_out(log: Tamper) -> str:
    incarnations = [
        fact.incarnation for _, fact in log.facts(RoleStarted) if fact.role == "orchestrator"
    ]
    assert len(incarnations) > 1, "the recorded run's orchestrator was started again"
    row, round_ = log.rounds()[-1]
    log.rewrite(row, msgspec.structs.replace(round_, incarnation=incarnations[0]))
    return f"round {round_.ordinal}"


def _forged(
    kind: type[One], change: Callable[[One], dict[str, Any]], such: Callable[[One], bool]
) -> Callable[[Tamper], str]:
    def damage(log: Tamper) -> str:
        row, fact = next(fact for fact in log.facts(kind) if such(fact[1]))
        log.rewrite(row, msgspec.structs.replace(fact, **change(fact)))
        return ""

    return damage


def _forged_start(change: Callable[[RunStarted], dict[str, Any]]) -> Callable[[Tamper], str]:
    return _forged(RunStarted, change, lambda fact: True)


def _forged_commit(
    change: Callable[[StepCommitted], dict[str, Any]], *, checkpoint: bool = False
) -> Callable[[Tamper], str]:
    return _forged(
        StepCommitted, change, lambda fact: fact.checkpoint is not None or not checkpoint
    )


def _hotter(fact: RunStarted) -> dict[str, Any]:
    sampling = {**fact.config["sampling"], "temperature": 0.5}
    return {"config": {**fact.config, "sampling": sampling}}


def _larger(blob: Any) -> Any:
    return msgspec.structs.replace(blob, bytes=blob.bytes + 1)


def _next_attempt(fact: TrajectoriesLogged) -> dict[str, Any]:
    first = msgspec.structs.replace(fact.trajectories[0], attempt=fact.trajectories[0].attempt + 1)
    return {"trajectories": (first, *fact.trajectories[1:])}


def _with_another_error(log: Tamper) -> str:
    for row, fact in log.facts(TrajectoriesLogged):
        for entry in fact.trajectories:
            if entry.error:
                forged = msgspec.structs.replace(entry, error=f"{entry.error}x")
                entries = tuple(forged if same is entry else same for same in fact.trajectories)
                log.rewrite(row, msgspec.structs.replace(fact, trajectories=entries))
                return entry.trajectory
    raise AssertionError("no trajectory has an error")


def _joined_later(fact: WorkerReady) -> bool:
    return fact.incarnation > 100  # Version 0 was long past then.


RULES: dict[str, tuple[Callable[[Tamper], str], str, str]] = {
    "seed": (_dispatched(seed=lambda seed: seed + 1), "decisions", "wrong seed"),
    "prompt": (_dispatched(index=lambda row: row + 1), "decisions", "wrong index"),
    "partition": (
        _dispatched(partition=lambda value: (value + 1) % 3),
        "decisions",
        "wrong partition",
    ),
    "size": (_dispatched(size=lambda size: size - 1), "decisions", "wrong size"),
    "deadline": (_dispatched(deadline=lambda value: value + 1), "decisions", "wrong deadline"),
    "digest": (_dispatched(digest=lambda _: NOBODY), "C1", "with other weights than the published"),
    "stale stamp": (
        _dispatched(version=lambda value: value - 1),
        "decisions",
        "is not dispatched under the newest version",
    ),
    "bound": (_admitted_against_the_bound, "decisions", "against the bound"),
    "attempt": (_placed(attempt=3), "decisions", "under a wrong attempt"),
    "strange worker": (_placed(incarnation=99_999), "decisions", "which never joined"),
    "fenced worker": (_placed_on_a_fenced_worker, "decisions", "which was fenced"),
    "assigned weights": (_assigned_other_weights, "decisions", "weights that are not version"),
    "assigned nothing": (_assigned_unpublished, "decisions", "which was never published"),
    "batch": (_another_batch, "decisions", "not the 4 earliest deadlines"),
    "batch attempt": (_batch_under_another_attempt, "decisions", "under a wrong attempt"),
    "settings": (_other_settings, "batches", "with other settings than those in force"),
    "early stop": (_stopped_early, "C2", "stops the run"),
    "after the stop": (_decided_after_the_stop, "decisions", "decides after the run was stopped"),
    "filtered": (_ended("filtered", "open"), "decisions", "filtering is off"),
    "evaluated": (_ended("evaluated", "open"), "decisions", "although it is for training"),
    "trained": (_ended("trained", "open"), "decisions", "without a commit"),
    "two outcomes": (_ended("cancelled", "trained"), "C2", "has two outcomes"),
    "no group": (_ended("failed", "strange"), "C2", "was never dispatched"),
    "logged stranger": (
        _logged({"trajectory": "g0000009999-000"}),
        "control",
        "was never dispatched",
    ),
    "logged by nobody": (_logged({}, incarnation=99_999), "control", "never joined"),
    "ready for nothing": (
        _fact(WorkerReady, 3, version=99),
        "control",
        "which was never published",
    ),
    "ready stranger": (_fact(WorkerReady, 3, incarnation=99_999), "control", "never joined with"),
    "served weights": (_hosts_other_weights, "C1", "serves other weights than the published"),
    "another run": (_fact(RunStarted, 0, run="other"), "control", "starts another run"),
    "joined late": (_joined_under_another_name, "control", "never joined with"),
    "before": (_commit(digest_before=NOBODY), "steps", "does not start from the weights"),
    "after": (_commit(digest_after=NOBODY), "steps", "manifest is not of the weights"),
    "batch digest": (_commit(batch_digest=NOBODY), "batches", "is not that of the records"),
    "old trainer": (_committed_by_a_trainer_that_was_out, "steps", "by a fenced trainer"),
    "old orchestrator": (
        _round_of_an_orchestrator_that_was_out,
        "decisions",
        "is of an orchestrator that was out",
    ),
    "temperature": (_forged_start(_hotter), "control", "not the one of its digest"),
    "seed of the run": (
        _forged_start(lambda value: {"seed": value.seed + 1}),
        "control",
        "another run or seed",
    ),
    "first manifest's size": (
        _forged_start(lambda value: {"policy": _larger(value.policy)}),
        "policies",
        "another size",
    ),
    "manifest's size": (
        _forged_commit(lambda value: {"policy": _larger(value.policy)}),
        "policies",
        "another size",
    ),
    "contributions' size": (
        _forged_commit(lambda value: {"contributions": _larger(value.contributions)}),
        "policies",
        "another size",
    ),
    "checkpoint's size": (
        _forged_commit(lambda value: {"checkpoint": _larger(value.checkpoint)}, checkpoint=True),
        "policies",
        "another size",
    ),
    "attempt that was not placed": (
        _forged(TrajectoriesLogged, _next_attempt, lambda fact: True),
        "control",
        "but no decision scheduled it there",
    ),
    "version that was not assigned": (
        _forged(WorkerReady, lambda value: {"version": 0}, _joined_later),
        "control",
        "but no decision assigned it",
    ),
    "error of an invalid reward": (
        _with_another_error,
        "records",
        "error in the record differs from `trajectory logged`",
    ),
    "where to go on": (
        _forged_commit(lambda value: {"decisions_next": value.decisions_next - 1}),
        "batches",
        "`decisions_next` is not the offset after",
    ),
}
"""What is changed, the check that must find it, and what it must say."""


@pytest.mark.parametrize("name", RULES)
def test_rule_that_was_broken_is_named(copy: RecordedRun, name: str) -> None:
    damage, check, text = RULES[name]
    with Tamper(copy) as log:
        subject = damage(log)
        log.mend()
    report = audited(copy)
    named = [
        violation
        for violation in report.violations
        if violation.check == check and text in violation.message and subject in violation.line
    ]
    lines = "\n".join(violation.line for violation in report.violations)
    assert named, f"{subject}\n{lines}"
    assert not any("the chain is broken" in violation.message for violation in report.violations), (
        lines
    )
