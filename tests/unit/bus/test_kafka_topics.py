"""Tests of checks of existing topics' settings."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import BATCH_ROOM_BYTES
from dora_pipe.bus.kafka.client import FETCH_BYTES, topic_settings
from dora_pipe.bus.kafka.cluster import TopicFacts, check_settings, problems_of
from dora_pipe.config.model import Bus
from dora_pipe.core.errors import BusError

SPEC = TopicSpec(name="r.t", partitions=4)


def topic(brokers: int = 3, replicas: int = 0, **changed: str) -> TopicFacts:
    new_settings = topic_settings(SPEC, brokers)
    settings = {**new_settings["configs"], **{k.replace("_", "."): v for k, v in changed.items()}}
    return TopicFacts(
        name=SPEC.name,
        partitions=new_settings["num_partitions"],
        replicas=replicas or new_settings["replication_factor"],
        brokers=brokers,
        settings=settings,
    )


@pytest.mark.parametrize("brokers", [1, 2, 3, 5])
def test_a_topic_as_we_make_it_has_nothing_wrong_with_it(brokers: int) -> None:
    assert problems_of(topic(brokers)) == []
    assert topic(brokers).spec == SPEC


@pytest.mark.parametrize(
    ("facts", "text", "hint"),
    [
        (topic(cleanup_policy="compact"), "is compacted", "cleanup.policy=delete"),
        (topic(cleanup_policy="compact,delete"), "is compacted", "cleanup.policy=delete"),
        (topic(1, min_insync_replicas="2"), "can be acknowledged", "min.insync.replicas=1"),
        (topic(segment_bytes="1048576"), "segment.bytes=1048576", "segment.bytes=1073741824"),
    ],
)
def test_what_would_lose_records_or_refuse_them_all_is_refused(
    facts: TopicFacts, text: str, hint: str
) -> None:
    with pytest.raises(BusError, match=text) as refused:
        check_settings([topic(), facts], {SPEC.name: SPEC})
    assert hint in (refused.value.hint or "") and "r.t" in refused.value.message


def test_all_that_has_to_change_is_named_at_once() -> None:
    theirs = topic(max_message_bytes="1048588")
    control = replace(theirs, name="r.control", partitions=1)
    many = replace(theirs, name="r.trajectories", partitions=2)
    expected = {
        "r.control": replace(SPEC, name="r.control", partitions=1),
        "r.trajectories": replace(SPEC, name="r.trajectories"),
    }
    with pytest.raises(BusError) as refused:
        check_settings([control, many], expected)
    assert refused.value.message == (
        "topic r.trajectories exists with 2 partitions, not 4; "
        "topic r.control exists with records of at most 1032204 bytes, expected 10485760; "
        "topic r.trajectories exists with records of at most 1032204 bytes, expected 10485760"
    )
    assert refused.value.hint == (
        "set bus.partitions = 2, or add partitions to these topics; "
        "set bus.max_record_bytes = 1032204, or raise max.message.bytes to 11534336 for each of "
        "these topics; or choose another run.name"
    )
    fits = {
        name: replace(spec, partitions=min(2, spec.partitions), max_record_bytes=1032204)
        for name, spec in expected.items()
    }
    check_settings([replace(control, partitions=6), many], fits)


@pytest.mark.parametrize(
    ("facts", "text", "hint"),
    [
        (topic(retention_ms="604800000"), "beyond 7 days", "retention.ms=-1"),
        (topic(retention_bytes="1000"), "beyond 1000 bytes", "retention.bytes=-1"),
        (topic(unclean_leader_election_enable="true"), "incomplete replica", "enable=false"),
        (topic(min_insync_replicas="1"), "on one machine only", "min.insync.replicas=2"),
        (topic(replicas=1, min_insync_replicas="1"), "1 of 3 possible replicas", "replication"),
    ],
)
def test_what_is_weaker_than_it_could_be_is_told_and_used(
    facts: TopicFacts, text: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_settings([facts], {SPEC.name: SPEC})
    (line,) = [record.getMessage() for record in caplog.records]
    assert text in line and hint in line and "\n" not in line


def test_a_command_in_a_hint_can_be_pasted() -> None:
    facts = replace(topic(retention_ms="1"), servers="k1.example:9092,k2.example:9092")
    (problem,) = problems_of(facts)
    command = problem.hint[problem.hint.index("kafka-configs.sh") :]
    assert command == (
        "kafka-configs.sh --bootstrap-server k1.example:9092,k2.example:9092 --alter "
        "--topic r.t --add-config retention.ms=-1"
    )


def test_what_is_refused_stands_before_what_is_told() -> None:
    facts = topic(retention_ms="1", cleanup_policy="compact")
    assert [problem.fatal for problem in problems_of(facts)] == [True, False]


def test_the_largest_record_that_can_be_asked_for_fits_into_one_fetch() -> None:
    field = Bus(max_record_bytes=31 * 1024 * 1024)
    assert field.max_record_bytes + BATCH_ROOM_BYTES <= FETCH_BYTES
