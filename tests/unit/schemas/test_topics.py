"""Tests of topic names: valid in Kafka and unique per run."""

from __future__ import annotations

import re
import string

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.schemas.topics import Topics

KAFKA_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""Kafka's rule (org.apache.kafka.common.internals.Topic), besides `.` and `..`."""

NAMES = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=100).filter(
    lambda name: name[0] not in "-_"
)
LIKE_TOPICS = st.lists(
    st.sampled_from(["a", "control", "dead", "letters", "_", "-", "-control", "_control", "0"]),
    min_size=1,
    max_size=6,
).map("".join)


def metric_name(topic: str) -> str:
    return topic.replace(".", "_")


@given(NAMES)
def test_topics_are_names_that_kafka_takes(name: str) -> None:
    for topic in Topics(name).all():
        assert KAFKA_NAME.fullmatch(topic)
        assert topic not in (".", "..")


@given(NAMES | LIKE_TOPICS.filter(lambda name: name[0] not in "-_"))
def test_topic_tells_its_run(name: str) -> None:
    for topic in Topics(name).all():
        assert topic.rpartition(".")[0] == name
        assert topic.count(".") == 1


@given(LIKE_TOPICS, LIKE_TOPICS)
def test_topics_of_two_runs_never_collide_not_even_as_kafkas_metrics(a: str, b: str) -> None:
    names = {name for name in (a, b) if name[0] not in "-_"}
    topics = [topic for name in names for topic in Topics(name).all()]
    assert len({metric_name(topic) for topic in topics}) == len(topics) == 6 * len(names)
