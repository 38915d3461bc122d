"""Tests of a role that dies between the acknowledgement and the commit of its records.

Readers of a real broker stop before the open transaction.
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.consumers.trainer.role import run_trainer
from dora_pipe.core.errors import PolicyError
from dora_pipe.core.loop.run_lifecycle import await_stable_offset
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.orchestrator.process.role import Instance, run_orchestrator
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore
from tests.support import orchestrator_records as records
from tests.support.bus_harness import leave_open
from tests.support.bus_steps import PATIENCE_S
from tests.support.kafka_broker import KafkaBroker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

DELIVERY_LIMIT_S = 2.0
"""Of the role that dies: the broker ends what it left open 2 to 3 s after that."""


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
    bus = KafkaBus([kafka_broker.bootstrap], delivery_limit_s=DELIVERY_LIMIT_S)
    yield bus
    bus.close()


def append(bus: KafkaBus, topic: str, *events: msgspec.Struct) -> list[int]:
    with closing(bus.writer()) as writer:
        return writer.append([Append(topic=topic, value=encode(record)) for record in events])


def all_of(bus: KafkaBus, topic: str) -> list[bytes]:
    partition = TopicPartition(topic, 0)
    end, result = bus.end(partition), []
    until_s = time.monotonic() + PATIENCE_S
    with closing(bus.reader({partition: 0})) as reader:
        while reader.position(partition) < end:
            result += [record.value for record in reader.poll(timeout_s=0.1) if record.offset < end]
            assert time.monotonic() < until_s
    return result


def test_a_trainer_finds_the_commit_that_a_dead_orchestrator_hides(
    bus: KafkaBus, dying: KafkaBus, topics: Topics, tmp_path: Path
) -> None:
    config = records.make_config(run__name=topics.run, store__keep_every=0)
    append(bus, topics.control, records.run_started(config))
    orchestrator = dying.writer(exclusive=f"{topics.run}.orchestrator")
    started = Append(topic=topics.control, value=encode(records.role_started("orchestrator", 0)))
    leave_open(orchestrator, started)
    with closing(bus.writer(exclusive=f"{topics.run}.trainer")) as writer:
        hidden = [records.role_started("trainer", 0), records.committed(0, ())]
        writer.append([Append(topic=topics.control, value=encode(record)) for record in hidden])
    assert len(all_of(bus, topics.control)) == 1, "they are acknowledged, and not to be read"

    with pytest.raises(PolicyError, match="no config and tokenizer files"):
        run_trainer(
            lambda: KafkaBus(bus.servers), topics, store=PolicyStore(tmp_path), stop=lambda: False
        )
    # A commit is acknowledged before every partition has its marker.
    await_stable_offset(bus, [TopicPartition(topics.control, 0)], SystemClock())
    controls = [decode_control(value) for value in all_of(bus, topics.control)]
    assert [event.incarnation for event in controls if isinstance(event, RoleStarted)] == [0, 1]
    assert [event.step for event in controls if isinstance(event, StepCommitted)] == [0]


def test_an_orchestrator_finds_the_run_that_a_dead_trainer_hides(
    bus: KafkaBus, dying: KafkaBus, topics: Topics
) -> None:
    config = records.make_config(run__name=topics.run, store__keep_every=0)
    trainer = dying.writer(exclusive=f"{topics.run}.trainer")
    leave_open(trainer, Append(topic=topics.control, value=encode(records.committed(0, ()))))
    with closing(bus.writer(exclusive=f"{topics.run}.orchestrator")) as writer:
        hidden = [records.run_started(config), records.role_started("orchestrator", 0)]
        writer.append([Append(topic=topics.control, value=encode(record)) for record in hidden])
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
    controls = [decode_control(value) for value in all_of(bus, topics.control)]
    assert len([event for event in controls if isinstance(event, RunStarted)]) == 1
    assert [event.incarnation for event in controls if isinstance(event, RoleStarted)] == [0, 1]
