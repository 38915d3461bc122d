"""Tests of the commands in docs/clusters.md for a cluster with authentication."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import (
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ResourcePatternFilter,
    ResourceType,
)
from kafka.admin import ACLResourcePatternType as Pattern

from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.security import KafkaSecurity
from tests.support import pages
from tests.support.kafka_broker import KafkaBroker, write_tools
from tests.support.kafka_secure import (
    Certificates,
    documented_rights,
    password_of,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

ADDRESS = "kafka-1.example:9094"


@pytest.fixture
def desk(tmp_path: Path, certificates: Certificates) -> Path:
    properties = pages.block("properties", "truststore")
    (tmp_path / "admin.properties").write_text(properties.replace("...", password_of("admin")))
    shown = "\n".join(pages.console("auditor.conf")[0].shown)
    (tmp_path / "auditor.conf").write_text(shown.replace("...", password_of("auditor")))
    (tmp_path / "kafka-ca.pem").write_text(Path(certificates.path("ca.pem")).read_text())
    return tmp_path


def rights_of(secure_kafka: KafkaBroker, user: str) -> set[tuple[str, str, str]]:
    admin = KafkaAdminClient(bootstrap_servers=secure_kafka.bootstrap)
    try:
        everything = ResourcePatternFilter(ResourceType.TOPIC, None, Pattern.ANY)
        result, _ = admin.describe_acls(
            ACLFilter(f"User:{user}", None, ACLOperation.ANY, ACLPermissionType.ANY, everything)
        )
    finally:
        admin.close()
    return {
        (
            entry.operation.name,
            entry.resource_pattern.resource_name,
            entry.resource_pattern.pattern_type.name.lower(),
        )
        for entry in result
    }


def test_the_acl_example_grants_a_worker_what_the_table_says(
    desk: Path, secure_kafka: KafkaBroker
) -> None:
    write_tools(desk / "bin")
    lines = pages.console("kafka-acls.sh")
    path = f"{desk / 'bin'}:{os.environ['PATH']}"
    pages.run(
        "\n".join(typed.line for typed in lines),
        desk,
        {ADDRESS: secure_kafka.address("SECURE")},
        path,
    )
    expected = {
        (right["operation"], right["name"], right["pattern"])
        for right in documented_rights("demo")
        if right["user"] == "worker"
    }
    assert rights_of(secure_kafka, "worker") == expected


def test_a_user_that_was_made_as_the_docs_say_enters(desk: Path, secure_kafka: KafkaBroker) -> None:
    write_tools(desk / "bin")
    (typed,) = pages.console("--entity-type users")
    replaced = {ADDRESS: secure_kafka.address("SECURE"), "...": "new-one", "worker": "newcomer"}
    pages.run(typed.line, desk, replaced, f"{desk / 'bin'}:{os.environ['PATH']}")
    (desk / "password").write_text("new-one")
    security = KafkaSecurity(
        protocol="SASL_SSL",
        mechanism="SCRAM-SHA-512",
        username="newcomer",
        password_file=str(desk / "password"),
        ca_file=str(desk / "kafka-ca.pem"),
    )
    bus = KafkaBus([secure_kafka.address("SECURE")], security=security)
    assert bus.topics() == []
    bus.close()
