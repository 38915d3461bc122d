"""The log on Kafka: topics, offsets, reader and writer.

An exclusive writer is a transactional producer with its name as transactional.id: each append is
one transaction, and a second writer fences the first. Readers are `read_committed`. Other writers
are idempotent with acks=all; after an unknown outcome they use a new producer, while the old one's
records may arrive until its delivery limit.

kafka-python has no backpressure: `InFlight` and `Fetched` bound memory.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors
from kafka.admin import OffsetSpec
from kafka.protocol.consumer import IsolationLevel

from dora_pipe.bus.bus import Bus, Reader, TopicSpec, Writer
from dora_pipe.bus.checks import (
    Lifetime,
    check_appends,
    check_exists,
    check_position,
    check_same,
    check_spec,
    check_trimmed,
    first_kept,
)
from dora_pipe.bus.kafka import client
from dora_pipe.bus.kafka.access import (
    QUOTA_HINT,
    REFUSED,
    check_advertised,
    one_line,
    our_errors,
    probe,
    refusal,
    unreachable,
)
from dora_pipe.bus.kafka.client import (
    COMMIT_LIMIT_S_MIN,
    DELIVERY_LIMIT_S,
    FETCH_BYTES,
    NEWS_S,
    PROBE_LIMIT_S,
    QUIET_LIMIT_S,
    PatientClient,
    bounded,
    client_settings,
    consumer_settings,
    discard,
    ms,
    producer_settings,
    topic_settings,
)
from dora_pipe.bus.kafka.cluster import TopicFacts, check_settings, described, with_settings
from dora_pipe.bus.kafka.in_flight import InFlight
from dora_pipe.bus.kafka.records import Fetched, records_of
from dora_pipe.bus.kafka.security import PLAINTEXT, KafkaSecurity
from dora_pipe.core.errors import (
    BusError,
    Fenced,
    LogTruncated,
    OutcomeUnknown,
    RecordRefused,
    TopicMissing,
)
from dora_pipe.core.pure.records import Append, Record, TopicPartition

_log = logging.getLogger(__name__)

_Part = TypeVar("_Part", "KafkaReader", "KafkaWriter")
LEADER_LIMIT_S: Final = 10.0
"""Maximum time of a leader election."""

SLOW_LIMIT_S: Final = 120.0
"""Silence after which a reader is not just slow."""

THROTTLED_S: Final = 30.0
"""Time in which throttling may delay a probe's answer too."""

_Answer = TypeVar("_Answer")


