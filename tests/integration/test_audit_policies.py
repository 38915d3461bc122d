"""The policy store against the commits: files that are gone, or say something else than the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.consumers.contributions import read_contributions, write_contributions
from dora_pipe.schemas.control import RunStarted, StepCommitted, WeightsAdopted
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Row, Tamper

STEP = 6
Rows = list[dict[str, Any]]


def _forge_contributions(run: RecordedRun, change: Callable[[Rows], Rows]) -> None:
    store = PolicyStore(run.store)
    with Tamper(run) as log:
        row, fact = log.facts(StepCommitted)[STEP]
        rows = change(read_contributions(store.blob("contributions", fact.contributions.sha256)))
        blob = store.publish_blob("contributions", lambda path: write_contributions(path, rows))
        log.rewrite(row, msgspec.structs.replace(fact, contributions=blob))
        log.mend()


@pytest.mark.parametrize(
    ("column", "value"),
    [("advantage", 0.25), ("staleness", 7), ("reward", 0.5), ("tokens", 1), ("group", "g")],
)
def test_row_that_does_not_follow_from_the_log_is_named(
    copy: RecordedRun, column: str, value: object
) -> None:
    names: list[str] = []

    def change(rows: Rows) -> Rows:
        names.append(rows[3]["trajectory"])
        rows[3][column] = value
        return rows

    _forge_contributions(copy, change)
    (violation,) = audited(copy).violations
    assert violation.subject == names[0]
    assert violation.message.startswith(f"{column} in the contributions of step {STEP}")
    assert violation.found == str(value)


@pytest.mark.parametrize(
    "change", [lambda rows: rows[1:], lambda rows: rows[::-1]], ids=["one missing", "other order"]
)
def test_rows_are_those_of_the_batch_in_its_order(
    copy: RecordedRun, change: Callable[[Rows], Rows]
) -> None:
    _forge_contributions(copy, change)
    (violation,) = audited(copy).violations
    assert violation.line.startswith(
        f"policies contributions of step {STEP}: its rows are not the trajectories of the batch"
    )


def test_file_that_is_no_arrow_file_is_named(copy: RecordedRun) -> None:
    store = PolicyStore(copy.store)
    with Tamper(copy) as log:
        row, fact = log.facts(StepCommitted)[STEP]
        blob = store.publish_blob("contributions", lambda path: _write(path, b"nonsense"))
        log.rewrite(row, msgspec.structs.replace(fact, contributions=blob))
        log.mend()
    (violation,) = audited(copy).violations
    assert violation.subject == f"contributions of step {STEP}"
    assert violation.message.startswith("cannot be read")


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("folder", ["weights", "contributions", "optimizer"])
def test_missing_file_is_named(copy: RecordedRun, folder: str) -> None:
    with Tamper(copy) as log:
        fact = next(entry for _, entry in log.facts(StepCommitted) if entry.checkpoint is not None)
    assert fact.checkpoint is not None
    contributed = fact.contributions.sha256
    name, subject = {
        "weights": (f"{fact.digest_after}.safetensors", f"version {fact.step + 1}"),
        "contributions": (f"{contributed}.arrow", f"contributions of step {fact.step}"),
        "optimizer": (f"{fact.checkpoint.sha256}.safetensors", f"checkpoint of step {fact.step}"),
    }[folder]
    (copy.store / folder / name).unlink()
    (violation,) = audited(copy).violations
    assert (violation.check, violation.subject) == ("policies", subject)


def test_changed_model_config_is_named(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        (_, started) = log.facts(RunStarted)[0]
    (copy.store / "assets" / started.assets_digest / "config.json").write_text("{}")
    (violation,) = audited(copy).violations
    assert violation.subject == "assets"


def test_missing_store_is_one_violation(copy: RecordedRun) -> None:
    copy.store.rename(copy.directory / "elsewhere")
    (violation,) = audited(copy).violations
    assert violation.message == "there is no policy store"


def test_orphans_are_nobodys_business(copy: RecordedRun) -> None:
    (copy.store / "weights" / ("0" * 64 + ".safetensors")).write_bytes(
        b"of a commit that never came"
    )
    assert audited(copy).violations == ()


def test_adopted_weights_are_reported_as_a_break_and_break_nothing(copy: RecordedRun) -> None:
    adopted = WeightsAdopted(
        at_ns=0,
        step=3,
        incarnation=1,
        digest_committed="a" * 64,
        digest_replayed="b" * 64,
        reason="tensor weights differs (other torch)",
    )
    with Tamper(copy) as log:
        last = log.rows("control")[-1]
        location = {**_plain(last), "offset": last.offset + 2, "key": b"trainer"}
        log.put(Row(**{**location, "value": encode(adopted)}))
    bus = copy.open()
    try:
        report = audit(bus, copy.topics, copy.store)
    finally:
        bus.close()
    assert report.holds
    assert report.adopted == (3,)
    assert any("step 3: its weights were adopted" in note for note in report.notes)


def _plain(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}
