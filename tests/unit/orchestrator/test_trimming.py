"""Tests of trimming old statuses in bounded pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Config
from dora_pipe.core.errors import AccessRefused
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.orchestrator.process import trim_port
from dora_pipe.orchestrator.process.role import Instance, start_machine
from dora_pipe.orchestrator.process.trim_port import GRAIN, TrimPort, cut_of
from dora_pipe.orchestrator.trimming import (
    GUARD_NS_MIN,
    TRIM_EVERY_NS,
    MetricsTrimmed,
    TrimMetrics,
    TrimSchedule,
)
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


def ask(schedule: TrimSchedule, at_ns: int, ahead_ns: int = 0) -> list[TrimMetrics]:
    return schedule.ask(mono_ns=at_ns, wall_ns=at_ns + ahead_ns)


def read_to(offset: int) -> Record:
    return Record(topic=AT.topic, partition=AT.partition, offset=offset, key=b"", value=b"")


@pytest.mark.parametrize("others_ns", [0, -72 * HOUR, 72 * HOUR], ids=["right", "behind", "ahead"])
def test_the_cut_is_where_the_orchestrators_date_says_whatever_other_clocks_say(
    open_bus: Callable[[], Bus], others_ns: int
) -> None:
    with closing(open_bus()) as bus:
        offsets = fill(bus, 9000, clock_of_others_ns=others_ns)
        for expected in (2500, 6000):
            cut = cut_of(bus, AT, limit=bus.end(AT), before_ns=expected * EACH_NS)
            assert offsets[expected] - GRAIN <= cut <= offsets[expected]


def test_a_cut_never_passes_its_limit_although_all_is_old(open_bus: Callable[[], Bus]) -> None:
    with closing(open_bus()) as bus:
        offsets = fill(bus, 5000)
        cut = cut_of(bus, AT, limit=offsets[3000], before_ns=1 << 62)
        assert offsets[3000] - GRAIN <= cut <= offsets[3000]


def test_a_trim_deletes_what_is_old_and_says_when_more_is_left(
    open_bus: Callable[[], Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_bus()) as bus:
        offsets, end = fill(bus, 9000), bus.end(AT)
        pieces = isinstance(bus, SqliteBus)
    monkeypatch.setattr(trim_port, "PIECES_MAX", 3)
    pauses: list[float] = []
    port = TrimPort(open_bus, sleep=pauses.append, in_thread=False)
    effect = TrimMetrics(before_ns=7000 * EACH_NS, limits={AT: end})
    text, begins = [], []
    with closing(port):
        for _ in range(4 if pieces else 1):
            port.start(effect)
            (event,) = port.poll()
            text.append(event.more)
            with closing(open_bus()) as bus:
                begins.append(bus.begin(AT))
    assert begins == sorted(begins)
    assert offsets[7000] - GRAIN <= begins[-1] <= offsets[7000]
    assert text[-1] is False and (any(text) and pauses if pieces else not pauses)
    with closing(open_bus()) as bus:
        assert bus.end(AT) == end


def test_a_trim_that_is_refused_is_put_off_and_ends_nothing() -> None:
    def refused() -> Bus:
        raise AccessRefused("the Kafka cluster refuses: User:o lacks DELETE on topic r.metrics")

    with closing(TrimPort(refused, sleep=lambda _: None, in_thread=False)) as port:
        port.start(TrimMetrics(before_ns=0, limits={AT: 1}))
        assert port.poll() == [MetricsTrimmed(more=False)]


def test_what_was_read_within_the_guard_is_beyond_every_limit() -> None:
    schedule = TrimSchedule(keep_ns=HOUR, whole_ns=50 * S)
    asked: list[tuple[int, TrimMetrics]] = []
    for minute in range(6 * 60):
        schedule.note(read_to(minute))
        at_ns = minute * 60 * S
        ahead_ns = 365 * 24 * HOUR if minute > 200 else 0
        asked += [(minute, entry) for entry in ask(schedule, at_ns, ahead_ns)]
    assert len(asked) > 3
    for minute, entry in asked:
        assert entry.limits[AT] <= minute - GUARD_NS_MIN // (60 * S) + 1
    assert asked[0][1].before_ns == asked[0][0] * 60 * S - HOUR
    gaps = [later - minute for (minute, _), (later, _) in itertools.pairwise(asked)]
    assert set(gaps) == {TRIM_EVERY_NS // (60 * S)}


def test_statuses_that_are_kept_for_ever_are_never_asked_to_go() -> None:
    schedule = TrimSchedule(keep_ns=0, whole_ns=50 * S)
    schedule.note(read_to(5))
    assert not any(ask(schedule, hour * HOUR) for hour in range(1000))


@pytest.mark.parametrize("keep_ns", [HOUR, 0], ids=["an hour", "for ever"])
def test_an_orchestrator_trims_what_it_read_and_keeps_what_came_since(keep_ns: int) -> None:
    config, log, clock = records.make_config(), MemoryLog(), WorldClock()
    topics, bus = Topics(config.run.name), MemoryBus(log)
    bus.create([TopicSpec(name=name) for name in topics.all()])
    partition = TopicPartition(topics.metrics, 0)
    old = [
        msgspec.structs.replace(orchestrator_says(i), topic=partition.topic) for i in range(4000)
    ]
    offsets = bus.writer().append(old)
    runtime = runtime_of(bus, topics, config, clock, keep_ns)
    ends_ns = clock.ns + GUARD_NS_MIN + 60 * S
    while clock.ns < ends_ns:
        runtime.tick()
        clock.ns = max(clock.ns + S // 10, runtime.due_ns())
    runtime.close()
    kept = list(records_of(bus, {partition: bus.end(partition)}))
    later = [record for record in kept if record.offset > offsets[-1]]
    assert len(later) > 100, "it has gone on saying its own"
    if not keep_ns:
        assert bus.begin(partition) == 0 and len(kept) == len(old) + len(later)
        return
    assert offsets[-1] - GRAIN <= bus.begin(partition) <= offsets[-1] + 2
    assert later[0].offset <= offsets[-1] + 4, "none of its own is gone"


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
