"""Tests of the console's knowledge of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.pure.records import Append
from dora_pipe.observe.progress import RunProgress
from dora_pipe.observe.top import frame
from dora_pipe.schemas.control import RequestFailed, TakenGroup, WorkerLeft
from dora_pipe.schemas.rounds import EarlyStop, End, Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.stats_stage import Stage

TOPICS = Topics("r")


def test_workers_of_others_are_those_that_joined_and_have_not_left() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    writer = bus.writer()

    def say(record: Any) -> int:
        offset = writer.append([Append(topic=TOPICS.control, value=encode(record))])[0]
        round_ = Round(ordinal=0, incarnation=0, now_ns=0, control_next=offset + 1)
        writer.append([Append(topic=TOPICS.decisions, value=encode(round_))])
        return offset

    incarnations = {name: say(records.joined(name)) for name in ("w0", "far", "near")}
    ready = records.ready("w0", incarnations["w0"], 0)
    say(ready)
    say(ready)
    progress = RunProgress(bus, TOPICS)
    progress.lines()
    assert progress.elsewhere(("w0",)) == 2
    assert (progress.served["w0"], progress.served["far"]) == (2, 0)
    again = say(records.joined("near"))
    say(
        WorkerLeft(
            at_ns=0, worker="near", incarnation=incarnations["near"], reason="late", progress={}
        )
    )
    say(
        WorkerLeft(
            at_ns=0, worker="far", incarnation=incarnations["far"], reason="no memory", progress={}
        )
    )
    assert "far left: no memory" in progress.lines()
    assert again > incarnations["near"] and progress.elsewhere(("w0",)) == 1
    progress.close()


def test_console_says_why_a_run_ends_early() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    stop = EarlyStop(evaluation="", best=3, reason="nothing was better than version 3")
    round_ = Round(ordinal=0, incarnation=0, now_ns=0, control_next=0, decisions=(stop,))
    bus.writer().append([Append(topic=TOPICS.decisions, value=encode(round_))])
    progress = RunProgress(bus, TOPICS)
    assert progress.lines() == ["run ends early: nothing was better than version 3"]
    progress.close()


INDEX = {"error": "IndexError: mine.py:7: list index out of range"}
LATE = {"error": "TimedOut: timed out after 10 s"}


def test_first_error_of_each_class_is_a_line_and_the_others_are_shares() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    progress = RunProgress(bus, TOPICS, logs=Path("runs/r/logs"))
    stage = Stage(stats=progress)
    incarnation = stage.worker()
    for ordinal, text in enumerate(({0: INDEX}, {1: INDEX}, {0: LATE}, {})):
        spec = stage.group(ordinal, incarnation)
        stage.logged(
            spec, incarnation, tuple(None if entry in text else 1.0 for entry in (0, 1)), text=text
        )
        stage.decide(End(group=spec.group, outcome="filtered", reason="all are equal"))
    unfit = "row 4 of train.jsonl: a prompt of 90 tokens does not fit a context of 64"
    spec = stage.group(4, incarnation)
    stage.fact(
        RequestFailed(
            at_ns=0,
            worker="w0",
            incarnation=incarnation,
            trajectory=f"{spec.group}-000",
            attempt=1,
            error="PromptUnfit",
            message=unfit,
            retryable=False,
        )
    )
    stage.decide(
        End(group=spec.group, outcome="failed", reason="1 of 2 trajectories are not valid")
    )
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=(), settings={}))
    stage.fact(records.committed(0, ()))
    lines = [line for line in progress.lines() if "joined" not in line]
    assert lines[:3] == [
        f"g0000000000-000 failed: {INDEX['error']}; traceback in runs/r/logs/w0.log",
        f"g0000000002-000 failed: {LATE['error']}; more in runs/r/logs/w0.log",
        f"g0000000004-000 failed: PromptUnfit: {unfit}; traceback in runs/r/logs/w0.log",
    ]
    assert lines[3].endswith("failed 44.4% (IndexError)")
    named = f"44.4% of 9 trajectories failed, most often {INDEX['error']} (g0000000001-001)"
    assert named in [line.text for line in frame(progress, 0).numbers.lines]
    progress.close()


def test_first_error_of_a_tool_is_a_line_though_its_trajectory_is_valid() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    progress = RunProgress(bus, TOPICS)
    stage = Stage(stats=progress)
    incarnation = stage.worker()
    raised = {"tool_error": "KeyError: tools.py:3: 'Oslo'"}
    stage.logged(stage.group(0, incarnation), incarnation, (1.0, 0.0), text={0: raised, 1: raised})
    assert [line for line in progress.lines() if "joined" not in line] == [
        "a tool of g0000000000-000 failed: KeyError: tools.py:3: 'Oslo'; traceback in the log of w0"
    ]
    progress.close()


def test_step_without_a_gradient_says_why_and_again_after_each_doubling() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    progress = RunProgress(bus, TOPICS, verbose=True)
    stage = Stage(stats=progress)
    incarnation = stage.worker()
    for step, updates in enumerate((0.0, 1.0, 0.0, 0.0)):
        spec = stage.group(step, incarnation)
        stage.log(spec, incarnation, 0.5, 0.5)
        taken = (TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()),)
        stage.decide(TakeBatch(reason="all", step=step, attempt=1, groups=taken, settings={}))
        fact = records.committed(step, taken)
        metrics = {"updates": updates, "truncated": 0.25, "entropy": 1.0}
        settings = {"trainer.learning_rate": 1e-5}
        stage.fact(msgspec.structs.replace(fact, metrics=metrics, settings=settings))
    received_lines = progress.lines()
    assert received_lines.count("           entropy 1  truncated 0.25  learning_rate 1e-05") == 4
    lines = [line for line in received_lines if line.startswith("step")]
    equal = "the rewards of each group were equal (0.5), so the weights are unchanged"
    assert [line.endswith("  no gradient") for line in lines] == [1, 0, 0, 1, 0, 1]
    assert lines[1] == f"step 0 had no gradient: {equal}"
    assert lines[4] == f"step 2 had no gradient: {equal} (2 of 3 steps had none)"
    assert progress.without_gradient == 3
    progress.close()


def test_a_resumed_run_says_where_it_goes_on_and_what_changed_and_no_earlier_line() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    writer = bus.writer()

    def say(*facts: Any) -> None:
        appends = [Append(topic=TOPICS.control, value=encode(fact)) for fact in facts]
        end = writer.append(appends)[-1] + 1
        round_ = Round(ordinal=0, incarnation=0, now_ns=0, control_next=end)
        writer.append([Append(topic=TOPICS.decisions, value=encode(round_))])

    rate = {"trainer.learning_rate": 0.5}
    say(records.run_started(records.make_config()), records.joined("w0"))
    say(records.command("set", **rate), records.joined("w1"))
    command = records.command("set", **rate | {"trainer.learning_rate": 0.25})
    (past,) = writer.append([Append(topic=TOPICS.control, value=encode(command))])
    first = RunProgress(bus, TOPICS)
    resumed = RunProgress(bus, TOPICS, logs=Path("elsewhere/r/logs"), past=past + 1)
    assert [line.partition(" ")[0] for line in first.lines()] == ["w0", "step", "w1"]
    assert resumed.lines() == []
    say(records.role_started("orchestrator", 1), records.joined("w2"))
    assert resumed.lines() == [
        "resumed at step 0; earlier steps: dora-pipe show elsewhere/r",
        "step 0: trainer.learning_rate 0.5 -> 0.25, set by tester",
        "w2 joined (test 0, 4 slots)",
    ]
    first.close()
    resumed.close()
