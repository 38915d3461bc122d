"""What Prometheus reads: the format, by its own tool where that is there, and the docs page."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import closing

import pytest

from dora_pipe.observe.metrics.exposition import counter, exposition, gauge, histogram
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import Histogram, RunStats
from dora_pipe.schemas.metrics import FailingPlace
from tests.support.metrics_page import page
from tests.support.orchestrator_records import RUN
from tests.support.recorded_run import RecordedRun
from tests.support.stats_stage import Stage, stats_of
from tests.support.tidy import ROOT


def test_docs_page_says_what_the_code_says() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text() == page().rstrip("\n") + "\n"


def test_names_are_told_apart_and_end_as_prometheus_has_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert "run" not in metric.labels and "le" not in metric.labels
        assert metric.meaning.endswith("."), metric.name


def test_values_and_labels_are_written_so_that_they_can_be_read_again() -> None:
    stats = RunStats("demo")
    told = Histogram((1.0,))
    told.add(0.25)
    lines = exposition(
        [
            gauge("one{name}", "Is\nso.", "x", lambda _: {'a "b"\\\n': 1.5}),
            counter("two_total", "Grows.", "x", lambda _: 2**40),
            histogram("three", "Often.", "x", lambda _: told),
            gauge("four", "Unknown.", "x", lambda _: None),
        ],
        stats,
    ).splitlines()
    assert lines == [
        "# HELP dora_pipe_one Is\\nso.",
        "# TYPE dora_pipe_one gauge",
        'dora_pipe_one{run="demo",name="a \\"b\\"\\\\\\n"} 1.5',
        "# HELP dora_pipe_two_total Grows.",
        "# TYPE dora_pipe_two_total counter",
        'dora_pipe_two_total{run="demo"} 1099511627776',
        "# HELP dora_pipe_three Often.",
        "# TYPE dora_pipe_three histogram",
        'dora_pipe_three_bucket{run="demo",le="1"} 1',
        'dora_pipe_three_bucket{run="demo",le="+Inf"} 1',
        'dora_pipe_three_sum{run="demo"} 0.25',
        'dora_pipe_three_count{run="demo"} 1',
    ]


def test_run_that_has_not_started_has_metrics_too() -> None:
    text = exposition(METRICS, RunStats("demo"))
    assert 'dora_pipe_policy_version{run="demo"} 0\n' in text
    assert "run_info" not in text


def test_blockers_without_a_bound_are_no_labels() -> None:
    from dora_pipe.schemas.metrics import Blocker, Wait

    stage = Stage()
    wait = Wait(name="batch", words="batch", since_ns=stage.now_ns - 2_000_000_000, still=True)
    for blocker, label in ((("group", "g01"), "group"), (("worker", "w1"), "worker w1")):
        stage.trainer(
            Wait(
                name=wait.name,
                words=wait.words,
                since_ns=wait.since_ns,
                still=True,
                blockers=(Blocker(*blocker),),
            )
        )
        text = exposition(METRICS, stage.stats)
        labels = f'role="trainer",wait="batch",blocker="{label}"'
        assert f'dora_pipe_role_wait_seconds{{run="tiny",{labels}}} 2\n' in text


def test_prometheus_own_tool_finds_nothing_wrong_with_metrics_of_a_whole_run(
    recorded: RecordedRun,
) -> None:
    with closing(recorded.open()) as bus:
        text = exposition(METRICS, stats_of(bus, recorded.topics))
    assert f'dora_pipe_run_over{{run="{recorded.run}"}} 1' in text
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_places_where_a_task_fails_have_samples_until_they_work() -> None:
    stage = Stage()
    epoch = stage.worker()
    url = "tcp://games-1:7000"
    there = FailingPlace(
        task="games", url=url, failures=3, tries=2, since_ns=1, left_alone=True, why="gone"
    )
    here = FailingPlace(task="shell", failures=1, since_ns=1, why="8 calls in a row failed")
    stage.status("w0", epoch, failing=(there, here))
    text = exposition(METRICS, stage.stats)
    labels = f'{{run="{RUN}",worker="w0",task="games",place="{url}"}}'
    for name, value in (("failures", 3), ("tries", 2), ("left_alone", 1)):
        assert f"dora_pipe_task_place_{name}{labels} {value}\n" in text
    here_labels = f'{{run="{RUN}",worker="w0",task="shell",place="here"}}'
    assert f"dora_pipe_task_place_left_alone{here_labels} 0\n" in text
    stage.status("w0", epoch)
    assert "task_place_failures{" not in exposition(METRICS, stage.stats)


def test_sessions_are_told_by_those_whose_agents_think_and_by_open_calls() -> None:
    stage = Stage()
    epoch = stage.worker()
    since = {"call_since_ns": stage.now_ns - 12_000_000_000}
    stage.status("w0", epoch, with_agent=9, calls_open=3, **since)
    text = exposition(METRICS, stage.stats)
    assert f'worker_requests{{run="{RUN}",worker="w0",state="agent"}} 9' in text
    assert f'worker_calls_open{{run="{RUN}",worker="w0"}} 3' in text
    assert f'worker_call_open_seconds{{run="{RUN}",worker="w0"}} 12' in text
