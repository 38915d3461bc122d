"""`why` as a user calls it: of a run that is over, that stands still, that was stopped."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import dump_toml
from dora_pipe.observe.why import ADVICE, SILENT
from tests.support.cluster import TICK_NS, Cluster, make_config
from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun

SECOND_TICKS = 1_000_000_000 // TICK_NS


def test_run_that_is_over_is_summed_up(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("why", str(recorded.directory))
    assert code == 0, err
    assert out.startswith(f"recorded finished: {STEPS} steps in ")
    for role in ("trainer", "orchestrator", "w0", "w1", "w2"):
        assert re.search(rf"^{role} +[0-9.]+ m?s? .* [0-9]+%", out, re.MULTILINE), role
    assert "requests" in out and ADVICE["requests"] in out
    assert "Longest batch waits" in out


def test_summary_as_json_has_the_same_figures(call: Call, recorded: RecordedRun) -> None:
    code, out, _ = call("why", str(recorded.directory), "--summary", "--json")
    result = json.loads(out)
    assert (code, result["run"], result["steps"], result["over"]) == (0, "recorded", STEPS, True)
    trainer = result["roles"][0]
    assert trainer["role"] == "trainer"
    assert trainer["waited_s"] == pytest.approx(sum(seconds for *_, seconds in trainer["waits"]))


def test_step_is_explained_by_the_moment_before_it(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("why", str(recorded.directory), "--step", "0")
    assert code == 0, err
    first, second, _, columns, *_ = out.splitlines()
    assert first.startswith("step 0: the trainer waited ") and "last trajectory g0000000" in first
    assert second.startswith(f"recorded: step 0 of {STEPS} is next, ")
    assert columns.split("  ")[0] == "role" and columns.rstrip().endswith("action")
    assert re.search(r"^trainer +waiting for batch of step 0", out, re.MULTILINE)
    _, out, _ = call("why", str(recorded.directory), "--step", "0", "--json")
    result = json.loads(out)
    assert result["waits_of_step"]["step"] == 0
    assert result["roles"][0]["chain"]


@pytest.mark.parametrize("form", ["seconds", "iso"])
def test_moment_is_seconds_after_the_start_or_a_date(
    call: Call, recorded: RecordedRun, form: str
) -> None:
    _, out, _ = call("why", str(recorded.directory), "--step", "0", "--json")
    moment: Any = json.loads(out)
    # 10**18 ns is 2001-09-09T01:46:40Z: the virtual clock of these runs starts there.
    position = str(moment["run_s"]) if form == "seconds" else "2001-09-09T01:46:40.100+00:00"
    code, out, err = call("why", str(recorded.directory), "--at", position)
    assert code == 0, err
    assert out.startswith(f"recorded: step 0 of {STEPS} ")


def test_what_cannot_be_asked_is_one_line(call: Call, recorded: RecordedRun) -> None:
    run = str(recorded.directory)
    for words, text in (
        (("--at", "yesterday"), "not a point in time: 'yesterday'"),
        (("--step", "99"), "the batch of step 99 has not been taken"),
        (("--step", "1", "--summary"), "exclude each other"),
    ):
        code, out, err = call("why", run, *words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and text in err


def test_run_that_stands_still_is_told_live_and_a_stopped_one_as_it_was(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(run__name="live", timing__lease_s=30.0)
    directory = tmp_path / "live"
    with Cluster(directory, config) as cluster:
        (directory / "config.toml").write_text(dump_toml(config))
        monkeypatch.setattr(time, "time_ns", cluster.clock.wall_ns)
        cluster.until(lambda: cluster.version >= 2)
        cluster.kill("trainer")
        cluster.ticks(5 * SECOND_TICKS)
        code, out, err = call("why", str(directory))
        assert code == 0, err
        assert re.search(r"^trainer +silent.* 5\.[0-9] s", out, re.MULTILINE)
        assert re.search(r"^orchestrator +waiting for the trainer: step ", out, re.MULTILINE)
        assert SILENT in out
        said_ns = cluster.clock.wall_ns()
    monkeypatch.setattr(time, "time_ns", lambda: said_ns + 7_200 * 10**9)
    code, out, err = call("why", str(directory))
    assert code == 0
    assert err.startswith("no role of live sent a status for 7,200 s: the run stopped or died")
    assert re.search(r"^orchestrator +waiting for the trainer: step ", out, re.MULTILINE)
    assert not re.search(r"^orchestrator +silent", out, re.MULTILINE)
