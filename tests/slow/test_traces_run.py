"""A real run that sends its traces while it lives: processes, workers, trainer, endpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.traces.span import Span
from tests.support.otlp_endpoint import OtlpEndpoint
from tests.support.traces import check_traces, traces_of
from tests.support.user_run import assert_clean, call, furnish, start, steps, until

pytestmark = pytest.mark.slow


def _rebuilt(path: Path) -> list[Span]:
    with opened(str(path / "runs" / "tiny")) as run:
        assert check_traces(run.bus, run.topics) == 3 * 2 * 4
        return traces_of(run.bus, run.topics)


def test_live_traces_are_those_that_are_rebuilt(tmp_path: Path) -> None:
    directory = furnish(tmp_path)
    with OtlpEndpoint() as endpoint:
        expected = ("-o", f"telemetry.traces={endpoint.address}")
        assert call(directory, "run", "config.toml", *expected) == 0
        live = endpoint.spans
    assert_clean(directory, "tiny")
    replies = [(span.trace_id, span.span_id, span.start_ns, span.end_ns) for span in live]
    assert replies == [
        (span.trace_id, span.span_id, span.start_ns, span.end_ns) for span in _rebuilt(directory)
    ]


def test_run_goes_on_without_an_endpoint_and_without_its_follower(tmp_path: Path) -> None:
    directory = furnish(tmp_path)
    expected = ("telemetry.traces=http://127.0.0.1:9", "timing.max_restarts=0")
    words = [word for override in expected for word in ("-o", override)]
    run = start(directory, "run", "config.toml", *words)
    path = directory / "said"
    pids = directory / "runs" / "tiny" / "logs" / "traces.log"
    until(pids.exists)
    os.kill(_follower(run.pid), signal.SIGKILL)
    assert run.wait(120) == 0
    assert "traces was killed (SIGKILL); the run continues without it" in path.read_text()
    assert steps(directory, "tiny") == [0, 1, 2]
    assert len(_rebuilt(directory)) > 0


def _follower(supervisor: int) -> int:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == supervisor:
            continue
        try:
            if (entry / "fd" / "1").readlink().match("logs/traces.log"):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("nobody follows the run")
