"""What a topic's settings must be so that nothing acknowledged is lost; decides what is refused.

Topics that we create have these settings. One that somebody else created, or changed later, is
looked at when a run starts: what would lose records in order to run at all is refused, what is
weaker than it could be is told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from dora_pipe.bus.checks import BATCH_ROOM_BYTES, topic_missing
from dora_pipe.bus.port import TopicSpec
from dora_pipe.errors import BusError

_log = logging.getLogger(__name__)

WANTED_REPLICAS = 3
"""With three replicas, and two of them in sync, any one machine may die."""

_S_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """A topic as the cluster describes it."""

    name: str
    partitions: int
    replicas: int
    """Of the partition that has fewest."""
    brokers: int
    settings: Mapping[str, str]
    servers: str = "HOST:PORT"
    """Where this cluster was asked, for commands that are to be pasted."""

    @property
    def spec(self) -> TopicSpec:
        """What it was asked for as: a whole batch, with its framing, must fit into its limit."""
        limit = int(self.settings["max.message.bytes"])
        return TopicSpec(
            name=self.name,
            partitions=self.partitions,
            record_bytes_max=max(1, limit - BATCH_ROOM_BYTES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What is wrong with a topic, and what to do about it."""

    text: str
    hint: str
    fatal: bool
    """Whether the topic cannot be used for a run; if not, it is only weaker than it could be."""


def described(
    admin: KafkaAdminClient, topics: Sequence[str], *, servers: Sequence[str]
) -> list[TopicFacts]:
    """Topics without their settings. Raises TopicMissing, and the client's errors."""
    brokers = len(admin.describe_cluster()["brokers"])
    by_name = {one["name"]: one for one in admin.describe_topics(list(topics))}
    found = []
    for name in topics:
        topic = by_name[name]
        kind = kafka_errors.for_code(topic["error_code"])
        if kind is kafka_errors.UnknownTopicOrPartitionError:
            raise topic_missing(name)
        if topic["error_code"]:
            raise kind(name)
        parts = topic["partitions"]
        replicas = min((len(part["replica_nodes"]) for part in parts), default=0)
        found.append(
            TopicFacts(
                name=name,
                partitions=len(parts),
                replicas=replicas,
                brokers=brokers,
                settings={},
                servers=",".join(servers),
            )
        )
    return found


def with_settings(admin: KafkaAdminClient, topics: Sequence[TopicFacts]) -> list[TopicFacts]:
    """The topics with their settings.

    The client leaves a topic out where the cluster refuses to tell; that is raised as its error.
    """
    wanted = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in topics]
    told = admin.describe_configs(wanted, config_filter="all").get("topic", {})
    for topic in topics:
        if "max.message.bytes" not in told.get(topic.name, {}):
            raise kafka_errors.TopicAuthorizationFailedError(topic.name)
    return [
        replace(topic, settings={k: str(v["value"]) for k, v in told[topic.name].items()})
        for topic in topics
    ]


def check_settings(topics: Sequence[TopicFacts]) -> None:
    """Refuse topics that would lose records, and tell of those that are weak. Raises BusError."""
    found = [one for topic in topics for one in complaints(topic)]
    for one in found:
        if one.fatal:
            raise BusError(one.text, hint=one.hint)
    for one in found:
        _log.warning("warning: %s; %s", one.text, one.hint)


def complaints(topic: TopicFacts) -> list[Complaint]:
    """Everything wrong with a topic that holds part of a run, worst first."""
    found = [*_losing(topic), *_weak(topic)]
    return sorted(found, key=lambda one: not one.fatal)


