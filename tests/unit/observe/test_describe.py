"""Tests of `show` for trajectories, groups and steps."""

from __future__ import annotations

import pytest

from dora_pipe.audit.ledger import Ledger
from dora_pipe.core.errors import UsageError
from dora_pipe.observe.describe import Description, describe
from dora_pipe.observe.web.view import Decode
from tests.support.ledgers import build_ledger
from tests.support.recorded_run import RecordedRun
from tests.support.ui_stage import source_of, view_of_log


def _tell(run: RecordedRun, expected: str, decode: Decode | None = None) -> Description:
    with source_of(run, decode=decode) as source, view_of_log(source) as view:
        return describe(view, source, expected)


def _ledger(run: RecordedRun) -> Ledger:
    bus = run.open()
    try:
        return build_ledger(bus, run.topics)
    finally:
        bus.close()


def test_trained_trajectory_is_told_from_dispatch_to_step(recorded: RecordedRun) -> None:
    description = _tell(recorded, "g0000000010-001")
    group = _ledger(recorded).accounts.groups["g0000000010"]
    assert description["group"]["version"].startswith(f"{group.spec.version} ({group.spec.digest}")
    assert description["outcome"] == {
        "outcome": "trained",
        "reason": f"batch of step {group.step}, attempt 1",
        "ended at s": description["outcome"]["ended at s"],
        "step": group.step,
        "staleness": group.step - group.spec.version if group.step is not None else None,
    }
    assert description["contribution"]["trajectory"] == "g0000000010-001"
    assert description["contribution"]["advantage"] is not None
    assert description["records"][0]["status"] == "bound"
    assert description["records"][0]["engine"] == "simulated 1"
    assert [row["kind"] for row in description["segments"]] == ["prompt", "model"]
    assert list(description)[:3] == ["trajectory", "group", "attempts"]


def test_lineage_goes_both_ways(recorded: RecordedRun) -> None:
    description = _tell(recorded, "g0000000010-001")
    version = int(description["group"]["version"].split()[0])
    step = description["outcome"]["step"]
    assert description["lineage"][f"made version {version}"].startswith(
        f"step {version - 1}, from "
    )
    assert "sampled from it" in description["lineage"][f"its step made version {step + 1}"]
    first = _tell(recorded, "g0000000000-000")
    assert first["lineage"]["made version 0"] == "the model the run started with"


def test_request_that_went_on_elsewhere_shows_every_attempt(recorded: RecordedRun) -> None:
    moved = next(
        entry
        for group in _ledger(recorded).accounts.groups.values()
        for entry in group.requests.values()
        if entry.attempts[-1].resumed
    )
    description = _tell(recorded, moved.trajectory)
    assert len(description["attempts"]) >= 2
    assert description["attempts"][-1]["resumed tokens"] > 0
    assert [row["kind"] for row in description["segments"]] == ["prompt", "model", "model"]
    assert len({row["worker"] for row in description["segments"][1:]}) == 2


def test_fenced_record_stands_beside_the_one_that_counts(recorded: RecordedRun) -> None:
    fenced = next(
        fact for fact in _ledger(recorded).accounts.logged.values() if fact.status == "fenced"
    )
    description = _tell(recorded, fenced.fact.trajectory)
    assert sorted(row["status"] for row in description["records"]) == ["bound", "fenced"]


def test_group_lists_its_samples(recorded: RecordedRun) -> None:
    description = _tell(recorded, "g0000000010")
    assert [row["trajectory"] for row in description["samples"]] == [
        f"g0000000010-00{sample}" for sample in range(4)
    ]
    assert description["group"]["deadline"].startswith("step ")


def test_evaluation_group_has_no_deadline_and_no_step(recorded: RecordedRun) -> None:
    description = _tell(recorded, "e0000000001")
    assert description["group"]["deadline"] == "none"
    assert description["outcome"]["outcome"] == "evaluated"
    assert "step" not in description["outcome"]
    assert _tell(recorded, "e0000000001-000")["contribution"] == {"none": "it was not trained"}


@pytest.mark.parametrize("name", ["6", "step 6", "step-6"])
def test_step_lists_its_batch_and_settings(recorded: RecordedRun, name: str) -> None:
    description = _tell(recorded, name)
    assert description["step"]["step"] == 6
    assert len(description["groups"]) == 4
    assert len(description["trajectories"]) == 16
    assert description["settings"]["trainer.learning_rate"] > 0
    assert description["weights"]["after"].startswith("version 7 ")


def test_texts_are_decoded_where_there_is_a_tokenizer(recorded: RecordedRun) -> None:
    plain = _tell(recorded, "g0000000010-001")["segments"][0]["text"]
    words = _tell(
        recorded, "g0000000010-001", lambda ids: "".join(chr(65 + token_id) for token_id in ids)
    )["segments"][0]["text"]
    assert plain == "5 6 7"
    assert words == "FGH"


@pytest.mark.parametrize("name", ["g0000009999", "g0000000010-077", "99", "nonsense", ""])
def test_unknown_id_is_refused_with_examples(recorded: RecordedRun, name: str) -> None:
    with pytest.raises(UsageError) as refused:
        _tell(recorded, name)
    assert refused.value.hint is not None
