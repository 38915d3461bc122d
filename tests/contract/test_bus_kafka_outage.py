"""A real broker that dies and comes back: bounded waits, one error each, nothing lost."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.kafka_broker import KafkaBroker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

AT = TopicPartition("t", 0)
DELIVERY_LIMIT_S = 3.0
WAIT_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    with KafkaBroker(tmp_path) as broker:
        yield broker
    gc.collect()


@pytest.fixture
def bus(broker: KafkaBroker) -> Iterator[KafkaBus]:
    bus = KafkaBus([broker.bootstrap], delivery_limit_s=DELIVERY_LIMIT_S)
    bus.create([TopicSpec(name="t")])
    yield bus
    bus.close()


def texts(*given: str) -> list[Append]:
    return [Append(topic="t", value=text.encode()) for text in given]


def read_until(bus: KafkaBus, last: bytes) -> list[bytes]:
    reader = bus.reader({AT: 0})
    records: list[Record] = []
    deadline_s = time.monotonic() + WAIT_S
    while not records or records[-1].value != last:
        records += reader.poll(timeout_s=1)
        assert time.monotonic() < deadline_s
    return [record.value for record in records]


def test_a_killed_broker_comes_back_with_everything_acknowledged(
    broker: KafkaBroker, bus: KafkaBus
) -> None:
    writer, reader = bus.writer(), bus.reader({AT: 0})
    acknowledged = [f"{i}" for i in range(50)]
    for text in acknowledged:
        writer.append(texts(text))
    assert len(reader.poll(timeout_s=WAIT_S, records_max=1)) == 1
    broker.kill()
    with pytest.raises(BusError):
        writer.append(texts("lost or not"))
    broker.start()
    writer.append(texts("end"))
    results = [value.decode() for value in read_until(bus, b"end")]
    assert results[:50] == acknowledged
    rest: list[Record] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(rest) < len(results) - 1 and time.monotonic() < deadline_s:
        with suppress(BusError):  # it may take a moment to find its broker again
            rest += reader.poll(timeout_s=1)
    assert [record.value.decode() for record in rest] == results[1:], "the reader went on"


def test_no_broker_is_one_clear_error_in_bounded_time(broker: KafkaBroker, bus: KafkaBus) -> None:
    broker.kill()
    began_s = time.monotonic()
    with pytest.raises(BusError) as refused:
        KafkaBus([broker.bootstrap])
    assert "\n" not in refused.value.message
    assert broker.bootstrap in refused.value.message
    assert "bus.url" in (refused.value.hint or "")
    with pytest.raises(BusError):
        bus.end(AT)
    assert time.monotonic() - began_s < 2 * WAIT_S
