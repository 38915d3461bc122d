"""Tests of the lines of `top`."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.top import STOPPED_NS, Panel, Screen, frame
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.metrics import Blocker, FailingServer, Wait
from dora_pipe.schemas.rounds import StopRun, TakeBatch
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS, START_NS
from tests.support.stats_stage import Stage


def _texts(panel: Panel) -> list[str]:
    return [line.text for line in panel.lines]


def _shown(stage: Stage) -> Screen:
    return frame(stage.stats, stage.now_ns)


def test_run_that_has_not_started_has_a_frame() -> None:
    shown = frame(RunStats("demo"), SECOND_NS)
    assert shown.head == "demo: not started"
    assert _texts(shown.workers) == ["no worker has joined"]
    assert "reward -" in _texts(shown.numbers)


SINCE_NS = START_NS - 10 * SECOND_NS
PLACE = FailingServer(task="games", url="tcp://g:7", failures=3, since_ns=SINCE_NS, reason="gone")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ({"computed": 100, "reused": 300}, "0 tok/s kv 25% reused 75%"),
        (
            {"with_agent": 9, "calls_open": 3, "call_since_ns": SINCE_NS},
            "agents 9 calls 3 (11.0 s) 0 tok/s kv 25%",
        ),
        ({"failing": (PLACE,)}, "tcp://g:7 failing (11.0 s) 0 tok/s kv 25%"),
    ],
)
def test_line_of_a_worker_has_what_it_said_beside_its_requests(
    text: dict[str, Any], line: str
) -> None:
    stage = Stage()
    incarnation = stage.worker()
    stage.assign("w0", incarnation, 0)
    stage.status("w0", incarnation, active=2, **text)
    assert _texts(_shown(stage).workers)[1:] == [f"w0 v0  generating 2/4+0 {line}"]


def test_worker_that_is_silent_is_an_alarm_until_the_run_is_over() -> None:
    stage = Stage()
    incarnation = stage.worker()
    stage.status("w0", incarnation)
    stage.now_ns += 20 * SECOND_NS
    line = _shown(stage).workers.lines[-1]
    assert (line.text, line.style) == ("w0 v0  silent for 20.0 s", "alarm")
    stage.decide(StopRun(reason="done"))
    assert "silent" not in _shown(stage).workers.lines[-1].text


def test_wait_is_shown_with_the_worker_that_it_ends_at() -> None:
    stage = Stage()
    spec = stage.group(0, stage.worker())
    wait = Wait(
        name="batch",
        description="batch of step 0: no decision yet",
        since_ns=stage.now_ns - 2 * SECOND_NS,
        blocking=True,
        blockers=(Blocker("group", spec.group), Blocker("role", "orchestrator")),
        more=3,
    )
    stage.trainer(wait)
    line = _shown(stage).waits.lines[0]
    assert line.text == (
        "trainer: waiting for batch of step 0: 0 of 2 groups finished (2.0 s)"
        " <- w0: joined, no status yet (1.0 s)"
    )
    assert line.style == "busy"


def test_overdue_wait_says_that_it_is_an_alarm_without_colour() -> None:
    stage = Stage()
    stage.trainer(Wait(name="x", description="y", since_ns=stage.now_ns, overdue=True))
    line = _shown(stage).waits.lines[0]
    assert line.text.startswith("ALARM trainer: waiting")
    assert line.style == "alarm"


def test_step_is_shown_from_its_first_group_to_its_commit_with_an_estimate() -> None:
    stage = Stage()
    incarnation = stage.worker()
    specs = [stage.group(ordinal, incarnation) for ordinal in range(2)]
    stage.log(specs[0], incarnation, 1.0, 0.0)
    assert _texts(_shown(stage).numbers)[0] == "step 0: 1 of 2 groups finished"
    stage.log(specs[1], incarnation, 1.0, 1.0)
    taken = tuple(
        TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()) for spec in specs
    )
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=taken, settings={}))
    stage.now_ns += 2 * SECOND_NS
    assert _texts(_shown(stage).numbers)[0] == "step 0 trains 2.0 s"
    stage.fact(records.committed(0, taken))
    shown = _shown(stage)
    assert shown.done == 0.25
    assert shown.head == "tiny: step 1 of 4, 7.0 s since its start, about 21.0 s to go"
    assert _texts(shown.numbers)[1] == "staleness (bound 1) 0:100%"
    assert "reward 0.750 ▁" in _texts(shown.numbers)
    assert stage.stats.steps[0].line == (
        "step    0  reward 0.750  staleness 0:2                    11 tok/s   7.00 s"
    )


def test_staleness_beyond_the_bound_is_said_in_words() -> None:
    stage = Stage()
    taken = (TakenGroup(group="g", version=0, deadline=1, trajectories=()),)
    for step in (2,):
        stage.decide(TakeBatch(reason="all", step=step, attempt=1, groups=taken, settings={}))
        stage.fact(records.committed(step, taken))
    lines = {line.text: line.style for line in _shown(stage).numbers.lines}
    assert lines["staleness (bound 1) 2:100% over the bound"] == "alarm"
    assert stage.stats.over_bound == 1


def test_log_that_went_silent_is_shown_as_of_its_last_moment() -> None:
    stage = Stage()
    later = frame(stage.stats, stage.now_ns + STOPPED_NS + SECOND_NS)
    assert later.head == "tiny: step 0 of 4, 0.0 s since its start, no record since"
