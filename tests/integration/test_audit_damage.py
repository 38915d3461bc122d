"""Every damage to a copy of a recorded run is named; also after a forger has mended the chain.

Goal: no check leans on the chain alone. Method: damage the SQLite file behind the bus's back, audit
it, and look for the violation that only the right check can find.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.errors import InvariantBroken
from dora_pipe.history.audit import audit, raise_if_broken
from dora_pipe.history.report import AuditReport
from tests.support import damage
from tests.support.recorded_run import RecordedRun, recorded_in
from tests.support.tamper import Tamper

CHAIN = "the chain is broken"

DAMAGES: list[tuple[Callable[[Tamper], str], str, str]] = [
    (damage.remove_trajectory, "records", "was logged, but its record is not there"),
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
    (damage.change_reward, "records", "reward in the record is not what `trajectory logged` says"),
    (damage.change_weights, "policies", "holds other weights"),
    (damage.change_contributions, "policies", "was changed: its sha256 is another one"),
    (damage.change_checkpoint, "policies", "was changed: its sha256 is another one"),
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
}
"""Damages to what the chain covers: control and decisions."""


@pytest.fixture
def copy(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> RecordedRun:
    """A copy of the session's run."""
    return recorded_in(tmp_path_factory.getbasetemp()).copy(tmp_path / "copy")


def _audit(run: RecordedRun) -> AuditReport:
    bus = run.open()
    try:
        return audit(bus, run.topics, run.store)
    finally:
        bus.close()


def _lines(report: AuditReport) -> str:
    return "\n".join(violation.line for violation in report.violations)


@pytest.mark.parametrize("mended", [False, True], ids=["chain-broken", "chain-mended"])
@pytest.mark.parametrize(
    ("damaging", "check", "text"),
    DAMAGES,
    ids=[f"{one.__name__}-{number}" for number, (one, _, _) in enumerate(DAMAGES)],
)
def test_damage_is_named_by_its_own_check_and_ends_in_exit_code_5(
    copy: RecordedRun,
    damaging: Callable[[Tamper], str],
    check: str,
    text: str,
    mended: bool,
) -> None:
    with Tamper(copy) as log:
        subject = damaging(log)
        if mended:
            log.mend()
    report = _audit(copy)
    named = [
        one
        for one in report.violations
        if one.check == check and subject in one.subject and text in one.message
    ]
    assert named, _lines(report)
    chain = [one for one in report.violations if CHAIN in one.message]
    assert bool(chain) == (damaging in BREAKS_THE_CHAIN and not mended), _lines(report)
    with pytest.raises(InvariantBroken) as broken:
        raise_if_broken(report)
    assert broken.value.exit_code == 5


def test_undamaged_copy_holds(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        log.mend()
    report = _audit(copy)
    assert report.holds, _lines(report)
    assert report.finished
    assert all(line.looked > 0 for line in report.checks)


def test_mending_gives_the_chain_that_was_there(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        before = [round_.chain for _, round_ in log.rounds()]
        log.mend()
        assert [round_.chain for _, round_ in log.rounds()] == before


def test_run_that_was_rewritten_from_end_to_end_is_left_to_replay(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        damage.forge_everything(log)
    assert _audit(copy).holds