def _losing(topic: TopicFacts) -> Iterator[Complaint]:
    """What makes acknowledged records vanish, or appends impossible."""
    policy = topic.settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield _complaint(
            f"topic {topic.name} is compacted (cleanup.policy={policy}): records would vanish",
            f"{_alter(topic)} cleanup.policy=delete, if nothing was appended yet",
            fatal=True,
        )
    in_sync = _number(topic, "min.insync.replicas", 1)
    if in_sync > topic.replicas:
        yield _complaint(
            f"topic {topic.name} has {topic.replicas} replicas and min.insync.replicas={in_sync}: "
            "no append can ever be acknowledged",
            f"{_alter(topic)} min.insync.replicas={max(1, topic.replicas - 1)}",
            fatal=True,
        )
    segment = _number(topic, "segment.bytes", 1 << 30)
    if segment < int(topic.settings["max.message.bytes"]):
        yield _complaint(
            f"topic {topic.name} has segment.bytes={segment}, below its max.message.bytes",
            f"{_alter(topic)} segment.bytes=1073741824",
            fatal=True,
        )


def _weak(topic: TopicFacts) -> Iterator[Complaint]:
    for name, unit in (("retention.ms", "ms"), ("retention.bytes", "bytes")):
        limit = _number(topic, name, -1)
        if limit >= 0:
            amount = f"{limit / 1000 / _S_PER_DAY:.3g} days" if unit == "ms" else f"{limit} bytes"
            yield _complaint(
                f"topic {topic.name} forgets records beyond {amount} ({name}={limit})",
                f"archive the run before that (`dora-pipe archive`), or {_alter(topic)} {name}=-1",
            )
    if topic.settings.get("unclean.leader.election.enable") == "true":
        yield _complaint(
            f"topic {topic.name} lets a replica that lacks records lead: acknowledged ones may go",
            f"{_alter(topic)} unclean.leader.election.enable=false",
        )
    wanted = min(WANTED_REPLICAS, topic.brokers)
    if topic.replicas < wanted:
        yield _complaint(
            f"topic {topic.name} has {topic.replicas} of {wanted} possible replicas: "
            "its records die with a machine",
            "raise its replication factor (kafka-reassign-partitions.sh), or start a new run",
        )
    in_sync = _number(topic, "min.insync.replicas", 1)
    if in_sync < min(topic.replicas, WANTED_REPLICAS) - 1:
        yield _complaint(
            f"topic {topic.name} has {topic.replicas} replicas and min.insync.replicas={in_sync}: "
            "an acknowledged record may lie on one machine only",
            f"{_alter(topic)} min.insync.replicas={topic.replicas - 1}",
        )


def brokers_of(admin: KafkaAdminClient) -> list[int]:
    """The numbers of the brokers that are there."""
    return sorted(int(one["broker_id"]) for one in admin.describe_cluster()["brokers"])


def replica_fetch_bytes(admin: KafkaAdminClient) -> int | None:
    """The smallest `replica.fetch.max.bytes` of the brokers; None where the cluster tells none."""
    wanted = [ConfigResource(ConfigResourceType.BROKER, str(one)) for one in brokers_of(admin)]
    told = admin.describe_configs(wanted, config_filter="all").get("broker", {})
    sizes = [one["replica.fetch.max.bytes"]["value"] for one in told.values() if one]
    return min(map(int, sizes), default=None)


def fetch_complaint(topic: TopicFacts, replica_fetch_bytes: int) -> Complaint | None:
    """A follower that fetches less than one batch still gets it whole, but one at a time."""
    limit = int(topic.settings["max.message.bytes"])
    if topic.replicas < 2 or replica_fetch_bytes >= limit:
        return None
    return _complaint(
        f"a broker has replica.fetch.max.bytes={replica_fetch_bytes}, below the {limit} "
        f"(max.message.bytes) of topic {topic.name}: followers fetch large records one by one",
        f"set replica.fetch.max.bytes={limit} on every broker",
    )


def _number(topic: TopicFacts, name: str, default: int) -> int:
    return int(topic.settings.get(name, default))


def _alter(topic: TopicFacts) -> str:
    """All but the setting: Kafka's own command, to be pasted (docs/kafka.md says where it is)."""
    place = f"--bootstrap-server {topic.servers} --alter"
    return f"kafka-configs.sh {place} --topic {topic.name} --add-config"


def _complaint(text: str, hint: str, *, fatal: bool = False) -> Complaint:
    return Complaint(text=text, hint=hint, fatal=fatal)
