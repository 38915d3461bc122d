"""A legal decision that is not the planner's is named, though chain and digests are made to fit."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas.rounds import AnyDecision, Round, Schedule, TakeBatch
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper


def test_every_plan_of_a_real_log_is_made_again(copy: RecordedRun) -> None:
    report = audited(copy)
    assert report.holds
    assert report.plans == report.rounds - sum(not round_.planned for round_ in rounds_of(copy))
    assert report.plans > 50


def rounds_of(run: RecordedRun) -> list[Round]:
    with Tamper(run) as log:
        return [round_ for _, round_ in log.rounds()]


def test_the_batch_that_is_told_another_reason_is_named_and_nothing_else(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        rounds = [entry for _, entry in log.rounds()]
        (forged, *_) = [
            round_.ordinal
            for round_ in rounds[40:]
            if any(isinstance(decision, TakeBatch) for decision in round_.decisions)
        ]

        def change(decision: AnyDecision) -> AnyDecision:
            if isinstance(decision, TakeBatch) and decision in rounds[forged].decisions:
                return msgspec.structs.replace(decision, reason="I say so")
            return decision

        assert log.decide_otherwise(change) == 1
        log.mend()
    result = audited(copy)
    (violation,) = result.violations
    assert (violation.check, violation.subject) == ("decisions", f"round {forged}")
    assert violation.found == "take-batch (reason I say so)"


def test_a_request_that_waits_though_a_slot_was_free_is_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        rounds = log.rounds()
        row, forged = next(
            (row, entry)
            for row, entry in rounds[20:]
            if entry.decisions
            and isinstance(entry.decisions[-1], Schedule)
            and rounds[entry.ordinal + 1][1].decisions == ()
        )
        later_row, later = rounds[forged.ordinal + 1]
        *kept, last = forged.decisions
        log.rewrite(row, msgspec.structs.replace(forged, decisions=tuple(kept)))
        log.rewrite(later_row, msgspec.structs.replace(later, decisions=(last,)))
        log.mend()
    named = {
        violation.subject
        for violation in audited(copy).violations
        if violation.check == "decisions"
    }
    assert f"round {forged.ordinal}" in named