class KafkaBus(Bus):
    """The log on the cluster at `servers`."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        security: KafkaSecurity = PLAINTEXT,
        delivery_limit_s: float = DELIVERY_LIMIT_S,
    ) -> None:
        self.servers = list(servers)
        self.security = security
        self.delivery_limit_s = delivery_limit_s
        self._lifetime = Lifetime(f"kafka://{','.join(servers)}")
        self._parts: list[KafkaReader | KafkaWriter] = []
        self._specs: dict[str, TopicSpec] = {}
        self._lock = threading.Lock()  # also used by the writer's thread
        self._admin = self._connect()

    def client_settings(self) -> dict[str, Any]:
        """Return the settings of every client, password included."""
        return client_settings(self.servers, self.security)

    def errors(
        self, otherwise: type[BusError] = BusError, *, needs: str = ""
    ) -> AbstractContextManager[None]:
        """Convert the client's errors; `needs` is the required right."""
        return our_errors(otherwise, security=self.security, needs=needs, servers=self.servers)

    def _connect(self) -> KafkaAdminClient:
        until_s = time.monotonic() + client.CONNECT_LIMIT_S
        while not (brokers := probe(self.servers, self.security)):
            if time.monotonic() > until_s:
                raise unreachable(self.servers, self.security)
            time.sleep(NEWS_S)
        check_advertised(brokers, self.servers)
        with self.errors():
            return client.opened(KafkaAdminClient, self.client_settings())[0]

    def create(self, topics: Sequence[TopicSpec]) -> None:
        for spec in topics:
            check_spec(spec)
        specs, existing = {spec.name: spec for spec in topics}, set(self.topics())
        old = [name for name in specs if name in existing]
        for name in old:
            self._spec_soon(name)
        if old:  # check first: a rejected call creates nothing
            check_settings(self.facts(old), specs)
        fresh = {name: spec for name, spec in specs.items() if name not in existing}
        needs = f"CREATE on topic {', '.join(fresh)}"
        with self.errors(needs=needs), self._lock:
            if fresh:
                brokers = len(self._admin.describe_cluster()["brokers"])
                settings = {name: topic_settings(spec, brokers) for name, spec in fresh.items()}
                try:
                    self._admin.create_topics(settings, wait_for_metadata=True)
                except kafka_errors.TopicAlreadyExistsError:
                    self._admin.wait_for_topics(list(settings))  # another process was faster
        for spec in fresh.values():
            check_same(spec, self._spec_soon(spec.name))

    def _spec_soon(self, topic: str) -> TopicSpec:
        until_s = time.monotonic() + client.CONNECT_LIMIT_S
        while True:
            try:
                return self.spec(topic)
            except TopicMissing:
                if time.monotonic() > until_s:
                    raise
                time.sleep(NEWS_S)

    def topics(self) -> list[str]:
        return sorted(t for t in self.ask(KafkaAdminClient.list_topics) if not t.startswith("__"))

    def partitions(self, topic: str) -> int:
        return self.spec(topic).partitions

    def begin(self, tp: TopicPartition) -> int:
        """Return the log start offset."""
        return self._offset(tp, OffsetSpec.EARLIEST, IsolationLevel.READ_COMMITTED)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Delete all at once on the brokers."""
        check_trimmed(tp)
        check_position(tp, before)
        offsets = {KafkaPartition(*tp): min(before, self.end(tp))}
        self.ask(lambda admin: admin.delete_records(offsets), needs=f"DELETE on topic {tp.topic}")
        return False

    def end(self, tp: TopicPartition) -> int:
        """Return the last stable offset."""
        return self._offset(tp, OffsetSpec.LATEST, IsolationLevel.READ_COMMITTED)

    def written_end(self, tp: TopicPartition) -> int:
        """Return the high watermark."""
        return self._offset(tp, OffsetSpec.LATEST, IsolationLevel.READ_UNCOMMITTED)

    def _offset(self, tp: TopicPartition, which: OffsetSpec, sees: IsolationLevel) -> int:
        check_exists(tp, {tp.topic: self.spec(tp.topic)})
        partition = KafkaPartition(*tp)
        with self.errors(needs=f"DESCRIBE on topic {tp.topic}"), self._lock:
            offsets = _retry_without_leader(
                lambda: self._admin.list_partition_offsets({partition: which}, isolation_level=sees)
            )
        return int(offsets[partition].offset)

    def reader(self, positions: Mapping[TopicPartition, int]) -> KafkaReader:
        for tp, position in positions.items():
            check_exists(tp, {tp.topic: self.spec(tp.topic)})
            check_position(tp, position)
        return self._keep(KafkaReader(self, positions))

    def writer(self, *, exclusive: str | None = None) -> KafkaWriter:
        self._lifetime.check()
        return self._keep(KafkaWriter(self, exclusive))

    def _keep(self, part: _Part) -> _Part:
        self._parts = [each for each in self._parts if not each.lifetime.closed]
        self._parts.append(part)
        return part

    def spec(self, topic: str) -> TopicSpec:
        self._lifetime.check()
        if topic not in self._specs:
            self._specs[topic] = self.facts([topic])[0].spec
        return self._specs[topic]

    def facts(self, topics: Sequence[str]) -> list[TopicFacts]:
        """Return current descriptions. Raises TopicMissing."""
        names, servers = ", ".join(topics), self.servers
        needs = f"DESCRIBE on topic {names}"
        facts = self.ask(lambda admin: described(admin, topics, servers=servers), needs=needs)
        needs = f"DESCRIBE_CONFIGS on topic {names}"
        return self.ask(lambda admin: with_settings(admin, facts), needs=needs)

    def refusal(self, error: Exception, record: Append) -> RecordRefused:
        """Return the error for a refused record, from current settings."""
        facts = self.facts([record.topic])[0]
        self._specs[record.topic] = facts.spec
        return refusal(error, record, facts.settings, facts.spec.max_record_bytes)

    def ask(self, call: Callable[[KafkaAdminClient], _Answer], *, needs: str = "") -> _Answer:
        """Return an admin call's result; one call at a time."""
        self._lifetime.check()
        with self.errors(needs=needs), self._lock:
            return _retry_without_leader(lambda: call(self._admin))

    def answers(self) -> bool:
        return bool(probe(self.servers, self.security, PROBE_LIMIT_S))

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._parts.clear()
        if self._lifetime.close():
            self._admin.close()


def _retry_without_leader(call: Callable[[], _Answer]) -> _Answer:
    """Retry: a dead broker remains leader for a while."""
    until_s = time.monotonic() + LEADER_LIMIT_S
    while True:
        try:
            return call()
        except kafka_errors.UnknownBrokerIdError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(NEWS_S)


def kafka_of(bus: Bus) -> KafkaBus | None:
    """Return the Kafka bus inside wrappers, or None."""
    inner: Any = bus
    while not isinstance(inner, KafkaBus):
        inner = getattr(inner, "inner", None)
        if inner is None:
            return None
    return inner


