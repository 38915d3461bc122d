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


def _rebuilt(place: Path) -> list[Span]:
    with opened(str(place / "runs" / "tiny")) as run:
        assert check_traces(run.bus, run.topics) == 3 * 2 * 4
        return traces_of(run.bus, run.topics)


def test_live_traces_are_those_that_are_rebuilt(tmp_path: Path) -> None:
    place = furnish(tmp_path)
    with OtlpEndpoint() as endpoint:
        wanted = ("-o", f"telemetry.traces={endpoint.address}")
        assert call(place, "run", "config.toml", *wanted) == 0
        live = endpoint.spans
    assert_clean(place, "tiny")
    told = [(one.trace_id, one.span_id, one.start_ns, one.end_ns) for one in live]
    assert told == [
        (one.trace_id, one.span_id, one.start_ns, one.end_ns) for one in _rebuilt(place)
    ]


def test_run_goes_on_without_an_endpoint_and_without_its_follower(tmp_path: Path) -> None:
    """The follower is killed more often than it is started again; the run does not care."""
    place = furnish(tmp_path)
    wanted = ("telemetry.traces=http://127.0.0.1:9", "timing.max_restarts=0")
    words = [word for one in wanted for word in ("-o", one)]
    run = start(place, "run", "config.toml", *words)
    said = place / "said"
    pids = place / "runs" / "tiny" / "logs" / "traces.log"
    until(pids.exists)
    os.kill(_follower(run.pid), signal.SIGKILL)
    assert run.wait(120) == 0
    assert "traces was killed (SIGKILL); the run continues without it" in said.read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert len(_rebuilt(place)) > 0


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
