"""A cluster that asks who comes: the contract over SASL_SSL, and every refusal in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.security import PLAINTEXT, KafkaSecurity
from dora_pipe.core.errors import AccessRefused, BusError
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support.bus_contract import CHECKS
from tests.support.bus_harness import KafkaHarness
from tests.support.bus_steps import Check, appends, read, topic_on
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_secure import Certificates, allow, password_of, security_of

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

AT_ONCE_S = 8.0
"""The client alone would only time out, after 10 s."""


@pytest.fixture
def admin(certificates: Certificates, tmp_path: Path) -> KafkaSecurity:
    return security_of("admin", certificates, tmp_path)


@pytest.fixture
def stranger(certificates: Certificates, tmp_path: Path) -> KafkaSecurity:
    return security_of("stranger", certificates, tmp_path)


class SecureHarness(KafkaHarness):
    def __init__(self, address: str, security: KafkaSecurity) -> None:
        super().__init__(address)
        self.security = security

    def open(self) -> Bus:
        return self.keep(KafkaBus([self.bootstrap], security=self.security))


@pytest.fixture
def harness(secure_kafka: KafkaBroker, admin: KafkaSecurity) -> Iterator[SecureHarness]:
    harness = SecureHarness(secure_kafka.address("SECURE"), admin)
    yield harness
    harness.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bus_over_sasl_ssl(harness: SecureHarness, check: Check) -> None:
    check(harness)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_a_record_passes_under_every_mechanism(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, mechanism: str
) -> None:
    harness = SecureHarness(secure_kafka.address("SECURE"), replace(admin, mechanism=mechanism))
    bus = harness.open()
    topic = topic_on(harness, bus)
    bus.writer(exclusive=harness.topic("w")).append([Append(topic=topic, value=b"x")])
    assert [record.value for record in read(bus.reader({TopicPartition(topic, 0): 0}), 1)] == [b"x"]
    harness.close()


def test_a_password_without_tls_and_a_certificate_without_password_are_taken(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, certificates: Certificates
) -> None:
    clear = replace(admin, protocol="SASL_PLAINTEXT")
    assert_enters(secure_kafka, "CLEAR", clear)
    mutual = KafkaSecurity(
        protocol="SSL",
        ca_file=certificates.path("ca.pem"),
        cert_file=certificates.path("client.crt"),
        key_file=certificates.path("client.key"),
    )
    assert_enters(secure_kafka, "MUTUAL", mutual)


def assert_enters(secure_kafka: KafkaBroker, listener: str, security: KafkaSecurity) -> None:
    bus = KafkaBus([secure_kafka.address(listener)], security=security)
    assert isinstance(bus.topics(), list)
    bus.close()


def refused(secure_kafka: KafkaBroker, listener: str, security: KafkaSecurity) -> AccessRefused:
    began_s = time.monotonic()
    with pytest.raises(AccessRefused) as raised:
        KafkaBus([secure_kafka.address(listener)], security=security)
    assert time.monotonic() - began_s < AT_ONCE_S
    error = raised.value
    assert error.exit_code == 4 and "\n" not in error.message and error.hint
    assert password_of("admin") not in f"{error.message} {error.hint} {security!r}"
    return error


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
@pytest.mark.parametrize("wrong", ["password", "name"])
def test_a_wrong_name_or_password(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, tmp_path: Path, mechanism: str, wrong: str
) -> None:
    (tmp_path / "wrong").write_text("not-it")
    security = replace(admin, mechanism=mechanism, username="nobody")
    if wrong == "password":
        security = replace(security, username="admin", password_file=str(tmp_path / "wrong"))
    error = refused(secure_kafka, "SECURE", security)
    assert "wrong name or password" in error.message and mechanism in error.message
    assert "not-it" not in f"{error.message} {error.hint}"
    assert "bus.password_file" in (error.hint or "")


def test_an_expired_certificate(secure_kafka: KafkaBroker, admin: KafkaSecurity) -> None:
    error = refused(secure_kafka, "EXPIRED", admin)
    assert error.message == "the Kafka broker's certificate has expired"


def test_a_certificate_of_another_host(secure_kafka: KafkaBroker, admin: KafkaSecurity) -> None:
    error = refused(secure_kafka, "ELSEWHERE", admin)
    assert "another host" in error.message and error.hint


def test_an_authority_that_nobody_knows(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, certificates: Certificates
) -> None:
    ca_file = certificates.path("stranger-ca.pem")
    error = refused(secure_kafka, "SECURE", replace(admin, ca_file=ca_file))
    assert ca_file in error.message and "bus.ca_file" in (error.hint or "")
    error = refused(secure_kafka, "SECURE", replace(admin, ca_file=""))
    assert "this machine's certificates" in error.message


@pytest.mark.parametrize("file", ["", "stranger.pem"])
def test_a_client_s_certificate_that_the_broker_does_not_take(
    secure_kafka: KafkaBroker, certificates: Certificates, file: str
) -> None:
    cert_file = certificates.path(file) if file else ""
    security = KafkaSecurity(
        protocol="SSL", ca_file=certificates.path("ca.pem"), cert_file=cert_file
    )
    error = refused(secure_kafka, "MUTUAL", security)
    assert "certificate" in error.message and "bus.cert_file" in (error.hint or "")


@pytest.mark.parametrize(
    ("listener", "protocol", "text"),
    [
        ("SECURE", "PLAINTEXT", "speaks TLS"),
        ("SECURE", "SASL_PLAINTEXT", "speaks TLS"),
        ("SECURE", "SSL", "asks for a user"),
        ("CLEAR", "PLAINTEXT", "asks for a user"),
        ("PLAINTEXT", "SASL_PLAINTEXT", "asks for no password"),
        ("PLAINTEXT", "SASL_SSL", "speaks no TLS"),
        ("CLEAR", "SSL", "speaks no TLS"),
    ],
)
def test_the_wrong_listener(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, listener: str, protocol: str, text: str
) -> None:
    security = replace(admin, protocol=protocol)
    if not security.sasl:
        security = replace(security, username="", password_file="")
    error = refused(secure_kafka, listener, security)
    assert text in error.message and "bus.protocol" in f"{error.message} {error.hint}"


def test_one_broker_that_lets_in_is_enough(secure_kafka: KafkaBroker, admin: KafkaSecurity) -> None:
    servers = ["127.0.0.1:1", secure_kafka.address("EXPIRED"), secure_kafka.address("SECURE")]
    bus = KafkaBus(servers, security=admin)
    assert isinstance(bus.topics(), list)
    bus.close()


def test_each_missing_right_is_named_and_the_hint_grants_it(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, stranger: KafkaSecurity
) -> None:
    address = secure_kafka.address("SECURE")
    harness = SecureHarness(address, admin)
    topic, name = topic_on(harness, harness.open()), harness.topic("w")
    partition = TopicPartition(topic, 0)
    with_rights = SecureHarness(address, stranger)

    def work() -> None:
        bus = with_rights.open()
        bus.end(partition)
        bus.reader({partition: 0}).poll(timeout_s=2)
        bus.writer().append([Append(topic=topic, value=b"plain")])
        bus.writer(exclusive=name).append([Append(topic=topic, value=b"exclusive")])

    granted = granted_for(secure_kafka, work)
    assert granted == ["Describe", "DescribeConfigs", "Read", "Write", "Write"]
    reader = harness.open().reader({partition: 0})
    assert [record.value for record in read(reader, 3)] == [b"plain", b"plain", b"exclusive"]
    harness.close()
    with_rights.close()


def test_a_trim_needs_the_right_to_delete_and_no_other_that_its_role_has_not(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, stranger: KafkaSecurity
) -> None:
    address = secure_kafka.address("SECURE")
    harness, with_rights = SecureHarness(address, admin), SecureHarness(address, stranger)
    bus, partition = harness.open(), TopicPartition(f"{harness.topic('t')}.metrics", 0)
    bus.create([TopicSpec(name=partition.topic)])
    offsets = bus.writer().append(appends(partition.topic, "a", "b", "c"))

    def work() -> None:
        with_rights.open().trim(partition, offsets[2])

    assert granted_for(secure_kafka, work) == ["Describe", "DescribeConfigs", "Delete"]
    assert bus.begin(partition) == offsets[2]
    harness.close()
    with_rights.close()


def granted_for(secure_kafka: KafkaBroker, work: Callable[[], None]) -> list[str]:
    granted: list[str] = []
    for _ in range(10):
        try:
            work()
            break
        except AccessRefused as error:
            assert "User:stranger lacks " in error.message, error.message
            granted.append(grant(secure_kafka, error.hint or ""))
    return granted


def grant(secure_kafka: KafkaBroker, hint: str) -> str:
    words = hint.partition(";")[0].split()
    settings = dict(zip(words[2::2], words[3::2], strict=True))
    kind = "TOPIC" if "--topic" in settings else "TRANSACTIONAL_ID"
    operation = settings["--operation"]
    right = {
        "user": settings["--allow-principal"].removeprefix("User:"),
        "operation": "DESCRIBE_CONFIGS" if operation == "DescribeConfigs" else operation.upper(),
        "kind": kind,
        "name": settings.get("--topic") or settings["--transactional-id"],
        "pattern": "literal",
    }
    allow(secure_kafka, [right])
    return operation


def test_creating_without_the_right_names_it(
    secure_kafka: KafkaBroker, stranger: KafkaSecurity
) -> None:
    bus = KafkaBus([secure_kafka.address("SECURE")], security=stranger)
    with pytest.raises(AccessRefused, match=r"User:stranger lacks CREATE on topic no\.such"):
        bus.create([TopicSpec(name="no.such")])
    bus.close()


def test_what_the_client_library_logs_holds_no_secret(
    secure_kafka: KafkaBroker, admin: KafkaSecurity, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="kafka"):
        bus = KafkaBus([secure_kafka.address("SECURE")], security=replace(admin, mechanism="PLAIN"))
        bus.topics()
        bus.close()
    assert "sasl_plain_password" in caplog.text, "the library logs all its settings"
    assert password_of("admin") not in caplog.text
    assert password_of("admin") not in secure_kafka.log()


SETTINGS = [
    ({"cleanup.policy": "compact"}, True, "compacted"),
    ({"min.insync.replicas": "2"}, True, "can be acknowledged"),
    ({"retention.ms": "3600000"}, False, "deletes records"),
    ({"unclean.leader.election.enable": "true"}, False, "incomplete replica"),
]


@pytest.mark.parametrize(("settings", "fatal", "client"), SETTINGS)
def test_somebody_else_s_topic_is_looked_at(
    secure_kafka: KafkaBroker,
    settings: dict[str, str],
    fatal: bool,
    client: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"theirs.{client.replace(' ', '-')}"
    theirs = KafkaAdminClient(bootstrap_servers=secure_kafka.bootstrap)
    limit = {"max.message.bytes": str(16 * 1024 * 1024)}
    configs = {**limit, "retention.ms": "-1", **settings}
    theirs.create_topics(
        {name: {"num_partitions": 1, "replication_factor": 1, "configs": configs}},
        wait_for_metadata=True,
    )
    theirs.close()
    bus = KafkaBus([secure_kafka.bootstrap], security=PLAINTEXT)
    if fatal:
        with pytest.raises(BusError, match=client) as raised:
            bus.create([TopicSpec(name=name)])
        assert raised.value.hint
    else:
        bus.create([TopicSpec(name=name)])
        assert client in caplog.text
    bus.close()


def test_retention_of_a_topic_that_may_be_trimmed_is_not_told(
    secure_kafka: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = KafkaAdminClient(bootstrap_servers=secure_kafka.bootstrap)
    for name in ("kept.control", "kept.metrics"):
        configs = {"retention.ms": "3600000", "max.message.bytes": str(11 * 1024 * 1024)}
        settings = {name: {"num_partitions": 1, "replication_factor": 1, "configs": configs}}
        theirs.create_topics(settings, wait_for_metadata=True)
    theirs.close()
    bus = KafkaBus([secure_kafka.bootstrap], security=PLAINTEXT)
    bus.create([TopicSpec(name="kept.control"), TopicSpec(name="kept.metrics")])
    assert "kept.control deletes records" in caplog.text
    assert "kept.metrics" not in caplog.text
    bus.close()


def test_partitions_and_sizes_of_somebody_else_s_topic_are_refused_with_what_to_set(
    secure_kafka: KafkaBroker,
) -> None:
    theirs = KafkaAdminClient(bootstrap_servers=secure_kafka.bootstrap)
    small = {"max.message.bytes": str(10 * 1024 * 1024)}  # no room for a batch's own bytes
    theirs.create_topics(
        {"theirs.small": {"num_partitions": 2, "replication_factor": 1, "configs": small}},
        wait_for_metadata=True,
    )
    theirs.close()
    bus = KafkaBus([secure_kafka.bootstrap])
    with pytest.raises(BusError, match="2 partitions, not 3") as raised:
        bus.create([TopicSpec(name="theirs.small", partitions=3)])
    assert "bus.partitions = 2" in (raised.value.hint or "")
    with pytest.raises(BusError, match="records of at most") as raised:
        bus.create([TopicSpec(name="theirs.small", partitions=2)])
    assert "max.message.bytes" in (raised.value.hint or "")
    bus.create([TopicSpec(name="theirs.small", partitions=2, max_record_bytes=1024 * 1024)])
    bus.close()