class KafkaReader(Reader):
    """Reader of assigned partitions, without a consumer group; prefetches within bounds."""

    def __init__(self, bus: KafkaBus, positions: Mapping[TopicPartition, int]) -> None:
        self.lifetime = Lifetime("this reader")
        self._bus = bus
        self._needs = f"READ on topic {', '.join(sorted({tp.topic for tp in positions}))}"
        self._fetched = Fetched()
        self._empty = False
        self._heard_s = time.monotonic()
        self._slow = self._warned = False
        self._throttled_s = -math.inf
        with self._errors():
            settings = {**bus.client_settings(), **consumer_settings(len(positions))}
            self._consumer, self._client = client.opened(KafkaConsumer, settings)
            self._consumer.assign([KafkaPartition(*tp) for tp in positions])
            for tp, position in positions.items():
                self._consumer.seek(KafkaPartition(*tp), position)

    def _errors(self) -> AbstractContextManager[None]:
        return self._bus.errors(needs=self._needs)

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = FETCH_BYTES
    ) -> list[Record]:
        """Return the next records. Raises BusError in an outage."""
        self.lifetime.check()
        came: list[Record] = []
        if not self._fetched:
            try:
                with self._errors():
                    polled = self._polled(ms(timeout_s), records_max)
            except LogTruncated:
                if not self._pass_trimmed():
                    raise
                return []
            came, self._empty = records_of(polled), not polled
            self._listen(heard=bool(polled))
        return self._fetched.take(came, records_max=records_max, bytes_max=bytes_max)

    def _polled(self, timeout_ms: int, records_max: int) -> dict[Any, list[Any]]:
        try:
            polled: dict[Any, list[Any]]
            polled = self._consumer.poll(timeout_ms, max_records=records_max)
            return polled
        except kafka_errors.CorruptRecordError as error:
            assigned = sorted(self._consumer.assignment())
            positions = [
                (partition, self._consumer.position(partition, timeout_ms=0))
                for partition in assigned
            ]
            where = ", ".join(
                f"{partition.topic}/{partition.partition}@{first}" for partition, first in positions
            )
            raise BusError(
                f"the Kafka client cannot read a record at or after {where}: {one_line(error)}"
            ) from error

    def _pass_trimmed(self) -> bool:
        with self._errors():
            assigned = list(self._consumer.assignment())
            begins = self._consumer.beginning_offsets(assigned, timeout_ms=ms(PROBE_LIMIT_S))
            before = {tp: self._consumer.position(tp, timeout_ms=0) for tp in assigned}
        kept = {
            tp: first_kept(tp, position, begins[tp])
            for tp, position in before.items()
            if position is not None
        }
        for tp, first in kept.items():
            self.seek(tp, first)
        return any(first != before[tp] for tp, first in kept.items())

    def _listen(self, *, heard: bool) -> None:
        now_s = time.monotonic()
        if throttle := self._client.throttle_s():
            self._throttled_s = now_s
            self._be_slow(
                "a quota of the Kafka cluster (consumer_byte_rate or request_percentage) "
                f"delays reading by {throttle:.1f} s: no record is lost; {QUOTA_HINT}"
            )
        elif heard or (now_s - self._heard_s > QUIET_LIMIT_S and self._answers(now_s)):
            self._heard_s, self._slow = now_s, False

    def _answers(self, now_s: float) -> bool:
        """Return whether the partitions' brokers answer. Raises BusError in an outage.

        One that answers only on a new connection is busy with our fetch.
        """
        assigned = list(self._consumer.assignment())
        try:
            with self._errors():
                self._consumer.end_offsets(assigned, timeout_ms=ms(PROBE_LIMIT_S))
        except BusError:
            throttled = now_s - self._throttled_s < THROTTLED_S
            late = now_s - self._heard_s > SLOW_LIMIT_S
            if not throttled and (late or not self._bus.answers()):
                raise
            self._be_slow("the network to the Kafka cluster is slow: an answer is still coming")
            return False
        return True

    def _be_slow(self, why: str) -> None:
        if not self._warned:
            _log.warning(why)
        self._slow = self._warned = True

    def position(self, tp: TopicPartition) -> int:
        partition = self._assigned(tp)
        first = self._fetched.first(tp)
        if first is not None:
            return first
        with self._errors():
            return int(self._consumer.position(partition, timeout_ms=0))

    def held_back(self) -> list[TopicPartition]:
        """Return the partitions whose last known high watermark is after the readable end; all
        while throttled."""
        self.lifetime.check()
        assigned = sorted(TopicPartition(*partition) for partition in self._consumer.assignment())
        if self._slow or not self._empty:
            return assigned if self._slow else []
        return [tp for tp in assigned if self._written(tp) > self.position(tp)]

    def _written(self, tp: TopicPartition) -> int:
        return int(self._consumer.highwater(KafkaPartition(*tp)) or 0)

    def seek(self, tp: TopicPartition, position: int) -> None:
        check_position(tp, position)
        partition = self._assigned(tp)
        self._fetched.forget(tp)
        with self._errors():
            self._consumer.seek(partition, position)

    def close(self) -> None:
        if self.lifetime.close():
            self._consumer.close(autocommit=False)

    def _assigned(self, tp: TopicPartition) -> KafkaPartition:
        self.lifetime.check()
        partition = KafkaPartition(*tp)
        if partition not in self._consumer.assignment():
            raise BusError(f"this reader does not read {tp.topic}/{tp.partition}")
        return partition


