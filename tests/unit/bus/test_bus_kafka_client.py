"""What kafka-python says and what we make of it, without any broker."""

from __future__ import annotations

import threading

import pytest
from kafka import errors as kafka_errors
from kafka.consumer.fetcher import ConsumerRecord

from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.kafka_client import (
    BATCH_ROOM_BYTES,
    bounded,
    fetched_bytes,
    our_errors,
    to_record,
    topic_settings,
)
from dora_pipe.bus.port import TopicPartition, TopicSpec
from dora_pipe.errors import (
    BusError,
    DoraError,
    Fenced,
    LogTruncated,
    OutcomeUnknown,
    TopicMissing,
)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (kafka_errors.ProducerFencedError(), Fenced),
        (kafka_errors.InvalidProducerEpochError(), Fenced),
        (kafka_errors.OffsetOutOfRangeError({}), LogTruncated),
        (kafka_errors.LogTruncationError({}), LogTruncated),
        (kafka_errors.UnknownTopicOrPartitionError(), TopicMissing),
        (kafka_errors.KafkaTimeoutError("slow"), BusError),
        (kafka_errors.KafkaConnectionError("gone"), BusError),
        (TimeoutError("slow"), BusError),
    ],
)
def test_each_error_of_the_client_has_one_meaning(theirs: Exception, ours: type[DoraError]) -> None:
    with pytest.raises(BusError) as raised, our_errors():
        raise theirs
    assert type(raised.value) is ours
    assert "\n" not in raised.value.message


def test_what_is_unspecific_in_a_commit_is_an_unknown_outcome_and_fencing_is_not() -> None:
    with pytest.raises(OutcomeUnknown), our_errors(OutcomeUnknown):
        raise kafka_errors.KafkaTimeoutError("slow")
    with pytest.raises(Fenced), our_errors(OutcomeUnknown):
        raise kafka_errors.ProducerFencedError


def client_record(
    value: bytes | None, headers: list[tuple[str, bytes | None]], key: bytes | None = b"k"
) -> ConsumerRecord:
    """A record as the client returns it; sizes of what is absent are -1 there."""
    header_bytes = sum(len(name) + len(each or b"") for name, each in headers) if headers else -1
    sizes = (len(each) if each is not None else -1 for each in (key, value))
    return ConsumerRecord("t", 1, 0, 7, 0, 0, key, value, headers, None, *sizes, header_bytes)


def test_what_is_absent_in_a_record_of_somebody_else_is_empty_here() -> None:
    ours = to_record(client_record(b"v", [("a", b"1"), ("b", b"")]))
    assert (ours.at, ours.offset, ours.key, ours.value) == (TopicPartition("t", 1), 7, b"k", b"v")
    assert ours.headers == (("a", b"1"), ("b", b""))
    theirs = to_record(client_record(None, [("a", b"1"), ("b", None)], key=None))
    assert (theirs.key, theirs.value, theirs.headers) == (b"", b"", (("a", b"1"), ("b", b"")))


@pytest.mark.parametrize("key", [None, b"", b"key"])
@pytest.mark.parametrize("value", [None, b"", b"value"])
@pytest.mark.parametrize("headers", [[], [("a", b"1"), ("bc", None)]])
def test_a_fetched_record_never_counts_less_than_it_is(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    found = client_record(value, headers, key)
    assert 0 <= fetched_bytes(found) - record_bytes(to_record(found)) <= 3


def test_a_commit_that_never_returns_is_left_at_its_limit() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    with pytest.raises(OutcomeUnknown), our_errors(OutcomeUnknown):
        bounded(hang, 0.01)
    release.set()


def test_a_commit_s_own_error_comes_through() -> None:
    def fail() -> None:
        raise kafka_errors.ProducerFencedError

    with pytest.raises(Fenced), our_errors(OutcomeUnknown):
        bounded(fail, 5)


@pytest.mark.parametrize(
    ("brokers", "replicas", "in_sync"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (5, 3, 2)]
)
def test_topics_are_as_durable_as_the_cluster_allows(
    brokers: int, replicas: int, in_sync: int
) -> None:
    settings = topic_settings(TopicSpec(name="t", partitions=4, record_bytes_max=100), brokers)
    assert settings["replication_factor"] == replicas
    assert settings["num_partitions"] == 4
    assert settings["configs"] == {
        "min.insync.replicas": str(in_sync),
        "max.message.bytes": str(100 + BATCH_ROOM_BYTES),
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "unclean.leader.election.enable": "false",
        "compression.type": "producer",
    }
