"""Tests of metric rows: deterministic, one per step and evaluation, documented."""

from __future__ import annotations

import fnmatch
import math
import re

import pytest

from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe import following
from dora_pipe.observe.trackers.steps import track
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.stats_stage import stats_of
from tests.support.tidy import ROOT
from tests.support.trackers import Kept, Row


class Clock(SystemClock):
    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def contributions(sha256: str) -> list[dict[str, float]]:
    assert len(sha256) == 64
    return [{"ratio_mean": 2.0, "staleness": 0}, {"ratio_mean": 1.0, "staleness": 1}]


@pytest.fixture(scope="module")
def rows(bus: SqliteBus, recorded: RecordedRun) -> list[Row]:
    kept = Kept()
    assert track(bus, recorded.topics, kept, contributions)
    assert (kept.rows, kept.before) == (len(kept.given), 0)
    assert [run.name for run in kept.runs] == [recorded.run]
    return kept.given


def _steps(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "train/loss" in row.metrics]


def test_every_step_has_a_row_with_what_the_log_says_of_it(
    rows: list[Row], bus: SqliteBus, recorded: RecordedRun
) -> None:
    stats, steps = stats_of(bus, recorded.topics), _steps(rows)
    assert [row.step for row in steps] == list(range(STEPS))
    for row, step in zip(steps, stats.steps, strict=True):
        assert row.at_ns == step.committed_ns
        assert row.metrics["reward/valid"] == step.reward
        for value, count in step.staleness:
            assert row.metrics[f"staleness/groups_{value}"] == count
        assert row.metrics["time/trainer_waited_s"] == step.waited_s
        assert row.metrics["staleness/bound"] == stats.bound
    assert stats.commit is not None
    newest = {name: steps[-1].metrics[f"train/{name}"] for name in stats.commit.metrics}
    assert newest == stats.commit.metrics


def test_raw_reward_counts_what_is_invalid_as_nothing(rows: list[Row]) -> None:
    invalid = [row for row in _steps(rows) if row.metrics["reward/invalid"]]
    assert len(invalid) > 0
    for row in invalid:
        valid, raw, share = (
            row.metrics[f"reward/{entry}"] for entry in ("valid", "raw", "invalid")
        )
        assert raw == pytest.approx(valid * (1 - share))
        assert row.metrics["reward/infrastructure"] == 0  # errors raised by the task are its own


def test_an_evaluation_has_a_row_at_its_version(
    rows: list[Row], bus: SqliteBus, recorded: RecordedRun
) -> None:
    results = {row.step: row.metrics for row in rows if "evaluation/reward" in row.metrics}
    stats = stats_of(bus, recorded.topics)
    (newest,) = stats.evaluated.values()
    reward = newest.reward
    assert results[newest.version] == {
        "evaluation/reward": reward,
        "evaluation/mean@1": reward,
        "evaluation/pass@1": newest.metrics["pass@1"],
        "evaluation/part/exact": reward,
    }
    assert len(results) > 1 and len(rows) == STEPS + len(results)


def test_ratios_come_from_the_contributions_and_are_left_out_without_them(
    rows: list[Row], bus: SqliteBus, recorded: RecordedRun
) -> None:
    bare = Kept()
    track(bus, recorded.topics, bare, lambda _: ())
    metrics = _steps(rows)[0].metrics
    assert metrics["ratio/effective_sample_ratio"] == pytest.approx(0.9)
    assert metrics["ratio/mismatch_staleness_0"] == pytest.approx(math.log(2))
    assert metrics["ratio/mismatch_staleness_1"] == 0
    for row, without in zip(rows, bare.given, strict=True):
        remaining = {
            name: metric for name, metric in row.metrics.items() if not name.startswith("ratio/")
        }
        assert without.metrics == remaining


@pytest.mark.parametrize("there", [1, 7, STEPS])
def test_rows_that_are_there_are_not_given_again_and_the_others_are_the_same(
    rows: list[Row], bus: SqliteBus, recorded: RecordedRun, there: int
) -> None:
    kept = Kept(there)
    assert track(bus, recorded.topics, kept, contributions, clock=Clock())
    assert kept.given == rows[there:]
    assert (kept.rows, kept.before) == (len(rows), there)


def test_every_name_has_its_line_on_the_page_and_every_line_is_met(rows: list[Row]) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text().partition("## Experiment trackers")[2]
    matches = dict(re.findall(r"^\| `([a-z_/*@]+)` \| (.+) \|$", page, re.M))
    names = {name for row in rows for name in row.metrics}
    exact = {name for name in matches if "*" not in name}  # no task of this run has a name
    at_once = {"time/early_s", "time/early_share"}
    simulated = {"train/entropy", "train/truncated"}  # its learner has no token metrics
    assert exact - names == at_once | simulated
    strangers = {n for n in names if not any(fnmatch.fnmatchcase(n, match) for match in matches)}
    assert strangers == set()


def test_a_log_that_is_away_is_waited_for_and_no_row_is_given_twice(
    rows: list[Row], bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, clock, kept = LogFollower.advance, Clock(), Kept()
    monkeypatch.setattr("dora_pipe.ledger.follower.RECORDS_MAX", 40)
    looks = 0

    def advance(follower: LogFollower) -> bool:
        nonlocal looks
        looks += 1
        if looks in (3, 4, 9):
            raise BusError("nobody answers")
        return real(follower)

    monkeypatch.setattr(LogFollower, "advance", advance)
    assert track(bus, recorded.topics, kept, lambda _: (), clock=clock)
    assert len(kept.runs) == 1
    assert [(row.step, row.at_ns) for row in kept.given] == [(row.step, row.at_ns) for row in rows]
    first = following.RETRY_FIRST_S
    assert clock.slept == [first, 2 * first, 4 * first]


def test_a_log_that_lost_what_was_read_ends_the_export(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advance(follower: LogFollower) -> bool:
        raise LogTruncated("gone")

    monkeypatch.setattr(LogFollower, "advance", advance)
    with pytest.raises(LogTruncated):
        track(bus, recorded.topics, Kept(), lambda _: (), clock=Clock())
