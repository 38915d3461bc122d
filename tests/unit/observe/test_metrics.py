"""Tests of Prometheus metrics: names, format, counts."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.metrics import Blocker, FailingServer, Wait
from tests.support.metrics import values_of
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.reference_pages import PAGES, page
from tests.support.stats_stage import Stage, stats_of
from tests.support.tidy import ROOT

GOLDEN = ROOT / "tests" / "golden" / "metrics.txt"


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_equals_its_generator(name: str) -> None:
    text, generated = page(name)
    assert text == generated, "run: python -m tests.support.reference_pages"


def test_names_are_told_apart_and_end_as_prometheus_has_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert "run" not in metric.labels and "le" not in metric.labels
        assert metric.meaning.endswith("."), metric.name


def test_samples_of_a_whole_run_are_those_of_the_golden_file(recorded: RecordedRun) -> None:
    with closing(recorded.open()) as bus:
        values = values_of(stats_of(bus, recorded.topics))
    assert values["dora_pipe_run_finished"] == 1
    assert values["dora_pipe_steps_total"] == values["dora_pipe_step_seconds_count"] == STEPS
    fulls = {metric.full for metric in METRICS}
    for name in values:
        plain = re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0])
        assert plain in fulls, name
    names = {name.partition("{")[0] for name in values}
    assert sorted(names) == GOLDEN.read_text().splitlines()


def test_run_that_has_not_started_has_metrics_too() -> None:
    values = values_of(RunStats("demo"))
    assert values["dora_pipe_policy_version"] == 0
    assert not any(name.startswith("dora_pipe_run_info") for name in values)


def test_blockers_without_a_bound_are_no_labels() -> None:
    stage = Stage()
    since_ns = stage.now_ns - 2_000_000_000
    for blocker, label in ((("group", "g01"), "group"), (("worker", "w1"), "worker w1")):
        blockers = (Blocker(*blocker),)
        stage.trainer(
            Wait(
                name="batch",
                description="batch",
                since_ns=since_ns,
                blocking=True,
                blockers=blockers,
            )
        )
        labels = f'blocker="{label}",role="trainer",wait="batch"'
        assert values_of(stage.stats)[f"dora_pipe_role_wait_seconds{{{labels}}}"] == 2


def test_places_where_a_task_fails_have_samples_until_they_work() -> None:
    stage = Stage()
    incarnation = stage.worker()
    url = "tcp://games-1:7000"
    there = FailingServer(
        task="games", url=url, failures=3, tries=2, since_ns=1, suspended=True, reason="gone"
    )
    here = FailingServer(task="shell", failures=1, since_ns=1, reason="8 calls in a row failed")
    stage.status("w0", incarnation, failing=(there, here))
    values = values_of(stage.stats)
    for name, value in (("failures", 3), ("attempts", 2), ("suspended", 1)):
        sample = f'dora_pipe_task_server_{name}{{server="{url}",task="games",worker="w0"}}'
        assert values[sample] == value
    sample = 'dora_pipe_task_server_suspended{server="here",task="shell",worker="w0"}'
    assert values[sample] == 0
    stage.status("w0", incarnation)
    assert not any("task_server" in name for name in values_of(stage.stats))


def test_sessions_are_told_by_those_whose_agents_think_and_by_open_calls() -> None:
    stage = Stage()
    incarnation = stage.worker()
    since = {"call_since_ns": stage.now_ns - 12_000_000_000}
    stage.status("w0", incarnation, with_agent=9, calls_open=3, **since)
    values = values_of(stage.stats)
    assert values['dora_pipe_requests_off_engine{state="agent",worker="w0"}'] == 9
    assert values['dora_pipe_worker_open_calls{worker="w0"}'] == 3
    assert values['dora_pipe_worker_oldest_call_seconds{worker="w0"}'] == 12
