"""A role dies between the acknowledgement of its records and their commit, and stays dead.

On a real broker readers stop before what it left open. That costs nobody else anything.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.kafka.bus import KafkaBus, KafkaWriter
from dora_pipe.bus.kafka.client import bounded
from dora_pipe.bus.port import Append, TopicPartition, TopicSpec, Writer
from dora_pipe.consumers.trainer.role import run_trainer
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import PolicyError
from dora_pipe.core.run_lifecycle import await_stable_offset
from dora_pipe.core.runtime import Meter, Now, Outputs, Publish, Runtime
from dora_pipe.core.status_schedule import BackgroundWriter
from dora_pipe.orchestrator.role import Instance, run_orchestrator
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.metrics import Cost, OrchestratorStatus, WorkerStatus, decode_metrics
from dora_pipe.schemas.rounds import LeaseExpired, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore
from tests.support import orchestrator_records as records
from tests.support.bus_harness import leave_open
from tests.support.bus_steps import PATIENCE_S
from tests.support.kafka_broker import KafkaBroker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.alone("leases of two seconds run out, or must not"),
]

HEARTBEAT_S = 0.2
LEASE_S = 2.0
DELIVERY_LIMIT_S = 2.0
"""Of the role that dies: the broker ends what it left open 2 to 3 s after that."""

COST = Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0)


class Died(BaseException):
    """What a process does that is killed in there: nothing any more."""


@pytest.fixture
def topics() -> Topics:
    return Topics(f"left-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def bus(kafka_broker: KafkaBroker, topics: Topics) -> Iterator[KafkaBus]:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    bus = KafkaBus([kafka_broker.bootstrap])
    bus.create([TopicSpec(name=name) for name in topics.all()])
    yield bus
    bus.close()
    gc.collect()


@pytest.fixture
def dying(kafka_broker: KafkaBroker) -> Iterator[KafkaBus]:
    """The bus of the role that dies; it is let go of only at the end."""
    bus = KafkaBus([kafka_broker.bootstrap], delivery_limit_s=DELIVERY_LIMIT_S)
    yield bus
    bus.close()


def append(bus: KafkaBus, topic: str, *found: msgspec.Struct) -> list[int]:
    with closing(bus.writer()) as writer:
        return writer.append([Append(topic=topic, value=encode(one)) for one in found])


def all_of(bus: KafkaBus, topic: str) -> list[bytes]:
    """Everything that may be read now."""
    at = TopicPartition(topic, 0)
    end, found = bus.end(at), []
    until_s = time.monotonic() + PATIENCE_S
    with closing(bus.reader({at: 0})) as reader:
        while reader.position(at) < end:
            found += [one.value for one in reader.poll(timeout_s=0.1) if one.offset < end]
            assert time.monotonic() < until_s
    return found


def until(what: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.1)


# Leases


class Workers(threading.Thread):
    """Two workers that say every heartbeat that they live, through a plain writer."""

    def __init__(self, bus: KafkaBus, topics: Topics) -> None:
        super().__init__(daemon=True)
        self.quiet = threading.Event()
        self._writer, self._topics = bus.writer(), topics
        self._epochs = append(bus, topics.control, records.joined("w0"), records.joined("w1"))

    def run(self) -> None:
        while not self.quiet.wait(HEARTBEAT_S):
            self._writer.append(
                [
                    Append(topic=self._topics.metrics, value=encode(self._status(name, epoch)))
                    for name, epoch in zip(("w0", "w1"), self._epochs, strict=True)
                ]
            )

    def _status(self, name: str, epoch: int) -> WorkerStatus:
        return WorkerStatus(
            at_ns=0,
            cost=COST,
            worker=name,
            epoch=epoch,
            version=-1,
            active=0,
            waiting=0,
            kv_used_tokens=0,
            tokens_total=0,
            progress={},
        )


@dataclass
class Teller:
    """A machine that says one thing that must not be lost, and how it is."""

    topics: Topics
    said: bool = False
    finished: bool = False
    inputs: list[Any] = field(default_factory=list)

    def positions(self) -> Mapping[TopicPartition, int]:
        return {}

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs:
        fact = encode(records.role_started("trainer", 7))
        status = OrchestratorStatus(
            at_ns=0, cost=COST, role_epoch=0, version=0, open_groups=0, queued_requests=0
        )
        return Outputs(
            publish=[
                Publish(record=Append(topic=self.topics.control, value=fact)),
                Publish(record=Append(topic=self.topics.metrics, value=encode(status)), lossy=True),
            ]
        )

    def wake_at(self) -> int:
        return 0


def die_inside_an_append(
    bus: KafkaBus, topics: Topics, monkeypatch: pytest.MonkeyPatch, *, status: Writer | None
) -> None:
    """A trainer in production's loop, dead between the acknowledgements and the commit."""
    writer = bus.writer(exclusive=f"{topics.run}.trainer")
    assert isinstance(writer, KafkaWriter) and writer._producer is not None

    def die(commit: Callable[[], None], limit_s: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise Died
        bounded(commit, limit_s)  # the orchestrator's, beside it

    monkeypatch.setattr("dora_pipe.bus.kafka.bus.bounded", die)
    runtime = Runtime(
        Teller(topics),
        bus=bus,
        writer=writer,
        ports=[],
        clock=SystemClock(),
        meter=Meter(),
        exclusive=True,
        status=status,
    )
    with pytest.raises(Died):
        runtime.tick()
    monkeypatch.undo()


@pytest.fixture
def orchestrating(bus: KafkaBus, topics: Topics) -> Iterator[Workers]:
    """An orchestrator with a short lease, and two workers that it has heard."""
    config = records.make_config(
        run__name=topics.run, timing__heartbeat_s=HEARTBEAT_S, timing__lease_s=LEASE_S
    )
    stop = threading.Event()
    arguments = {
        "stop": stop.is_set,
        "timing": config.timing,
        "clock": SystemClock(),
        "instance": Instance(name="o", host="h", pid=1, package="0"),
        "run_started": records.run_started(config),
    }
    own = KafkaBus(bus.servers)
    thread = threading.Thread(target=run_orchestrator, args=(own, topics), kwargs=arguments)
    thread.start()
    until(lambda: all_of(bus, topics.decisions))
    workers = Workers(bus, topics)
    workers.start()
    until(lambda: b'"w1"' in b"".join(all_of(bus, topics.decisions)))
    yield workers
    stop.set()
    workers.quiet.set()
    thread.join(PATIENCE_S)
    workers.join(PATIENCE_S)
    own.close()


def fenced(bus: KafkaBus, topics: Topics) -> list[str]:
    """Workers whose lease was found to have ended."""
    return [
        observed.worker
        for value in all_of(bus, topics.decisions)
        for observed in decode_round(value).observations
        if isinstance(observed, LeaseExpired)
    ]


def waits_of(bus: KafkaBus, topics: Topics) -> set[str]:
    """Names of all waits that the orchestrator has told."""
    found = map(decode_metrics, all_of(bus, topics.metrics))
    return {wait.name for one in found if isinstance(one, OrchestratorStatus) for wait in one.waits}


def test_a_dead_trainer_fences_nobody_and_holds_back_no_heartbeat(
    bus: KafkaBus,
    dying: KafkaBus,
    topics: Topics,
    orchestrating: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = TopicPartition(topics.control, 0)
    dead = KafkaBus(bus.servers)  # with production's limits: it outlasts the test
    with closing(BackgroundWriter(dead.writer())) as status:
        die_inside_an_append(dead, topics, monkeypatch, status=status)
    assert bus.end(at) < bus.written_end(at), "control is held back"
    metrics = TopicPartition(topics.metrics, 0)
    for _ in range(3):
        time.sleep(LEASE_S)
        assert fenced(bus, topics) == []
        written = bus.written_end(metrics)
        assert bus.end(metrics) >= written, "metrics are not"
    assert "held-back" in waits_of(bus, topics)
    bus.writer(exclusive=f"{topics.run}.trainer").close()
    orchestrating.quiet.set()
    until(lambda: sorted(fenced(bus, topics)) == ["w0", "w1"])
    dead.close()


def test_leases_stand_still_while_the_metrics_themselves_are_held_back(
    bus: KafkaBus,
    dying: KafkaBus,
    topics: Topics,
    orchestrating: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a program of somebody else's, or by a trainer of before."""
    dead = KafkaBus(bus.servers)
    die_inside_an_append(dead, topics, monkeypatch, status=None)
    metrics = TopicPartition(topics.metrics, 0)
    assert bus.end(metrics) < bus.written_end(metrics)
    time.sleep(3 * LEASE_S)
    assert fenced(bus, topics) == []
    assert bus.end(metrics) < bus.written_end(metrics), "until here nobody was heard"
    bus.writer(exclusive=f"{topics.run}.trainer").close()
    time.sleep(LEASE_S / 2)
    assert fenced(bus, topics) == []
    assert "held-back" in waits_of(bus, topics)
    dead.close()


# Beginnings


def test_a_trainer_finds_the_commit_that_a_dead_orchestrator_hides(
    bus: KafkaBus, dying: KafkaBus, topics: Topics, tmp_path: Path
) -> None:
    config = records.make_config(run__name=topics.run)
    append(bus, topics.control, records.run_started(config))
    orchestrator = dying.writer(exclusive=f"{topics.run}.orchestrator")
    started = Append(topic=topics.control, value=encode(records.role_started("orchestrator", 0)))
    leave_open(orchestrator, started)
    with closing(bus.writer(exclusive=f"{topics.run}.trainer")) as writer:
        hidden = [records.role_started("trainer", 0), records.committed(0, ())]
        writer.append([Append(topic=topics.control, value=encode(one)) for one in hidden])
    assert len(all_of(bus, topics.control)) == 1, "they are acknowledged, and not to be read"

    with pytest.raises(PolicyError, match="no config and tokenizer files"):
        run_trainer(
            lambda: KafkaBus(bus.servers), topics, store=PolicyStore(tmp_path), stop=lambda: False
        )
    # A commit is acknowledged before every partition has its marker.
    await_stable_offset(bus, [TopicPartition(topics.control, 0)], SystemClock())
    found = [decode_control(value) for value in all_of(bus, topics.control)]
    assert [one.role_epoch for one in found if isinstance(one, RoleStarted)] == [0, 1]
    assert [one.step for one in found if isinstance(one, StepCommitted)] == [0]


def test_an_orchestrator_finds_the_run_that_a_dead_trainer_hides(
    bus: KafkaBus, dying: KafkaBus, topics: Topics
) -> None:
    config = records.make_config(run__name=topics.run)
    trainer = dying.writer(exclusive=f"{topics.run}.trainer")
    leave_open(trainer, Append(topic=topics.control, value=encode(records.committed(0, ()))))
    with closing(bus.writer(exclusive=f"{topics.run}.orchestrator")) as writer:
        hidden = [records.run_started(config), records.role_started("orchestrator", 0)]
        writer.append([Append(topic=topics.control, value=encode(one)) for one in hidden])
    assert all_of(bus, topics.control) == []
    run_orchestrator(
        bus,
        topics,
        stop=lambda: True,
        timing=config.timing,
        clock=SystemClock(),
        instance=Instance(name="o", host="h", pid=1, package="0"),
        run_started=records.run_started(config),
    )
    # A commit is acknowledged before every partition has its marker.
    await_stable_offset(bus, [TopicPartition(topics.control, 0)], SystemClock())
    found = [decode_control(value) for value in all_of(bus, topics.control)]
    assert len([one for one in found if isinstance(one, RunStarted)]) == 1
    assert [one.role_epoch for one in found if isinstance(one, RoleStarted)] == [0, 1]
