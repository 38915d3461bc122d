"""A legal decision that is not the planner's is named, though chain and digests are made to fit."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas.rounds import AnyDecision, Round, Schedule, TakeBatch
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper


def test_every_plan_of_a_real_log_is_made_again(copy: RecordedRun) -> None:
    found = audited(copy)
    assert found.holds
    assert found.plans == found.rounds - sum(not one.planned for one in rounds_of(copy))
    assert found.plans > 50


def rounds_of(run: RecordedRun) -> list[Round]:
    with Tamper(run) as log:
        return [round_ for _, round_ in log.rounds()]


def test_the_batch_that_is_told_another_reason_is_named_and_nothing_else(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        rounds = [one for _, one in log.rounds()]
        (forged, *_) = [
            one.ordinal
            for one in rounds[40:]
            if any(isinstance(decision, TakeBatch) for decision in one.decisions)
        ]

        def change(decision: AnyDecision) -> AnyDecision:
            if isinstance(decision, TakeBatch) and decision in rounds[forged].decisions:
                return msgspec.structs.replace(decision, reason="I say so")
            return decision

        assert log.decide_otherwise(change) == 1
        log.mend()
    found = audited(copy)
    (violation,) = found.violations
    assert (violation.check, violation.subject) == ("decisions", f"round {forged}")
    assert violation.found == "take-batch (reason I say so)"


def test_a_request_that_waits_though_a_slot_was_free_is_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        found = log.rounds()
        row, forged = next(
            (row, one)
            for row, one in found[20:]
            if one.decisions
            and isinstance(one.decisions[-1], Schedule)
            and found[one.ordinal + 1][1].decisions == ()
        )
        later_row, later = found[forged.ordinal + 1]
        *kept, last = forged.decisions
        log.rewrite(row, msgspec.structs.replace(forged, decisions=tuple(kept)))
        log.rewrite(later_row, msgspec.structs.replace(later, decisions=(last,)))
        log.mend()
    named = {one.subject for one in audited(copy).violations if one.check == "decisions"}
    assert f"round {forged.ordinal}" in named
