"""What the console knows of workers: who is there, and who has hosted anything."""

from __future__ import annotations

from typing import Any

from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.observe.progress import RunProgress
from dora_pipe.schemas.control import WorkerLeft
from dora_pipe.schemas.rounds import EarlyStop, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records

TOPICS = Topics("r")


def test_workers_of_others_are_those_that_joined_and_have_not_left() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    writer = bus.writer()

    def say(record: Any) -> int:
        offset = writer.append([Append(topic=TOPICS.control, value=encode(record))])[0]
        round_ = Round(ordinal=0, role_epoch=0, now_ns=0, control_next=offset + 1)
        writer.append([Append(topic=TOPICS.decisions, value=encode(round_))])
        return offset

    epochs = {name: say(records.joined(name)) for name in ("w0", "far", "near")}
    ready = records.ready("w0", epochs["w0"], 0)
    say(ready)
    say(ready)
    progress = RunProgress(bus, TOPICS)
    progress.lines()
    assert progress.elsewhere(("w0",)) == 2
    assert (progress.hosted["w0"], progress.hosted["far"]) == (2, 0)
    again = say(records.joined("near"))
    say(WorkerLeft(at_ns=0, worker="near", epoch=epochs["near"], reason="late", progress={}))
    say(WorkerLeft(at_ns=0, worker="far", epoch=epochs["far"], reason="no memory", progress={}))
    assert "far left: no memory" in progress.lines()
    assert again > epochs["near"] and progress.elsewhere(("w0",)) == 1
    progress.close()


def test_console_says_why_a_run_ends_early() -> None:
    bus = MemoryBus(MemoryLog(), now_ms=lambda: 0)
    bus.create([TopicSpec(name=name, partitions=1) for name in TOPICS.all()])
    stop = EarlyStop(evaluation="", best=3, reason="nothing was better than version 3")
    round_ = Round(ordinal=0, role_epoch=0, now_ns=0, control_next=0, decisions=(stop,))
    bus.writer().append([Append(topic=TOPICS.decisions, value=encode(round_))])
    progress = RunProgress(bus, TOPICS)
    assert progress.lines() == ["the run ends early: nothing was better than version 3"]
    progress.close()
