"""Tests of trimming old statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Config
from dora_pipe.core.errors import AccessRefused
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.orchestrator.machine import TRIM_EVERY_NS, TrimMetrics
from dora_pipe.orchestrator.process.role import Instance, start_machine
from dora_pipe.orchestrator.process.trim_port import TrimPort, cut_of
from dora_pipe.schemas.metrics import Cost, OrchestratorStatus, WorkerStatus
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_world import WorldClock

S = 10**9
HOUR = 3600 * S
AT = TopicPartition("r.metrics", 0)
COST = Cost(total_s=1.0, bus_s=0.1, control_s=0.2, codec_s=0.3, rss_bytes=4)
EACH_NS = 10 * S
"""Time between two records of `fill`."""


@pytest.fixture(params=["memory", "sqlite"])
def open_bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Bus]]:
    log = MemoryLog()
    opened: Callable[[], Bus] = (
        (lambda: MemoryBus(log))
        if request.param == "memory"
        else lambda: SqliteBus(tmp_path / "log.sqlite")
    )
    with closing(opened()) as bus:
        bus.create([TopicSpec(name=AT.topic)])
    yield opened


def orchestrator_says(at_ns: int) -> Append:
    status = OrchestratorStatus(
        at_ns=at_ns, cost=COST, incarnation=1, version=0, open_groups=0, queued_requests=0
    )
    return Append(topic=AT.topic, key=b"orchestrator", value=encode(status))


def worker_says(at_ns: int) -> Append:
    status = WorkerStatus(
        at_ns=at_ns,
        cost=COST,
        worker="w0",
        incarnation=1,
        version=0,
        active=0,
        waiting=0,
        kv_used_tokens=0,
        tokens_total=0,
        progress={},
    )
    return Append(topic=AT.topic, key=b"w0", value=encode(status))


def fill(bus: Bus, count: int, *, clock_of_others_ns: int = 0) -> list[int]:
    says = (orchestrator_says, lambda at_ns: worker_says(at_ns + clock_of_others_ns))
    records = [says[i % 2](i * EACH_NS) for i in range(count)]
    with closing(bus.writer()) as writer:
        return writer.append(records)


@pytest.mark.parametrize("others_ns", [0, -72 * HOUR, 72 * HOUR], ids=["right", "behind", "ahead"])
def test_the_cut_is_where_the_orchestrators_date_says_whatever_other_clocks_say(
    open_bus: Callable[[], Bus], others_ns: int
) -> None:
    with closing(open_bus()) as bus:
        offsets = fill(bus, 3000, clock_of_others_ns=others_ns)
        for expected in (0, 900, 2000):
            cut = cut_of(bus, AT, end=bus.end(AT), before_ns=expected * EACH_NS)
            assert cut == offsets[max(0, expected - 2)]


def test_a_trim_deletes_what_is_old_and_nothing_else(open_bus: Callable[[], Bus]) -> None:
    with closing(open_bus()) as bus:
        offsets, end = fill(bus, 3000), bus.end(AT)
        pieces = isinstance(bus, SqliteBus)
    pauses: list[float] = []
    effect = TrimMetrics(topic=AT.topic, before_ns=2500 * EACH_NS)
    with closing(TrimPort(open_bus, sleep=pauses.append, in_thread=False)) as port:
        port.start(effect)
        assert port.poll() == []
    assert len(pauses) > 1 if pieces else not pauses
    with closing(open_bus()) as bus:
        assert (bus.begin(AT), bus.end(AT)) == (offsets[2498], end)


def test_a_trim_that_is_refused_ends_nothing() -> None:
    def refused() -> Bus:
        raise AccessRefused("the Kafka cluster refuses: User:o lacks DELETE on topic r.metrics")

    with closing(TrimPort(refused, sleep=lambda _: None, in_thread=False)) as port:
        port.start(TrimMetrics(topic=AT.topic, before_ns=0))
        assert port.poll() == []


@pytest.mark.parametrize("keep_ns", [2 * HOUR, 0], ids=["two hours", "for ever"])
def test_an_orchestrator_trims_what_is_old_once_an_hour(keep_ns: int) -> None:
    config, log, clock = records.make_config(), MemoryLog(), WorldClock()
    topics, bus = Topics(config.run.name), MemoryBus(log)
    bus.create([TopicSpec(name=name) for name in topics.all()])
    partition = TopicPartition(topics.metrics, 0)
    old = [
        msgspec.structs.replace(orchestrator_says(i), topic=partition.topic) for i in range(4000)
    ]
    offsets = bus.writer().append(old)
    runtime = runtime_of(bus, topics, config, clock, keep_ns)
    began_ns = clock.ns
    while clock.ns < began_ns + TRIM_EVERY_NS - 60 * S:
        runtime.tick()
        clock.ns = max(clock.ns + S, runtime.due_ns())
    assert bus.begin(partition) == 0
    while clock.ns < began_ns + TRIM_EVERY_NS + 60 * S:
        runtime.tick()
        clock.ns = max(clock.ns + S, runtime.due_ns())
    runtime.close()
    assert bus.begin(partition) == (offsets[-1] if keep_ns else 0)


def runtime_of(
    bus: MemoryBus, topics: Topics, config: Config, clock: WorldClock, keep_ns: int
) -> Runtime[Any, Any]:
    writer, meter = bus.writer(exclusive="o"), Meter()
    machine = start_machine(
        bus=bus,
        writer=writer,
        topics=topics,
        timing=config.timing,
        clock=clock,
        instance=Instance(name="o", host="h", pid=1, package="0"),
        meter=meter,
        run_started=records.run_started(config),
        metrics_keep_ns=keep_ns,
    )
    return Runtime(
        machine,
        bus=bus,
        writer=writer,
        port=TrimPort(lambda: MemoryBus(bus.log), sleep=clock.sleep, in_thread=False),
        clock=clock,
        meter=meter,
        exclusive=True,
        status=bus.writer(),
    )
