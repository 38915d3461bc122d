"""Tests of `doctor` on a log: reachability, user and topic settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.cli.doctor import CheckResult, config_findings, log_findings
from dora_pipe.config.load import dump_toml, from_plain
from dora_pipe.config.model import Config
from dora_pipe.launch.run_dir import LOCK, RunDir
from dora_pipe.schemas.topics import Topics
from tests.support.kafka_broker import KafkaBroker


def config(name: str, **bus: object) -> Config:
    return from_plain(
        {
            "run": {"name": name, "steps": 1},
            "model": {"path": "m"},
            "task": {"kind": "arithmetic"},
            "bus": bus,
        }
    )


def rows(results: list[CheckResult]) -> list[tuple[str, str]]:
    return [(result.state, result.what) for result in results]


def test_the_log_of_a_file_is_looked_at(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'log'}"
    own_config = config("demo", url=url)
    assert rows(list(log_findings(url, own_config))) == [("ok", "log"), ("note", "topics")]
    bus = open_bus(url)
    bus.create([TopicSpec(name=name) for name in Topics("demo").all()])
    bus.close()
    (_, topics) = log_findings(url, own_config)
    assert (topics.state, topics.detail) == ("ok", "all 6 of run 'demo'")


def test_a_new_run_has_no_topics_to_compare_with_and_a_started_one_has_lost_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(config("demo", url=f"sqlite:{tmp_path}/log")))
    assert list(config_findings(RunDir(tmp_path))) == []
    (tmp_path / LOCK).touch()
    (row,) = config_findings(RunDir(tmp_path))
    assert row.state == "fail" and "demo.control" in row.detail


def test_a_log_that_is_none_is_one_row_with_its_hint() -> None:
    (row,) = log_findings("redis://x", None)
    assert row.state == "fail" and "is not a log; sqlite:PATH" in row.detail


def test_a_password_that_is_not_there_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DORA_PIPE_KAFKA_PASSWORD", raising=False)
    url = "kafka://127.0.0.1:1"
    own_config = config("demo", url=url, protocol="SASL_SSL", username="w0")
    (row,) = log_findings(url, own_config)
    assert row.state == "fail" and "no password for the Kafka user `w0`" in row.detail


@pytest.fixture
def described(kafka_broker: KafkaBroker) -> Callable[[Config], list[CheckResult]]:
    return lambda expected: list(log_findings(f"kafka://{kafka_broker.bootstrap}", expected))


@pytest.mark.kafka
def test_a_cluster_is_looked_at_with_the_topics_of_the_run(
    kafka_broker: KafkaBroker, described: Callable[[Config], list[CheckResult]]
) -> None:
    own_config = config("looked-at", url=f"kafka://{kafka_broker.bootstrap}")
    result = described(own_config)
    assert rows(result) == [("ok", "log"), ("note", "topics"), ("note", "brokers")]
    assert "as User:ANONYMOUS by PLAINTEXT" in result[0].detail
    bus = KafkaBus([kafka_broker.bootstrap])
    names = Topics("looked-at")
    many = {names.trajectories: 4, names.progress: 4}
    bus.create([TopicSpec(name=topic, partitions=many.get(topic, 1)) for topic in names.all()])
    bus.close()
    result = described(own_config)
    assert rows(result)[-1] == ("ok", "settings")
    other_config = config("looked-at", partitions=8, max_record_bytes=20 * 1024 * 1024)
    failed = [result.detail for result in described(other_config) if result.state == "fail"]
    assert any("4 partitions, not 8" in entry for entry in failed)
    assert any("max.message.bytes" in entry for entry in failed)


@pytest.mark.kafka
def test_settings_that_were_changed_later_are_found(
    kafka_broker: KafkaBroker, described: Callable[[Config], list[CheckResult]]
) -> None:
    own_config = config("changed-later", url=f"kafka://{kafka_broker.bootstrap}")
    topic = Topics("changed-later").control
    theirs = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap)
    configs = {
        "cleanup.policy": "compact",
        "max.message.bytes": "20971520",
        "retention.ms": "86400000",
    }
    theirs.create_topics(
        {topic: {"num_partitions": 1, "replication_factor": 1, "configs": configs}},
        wait_for_metadata=True,
    )
    theirs.close()
    details = {
        result.state: result.detail for result in described(own_config) if result.what == "settings"
    }
    assert "is compacted" in details["fail"] and "cleanup.policy=delete" in details["fail"]
    assert "deletes records beyond 1 days" in details["note"]
