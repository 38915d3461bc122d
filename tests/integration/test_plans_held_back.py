"""Tests of queries about a run on a log with held-back records."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import AppendFault, MemoryBus, MemoryLog
from dora_pipe.core.pure.records import Append
from dora_pipe.launch import plan as plans
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.bus_steps import ScriptedFaults

HIDDEN_MS = 300


def test_a_run_whose_first_records_a_dead_role_hides_is_found_by_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = records.make_config(bus__url="kafka://nobody:1")
    topics, log = Topics(config.run.name), MemoryLog()

    def now_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    late = ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=HIDDEN_MS)})
    writer = MemoryBus(log, faults=late, now_ms=now_ms)
    writer.create([TopicSpec(name=name) for name in topics.all()])
    first = encode(records.run_started(config))
    writer.writer().append([Append(topic=topics.control, value=first)])

    monkeypatch.setattr(RunDir, "open_bus", lambda *_: MemoryBus(log, now_ms=now_ms))
    plan = plans.plan_elsewhere(config, tmp_path)
    assert plan is not None
    assert encode(plan.first) == first
