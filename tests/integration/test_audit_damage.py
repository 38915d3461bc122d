"""Tests of audit on damaged copies of a recorded run.

The SQLite file is damaged and its chain recomputed, so that only the right check can find it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace

import pytest

from dora_pipe.audit.auditor import raise_if_broken
from dora_pipe.audit.report import AuditReport
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.control import WorkerReady
from tests.support import damage
from tests.support.command_line import caller
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper

CHAIN = "the chain is broken"

DAMAGES: list[tuple[Callable[[Tamper], str], str, str]] = [
    (damage.remove_trajectory, "records", "was logged, but trajectories:"),
    (damage.change_token, "records", "are not those that were logged (sha256)"),
    (damage.change_token, "records", "are not those its headers name (sha256)"),
    (damage.change_token_and_record, "records", "are not those that were logged (sha256)"),
    (damage.change_version, "C1", "was sampled from other weights than version"),
    (damage.change_version, "C1", "version in the record is not what was dispatched"),
    (damage.change_segment_version, "C1", "its tokens come from more than one version"),
    (damage.change_logprob, "records", "are not those that were logged (sha256)"),
    (damage.double_step, "steps", "is committed twice"),
    (damage.remove_step, "steps", "is missing"),
    (damage.remove_last_step, "steps", "is missing, although round"),
    (damage.train_fenced, "batches", "trained a fenced record"),
    (damage.train_beyond_deadline, "C3", "was trained beyond its deadline"),
    (damage.change_round, "decisions", "is dispatched with a wrong index"),
    (damage.change_reward, "records", "reward in the record differs from `trajectory logged`"),
    (damage.change_answer, "records", "answer in the record differs from `trajectory logged`"),
    (damage.change_part, "records", "reward parts in the record differs from `trajectory logged`"),
    (damage.change_weights, "policies", "holds other weights"),
    (damage.change_contributions, "policies", "was changed: its sha256 differs"),
    (damage.change_checkpoint, "policies", "was changed: its sha256 differs"),
    (damage.mix_in_another_run, "records", "is of another run"),
]
"""Damage, the check that must find it, and what it must say."""

BREAKS_THE_CHAIN = {
    damage.double_step,
    damage.remove_step,
    damage.remove_last_step,
    damage.train_fenced,
    damage.train_beyond_deadline,
    damage.change_round,
    damage.change_reward,
    damage.change_answer,
    damage.change_part,
}
"""Damages to what the chain covers: control and decisions."""


def _lines(report: AuditReport) -> str:
    return "\n".join(violation.line for violation in report.violations)


MENDED = [(*row, False) for row in DAMAGES] + [
    (*row, True) for row in DAMAGES if row[0] in BREAKS_THE_CHAIN
]


@pytest.mark.parametrize(
    ("damaging", "check", "text", "mended"),
    MENDED,
    ids=[f"{row[0].__name__}-{number}" for number, row in enumerate(MENDED)],
)
def test_damage_is_named_by_its_own_check_and_ends_in_exit_code_5(
    copy: RecordedRun, damaging: Callable[[Tamper], str], check: str, text: str, mended: bool
) -> None:
    with Tamper(copy) as log:
        subject = damaging(log)
        if mended:
            log.mend()
    report = audited(copy)
    named = [
        violation
        for violation in report.violations
        if violation.check == check and subject in violation.subject and text in violation.message
    ]
    assert named, _lines(report)
    chain = [violation for violation in report.violations if CHAIN in violation.message]
    assert bool(chain) == (damaging in BREAKS_THE_CHAIN and not mended), _lines(report)
    with pytest.raises(InvariantBroken) as broken:
        raise_if_broken(report)
    assert broken.value.exit_code == 5


def test_undamaged_copy_holds(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        log.mend()
    report = audited(copy)
    assert report.holds, _lines(report)
    assert report.finished
    looked = {line.check for line in report.checks if line.looked > 0}
    assert looked == {line.check for line in report.checks}


def test_mending_gives_the_chain_that_was_there(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        before = [round_.chain for _, round_ in log.rounds()]
        log.mend()
        assert [round_.chain for _, round_ in log.rounds()] == before


def test_run_that_was_rewritten_from_end_to_end_is_left_to_replay(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        damage.forge_everything(log)
    assert audited(copy).holds


def test_decisions_whose_end_was_cut_off_are_named_by_the_facts_that_answered_them(
    copy: RecordedRun,
) -> None:
    with Tamper(copy) as log:
        rows = log.rows("decisions")
        log.remove(rows[-1])  # It stopped the run; the remaining log is that of a live run.
    report = audited(copy)
    assert not report.finished
    lines = [
        violation.line
        for violation in report.violations
        if "but no decision stopped it" in violation.line
    ]
    assert len(lines) == 3, _lines(report)


def test_facts_that_answer_no_decision_are_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        for row in log.rows("decisions")[-30:]:
            log.remove(row)
    report = audited(copy)
    lines = _lines(report)
    assert "was never dispatched" in lines
    assert "but no decision assigned it" in lines
    assert "which no decision took" in lines


def test_record_under_another_key_is_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        row, fact = log.trained()
        log.put(replace(row, key=b"g0000009999"))
        ready, _ = log.facts(WorkerReady)[3]
        log.put(replace(ready, key=b"w9"))
        log.put(replace(log.rows("decisions")[40], key=b"w9"))
    lines = _lines(audited(copy))
    assert f"records {fact.trajectory}: has another key" in lines
    assert f"control control:{ready.offset}: has another key" in lines
    assert "rounds round 40: has a key" in lines
    assert lines.count("\n") == 2


def test_topic_with_other_partitions_than_the_run_has_is_named(copy: RecordedRun) -> None:
    with sqlite3.connect(copy.log) as log:
        log.execute("UPDATE topics SET partitions = 2 WHERE name = 'recorded.control'")
        log.execute("INSERT INTO topics VALUES (99, 'recorded.more', 1, 1000)")
    log.close()
    report = audited(copy)
    (line,) = [violation.line for violation in report.violations]
    assert "recorded.control: has another number of partitions" in line
    assert any("topic recorded.more is unknown" in note for note in report.notes)


def test_records_in_no_topic_and_in_no_partition_are_named_by_the_command(
    copy: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys)
    with sqlite3.connect(copy.log) as log:
        (control,) = log.execute("SELECT id FROM topics WHERE name = 'recorded.control'").fetchone()
        for position in (77 << 52 | 3, control << 52 | 5 << 40 | 1):
            log.execute("INSERT INTO records (at, key, value) VALUES (?, x'', x'')", (position,))
    log.close()
    code, out, _ = call("audit", str(copy.directory), "--json")
    assert code == 5
    texts = [violation["message"] for violation in json.loads(out)["violations"]]
    assert texts == [
        "records are in partition 5 of recorded.control, which has 1",
        "records have topic id 77, which the log does not define",
    ]
