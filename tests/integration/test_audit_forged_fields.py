"""One field of a record is forged and the chain mended: what says the same elsewhere names it.

Goal: nothing is trusted because it stands once. Method: the damage of `test_audit_rules`, on the
fields of facts that no rule of the fold reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from dora_pipe.schemas.control import RunStarted, StepCommitted, TrajectoriesLogged, WorkerReady
from tests.support.recorded_run import RecordedRun, audited, recorded_in
from tests.support.tamper import Tamper

Fact = TypeVar("Fact", bound=msgspec.Struct)


@pytest.fixture
def copy(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> RecordedRun:
    """A copy of the session's run."""
    return recorded_in(tmp_path_factory.getbasetemp()).copy(tmp_path / "copy")


def _forged(
    kind: type[Fact], change: Callable[[Fact], dict[str, Any]], such: Callable[[Fact], bool]
) -> Callable[[Tamper], None]:
    def forge(log: Tamper) -> None:
        row, fact = next(one for one in log.facts(kind) if such(one[1]))
        log.rewrite(row, msgspec.structs.replace(fact, **change(fact)))

    return forge


def _start(change: Callable[[RunStarted], dict[str, Any]]) -> Callable[[Tamper], None]:
    return _forged(RunStarted, change, lambda fact: True)


def _commit(
    change: Callable[[StepCommitted], dict[str, Any]], *, checkpoint: bool = False
) -> Callable[[Tamper], None]:
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


def _joined_later(fact: WorkerReady) -> bool:
    return fact.epoch > 100  # Version 0 was long past then.


FIELDS: dict[str, tuple[Callable[[Tamper], None], str, str]] = {
    "temperature": (_start(_hotter), "control", "not the one of its digest"),
    "seed": (_start(lambda one: {"seed": one.seed + 1}), "control", "another run or seed"),
    "first manifest's size": (
        _start(lambda one: {"policy": _larger(one.policy)}),
        "policies",
        "another size",
    ),
    "manifest's size": (
        _commit(lambda one: {"policy": _larger(one.policy)}),
        "policies",
        "another size",
    ),
    "contributions' size": (
        _commit(lambda one: {"contributions": _larger(one.contributions)}),
        "policies",
        "another size",
    ),
    "checkpoint's size": (
        _commit(lambda one: {"checkpoint": _larger(one.checkpoint)}, checkpoint=True),
        "policies",
        "another size",
    ),
    "attempt that was not placed": (
        _forged(TrajectoriesLogged, _next_attempt, lambda fact: True),
        "control",
        "but no decision placed it there",
    ),
    "version that was not assigned": (
        _forged(WorkerReady, lambda one: {"version": 0}, _joined_later),
        "control",
        "but no decision assigned it",
    ),
    "where to go on": (
        _commit(lambda one: {"decisions_next": one.decisions_next - 1}),
        "batches",
        "another place to go on from",
    ),
}
"""What is forged, the check that must find it, and what it must say."""


@pytest.mark.parametrize("name", FIELDS)
def test_forged_field_is_named_although_the_chain_fits(copy: RecordedRun, name: str) -> None:
    forge, check, text = FIELDS[name]
    with Tamper(copy) as log:
        forge(log)
        log.mend()
    report = audited(copy)
    lines = "\n".join(one.line for one in report.violations)
    assert any(one.check == check and text in one.message for one in report.violations), lines
    assert "the chain is broken" not in lines