class KafkaWriter(Writer):
    """Writer that waits for every in-sync replica."""

    def __init__(self, bus: KafkaBus, exclusive: str | None) -> None:
        self._bus = bus
        self._name = exclusive
        self.lifetime = Lifetime("this writer")
        self._broken = False
        self._producer: KafkaProducer | None = None
        self._client: PatientClient | None = None
        self._open()

    def append(self, records: Sequence[Append]) -> list[int]:
        self.lifetime.check()
        if self._broken:
            raise BusError("this exclusive writer lost track of its appends; open a new one")
        topics = {each.topic for each in records}
        check_appends(records, {topic: self._bus.spec(topic) for topic in topics})
        if not records:
            return []
        if self._producer is None:
            self._open()
        try:
            return self._append(self._producer, records)
        except RecordRefused:
            if not self._name:  # fatal for the client; `_abort` has replaced an exclusive one
                self._drop()
            raise
        except BusError as error:
            delay_s = self._client.throttle_s() if self._client else 0.0
            self._drop()
            if delay_s:
                raise type(error)(
                    "a quota of the Kafka cluster (producer_byte_rate or request_percentage) "
                    f"delays appends by {delay_s:.0f} s: {error.message}",
                    hint=QUOTA_HINT,
                ) from error
            raise

    def _append(self, producer: KafkaProducer, records: Sequence[Append]) -> list[int]:
        """Send, wait for all, and commit if exclusive.

        Only a refused record allows an abort. After other failures the writer ends, or it would
        fence its successor.
        """
        with self._bus.errors(OutcomeUnknown, needs=self._needs(records)):
            until_s = time.monotonic() + self._bus.delivery_limit_s
            if self._name:
                producer.begin_transaction()
            in_flight = InFlight(producer, self._bus.delivery_limit_s)
            try:
                for record in records:
                    in_flight.send(record)
                offsets = in_flight.wait()
            except kafka_errors.KafkaError as error:
                cause, refused = in_flight.failure(error)
                if not isinstance(cause, REFUSED):
                    raise cause from error
                if self._name:
                    self._abort(producer, self._name)
                raise self._bus.refusal(cause, refused or records[0]) from error
            if self._name:
                left_s = max(COMMIT_LIMIT_S_MIN, until_s - time.monotonic())
                bounded(producer.commit_transaction, left_s)
        return offsets

    def _needs(self, records: Sequence[Append]) -> str:
        return f"WRITE on topic {', '.join(sorted({record.topic for record in records}))}"

    def _abort(self, producer: KafkaProducer, name: str) -> None:
        """Abort the transaction of a refused record and replace the producer.

        Raises Fenced if another producer came between.
        """
        before = self._count(name)
        bounded(producer.abort_transaction, self._bus.delivery_limit_s)
        discard(producer, self._bus.delivery_limit_s)
        self._open()
        if self._count(name) != (before[0], before[1] + 1):
            raise Fenced(f"a newer writer {name} took over")

    def _count(self, name: str) -> tuple[int, int]:
        needs = f"DESCRIBE on transactional id {name}"
        producer = self._bus.ask(
            lambda admin: admin.describe_transactions([name])[name], needs=needs
        )
        return int(producer.producer_id), int(producer.producer_epoch)

    def _open(self) -> None:
        with self._bus.errors(needs=f"WRITE on transactional id {self._name}"):
            settings = {
                **self._bus.client_settings(),
                **producer_settings(self._name, self._bus.delivery_limit_s),
            }
            producer, self._client = client.opened(KafkaProducer, settings)
            try:
                if self._name:
                    producer.init_transactions()
            except kafka_errors.KafkaError:
                discard(producer, self._bus.delivery_limit_s)
                raise
            self._producer = producer

    def _drop(self) -> None:
        self._broken = self._name is not None
        producer, self._producer = self._producer, None
        if producer is not None:
            discard(producer, self._bus.delivery_limit_s)

    def close(self) -> None:
        if self.lifetime.close() and self._producer is not None:
            discard(self._producer, self._bus.delivery_limit_s)
