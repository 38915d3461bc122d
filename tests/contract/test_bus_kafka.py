"""Tests of Kafka behavior beyond the log contract."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import FRAME_ROOM_BYTES
from dora_pipe.bus.kafka import bus as kafka
from dora_pipe.bus.kafka import in_flight as in_flight_module
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.client import send
from dora_pipe.core.errors import BusError, Fenced, RecordRefused, RecordTooLarge
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support.bus_harness import KafkaHarness
from tests.support.bus_steps import PATIENCE_S, appends, catch_up, topic_on
from tests.support.kafka_broker import KafkaBroker, advertise

pytestmark = pytest.mark.kafka


@pytest.fixture
def harness(kafka_broker: KafkaBroker) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap)
    yield harness
    harness.close()


def test_a_writer_fenced_between_two_records_of_one_append_is_told_so(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("w")
    old = bus.writer(exclusive=name)
    bus.writer(exclusive=name)

    def send_slowly(producer: Any, record: Append) -> Any:
        sent = send(producer, record)
        time.sleep(0.3)  # by then the broker has refused the first one
        return sent

    monkeypatch.setattr(in_flight_module, "send", send_slowly)
    with pytest.raises(Fenced):
        old.append(appends(topic, "a", "b", "c"))


def test_plain_writers_leave_no_gaps_here_so_gaps_may_not_be_relied_on(
    harness: KafkaHarness,
) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer()
    assert [writer.append(appends(topic, "a"))[0] for _ in range(3)] == [0, 1, 2]


def test_what_a_dead_writer_left_open_hides_nothing_once_its_successor_is_there(
    harness: KafkaHarness,
) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("w")
    partition = TopicPartition(topic, 0)
    dead = bus.writer(exclusive=name)
    assert isinstance(dead, kafka.KafkaWriter) and dead._producer is not None
    dead._producer.begin_transaction()
    send(dead._producer, appends(topic, "open")[0]).get(10)
    bus.writer().append(appends(topic, "behind"))
    assert bus.end(partition) == 0, "readers stop before the open transaction"
    bus.writer(exclusive=name)
    reader = bus.reader({partition: 0})
    assert [record.value for record in catch_up(bus, reader, partition)] == [b"behind"]


def set_quota(bootstrap: str, bytes_per_s: float | None) -> None:
    request = AlterClientQuotasRequest
    op = request.EntryData.OpData(
        key="consumer_byte_rate", value=bytes_per_s or 0.0, remove=bytes_per_s is None
    )
    entity = request.EntryData.EntityData(entity_type="client-id", entity_name=None)
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin._manager.run(
            admin._send_request_to_controller,
            request(entries=[request.EntryData(entity=[entity], ops=[op])], validate_only=False),
            lambda answer: [kafka_errors.for_code(entry.error_code) for entry in answer.entries],
            True,
        )


def test_a_quota_holds_readers_back_is_named_and_is_no_outage(
    harness: KafkaHarness, kafka_broker: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    partition = TopicPartition(topic, 0)
    for _ in range(6):
        bus.writer().append([Append(topic=topic, value=b"x" * 60_000)])
    set_quota(kafka_broker.bootstrap, 20_000.0)
    try:
        reader, came, held = bus.reader({partition: 0}), 0, False
        until_s = time.monotonic() + PATIENCE_S
        while not held and time.monotonic() < until_s:
            came += len(reader.poll(timeout_s=0.2))
            held = reader.held_back() == [partition]
        for _ in range(3):
            came += len(reader.poll(timeout_s=1.0))  # an outage would be a BusError
    finally:
        set_quota(kafka_broker.bootstrap, None)
    assert held
    assert "consumer_byte_rate" in caplog.text
    while came < 6:
        came += len(reader.poll(timeout_s=1.0))


def test_a_refused_create_leaves_nothing_behind(harness: KafkaHarness) -> None:
    bus = harness.open()
    created, other = (TopicSpec(name=harness.topic(name)) for name in ("made", "other"))
    bus.create([replace(created, max_record_bytes=100_000)])
    before = bus.topics()
    for expected in (replace(created, max_record_bytes=200_000), replace(created, partitions=2)):
        with pytest.raises(BusError, match=f"topic {created.name} exists"):
            bus.create([other, expected])
        assert bus.topics() == before
    bus.create([other, made_as_small(created)])
    assert set(bus.topics()) == {*before, other.name}


def set_topic(bootstrap: str, topic: str, **settings: str) -> None:
    changed = {name.replace("_", "."): value for name, value in settings.items()}
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, changed)])


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_record_that_the_broker_refuses_as_too_large_is_named_and_its_writer_goes_on(
    harness: KafkaHarness, kafka_broker: KafkaBroker, exclusive: bool
) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    partition = TopicPartition(topic, 0)
    writer = bus.writer(exclusive=harness.topic("w") if exclusive else None)
    writer.append(appends(topic, "before"))
    set_topic(kafka_broker.bootstrap, topic, max_message_bytes="600000")
    with pytest.raises(RecordTooLarge) as refused:
        writer.append([*appends(topic, "with"), Append(topic=topic, value=b"x" * 700_000)])
    assert refused.value.message == (
        f"the Kafka broker refuses a record of 700000 bytes for topic {topic}, whose "
        "max.message.bytes is 600000"
    )
    assert refused.value.limit_bytes == 600_000 - FRAME_ROOM_BYTES
    writer.append(appends(topic, "after"))
    came = [record.value for record in catch_up(bus, bus.reader({partition: 0}), partition)]
    assert came == [b"before", b"after"] if exclusive else came[-1] == b"after"


def test_a_clock_that_is_hours_ahead_is_named_where_the_broker_refuses_its_time(
    harness: KafkaHarness, kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_ahead(producer: Any, record: Append) -> Any:
        ahead_ms = round((time.time() + 7200) * 1000)
        return producer.send(record.topic, value=record.value, timestamp_ms=ahead_ms)

    monkeypatch.setattr(in_flight_module, "send", send_ahead)
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer(exclusive=harness.topic("w"))
    writer.append(appends(topic, "stamped by the broker"))
    set_topic(kafka_broker.bootstrap, topic, message_timestamp_type="CreateTime")
    for values in (["a"], ["b", "c"]):
        with pytest.raises(
            RecordRefused, match=r"clock is 2\.0 h ahead of the broker's"
        ) as refused:
            writer.append(appends(topic, *values))
        assert "message.timestamp.type=LogAppendTime" in (refused.value.hint or "")


def test_a_topic_that_is_too_small_is_refused_with_the_size_that_it_needs(
    harness: KafkaHarness, kafka_broker: KafkaBroker
) -> None:
    bus = harness.open()
    spec = TopicSpec(name=harness.topic("small"), max_record_bytes=200_000)
    bus.create([made_as_small(spec)])
    with pytest.raises(BusError) as refused:
        bus.create([spec])
    match = re.search(r"max\.message\.bytes to (\d+)", refused.value.hint or "")
    assert match is not None
    change = ConfigResource(ConfigResourceType.TOPIC, spec.name, {"max.message.bytes": match[1]})
    with closing(KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap)) as admin:
        admin.alter_configs([change])
    harness.open().create([spec])


@pytest.mark.slow
def test_a_listener_that_sends_its_clients_to_an_unknown_host_is_told_so(tmp_path: Path) -> None:
    broker = KafkaBroker(tmp_path, listeners={"LOST": "PLAINTEXT"})
    advertise(broker, "LOST", "no-such-host.invalid:9092")
    with broker:
        with pytest.raises(BusError, match=r"sends clients to no-such-host\.invalid:9092"):
            KafkaBus([broker.address("LOST")])
        KafkaBus([broker.bootstrap]).close()


def made_as_small(spec: TopicSpec) -> TopicSpec:
    return replace(spec, max_record_bytes=100_000)
