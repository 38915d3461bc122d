"""Checks of topic settings, partitions and disks.

At startup, lossy settings are errors and weak ones warnings. A broker with a full disk stops, and
appends then fail without the reason, so free space is checked before (DescribeLogDirs, Kafka 3.3+).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import (
    BATCH_ROOM_BYTES,
    FRAME_ROOM_BYTES,
    RECORD_BYTES_LEAST,
    is_trimmed,
    misfits,
    refuse_topics,
    topic_missing,
)
from dora_pipe.core.errors import AccessRefused, BusError

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

WANTED_REPLICAS = 3
"""Three replicas with two in sync survive the loss of any machine."""

_S_PER_DAY = 86_400

FULL_BYTES: Final = 1 << 20
"""Free bytes below which a log directory counts as full."""

LOW_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicFacts:
    """Topic as described by the cluster."""

    name: str
    partitions: int
    replicas: int
    """Replicas of the partition that has fewest."""
    brokers: int
    settings: Mapping[str, str]
    servers: str = "HOST:PORT"
    """Bootstrap servers, for commands in hints."""

    @property
    def spec(self) -> TopicSpec:
        """Return the spec whose batch with framing fits the topic's limit."""
        limit = int(self.settings["max.message.bytes"])
        room = BATCH_ROOM_BYTES
        if limit < BATCH_ROOM_BYTES + RECORD_BYTES_LEAST:
            room = FRAME_ROOM_BYTES
        return TopicSpec(
            name=self.name, partitions=self.partitions, max_record_bytes=max(1, limit - room)
        )


@dataclass(frozen=True, slots=True)
class TopicProblem:
    """Problem of a topic, with a hint."""

    text: str
    hint: str
    fatal: bool = False
    """Whether a run cannot use the topic; otherwise it is a warning."""


def described(
    admin: KafkaAdminClient, topics: Sequence[str], *, servers: Sequence[str]
) -> list[TopicFacts]:
    """Return topics without settings. Raises TopicMissing and the client's errors."""
    brokers = len(admin.describe_cluster()["brokers"])
    by_name = {
        description["name"]: description for description in admin.describe_topics(list(topics))
    }
    facts = []
    for name in topics:
        topic = by_name[name]
        kind = kafka_errors.for_code(topic["error_code"])
        if kind is kafka_errors.UnknownTopicOrPartitionError:
            raise topic_missing(name)
        if topic["error_code"]:
            raise kind(name)
        parts = topic["partitions"]
        replicas = min((len(part["replica_nodes"]) for part in parts), default=0)
        facts.append(
            TopicFacts(
                name=name,
                partitions=len(parts),
                replicas=replicas,
                brokers=brokers,
                settings={},
                servers=",".join(servers),
            )
        )
    return facts


def with_settings(admin: KafkaAdminClient, topics: Sequence[TopicFacts]) -> list[TopicFacts]:
    """Add settings. Raises the client's error for topics that it omits."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in topics]
    answer = admin.describe_configs(resources, config_filter="all").get("topic", {})
    for topic in topics:
        if "max.message.bytes" not in answer.get(topic.name, {}):
            raise kafka_errors.TopicAuthorizationFailedError(topic.name)
    return [
        replace(topic, settings={k: str(v["value"]) for k, v in answer[topic.name].items()})
        for topic in topics
    ]


def check_settings(topics: Sequence[TopicFacts], specs: Mapping[str, TopicSpec]) -> None:
    """Raises BusError for unfit or lossy settings; logs weak ones."""
    problems = setting_problems(topics, specs)
    fatal = [problem for problem in problems if problem.fatal]
    refuse_topics([problem.text for problem in fatal], [problem.hint for problem in fatal])
    for problem in problems:
        _log.warning("warning: %s; %s", problem.text, problem.hint)


def setting_problems(
    topics: Sequence[TopicFacts], specs: Mapping[str, TopicSpec]
) -> list[TopicProblem]:
    """Return the problems of a run's topics, with one for all that do not fit its specs."""
    texts, hints = misfits([(specs[topic.name], topic.spec) for topic in topics])
    unfit = [TopicProblem("; ".join(texts), "; ".join(hints), fatal=True)] if texts else []
    return [*unfit, *(problem for topic in topics for problem in problems_of(topic))]


def problems_of(topic: TopicFacts) -> list[TopicProblem]:
    """Return all problems of a topic, worst first."""
    problems = [*_losing(topic), *_weak(topic)]
    return sorted(problems, key=lambda problem: not problem.fatal)


def _losing(topic: TopicFacts) -> Iterator[TopicProblem]:
    policy = topic.settings.get("cleanup.policy", "delete")
    if "compact" in policy:
        yield TopicProblem(
            f"topic {topic.name} is compacted (cleanup.policy={policy}): records would be deleted",
            f"{_alter(topic)} cleanup.policy=delete, if nothing was appended yet",
            fatal=True,
        )
    in_sync = _number(topic, "min.insync.replicas", 1)
    if in_sync > topic.replicas:
        yield TopicProblem(
            f"topic {topic.name} has {topic.replicas} replicas and min.insync.replicas={in_sync}: "
            "no append can be acknowledged",
            f"{_alter(topic)} min.insync.replicas={max(1, topic.replicas - 1)}",
            fatal=True,
        )
    segment = _number(topic, "segment.bytes", 1 << 30)
    if segment < int(topic.settings["max.message.bytes"]):
        yield TopicProblem(
            f"topic {topic.name} has segment.bytes={segment}, below its max.message.bytes",
            f"{_alter(topic)} segment.bytes=1073741824",
            fatal=True,
        )


def _weak(topic: TopicFacts) -> Iterator[TopicProblem]:
    for name, unit in (("retention.ms", "ms"), ("retention.bytes", "bytes")):
        limit = _number(topic, name, -1)
        if limit >= 0 and not is_trimmed(topic.name):
            amount = f"{limit / 1000 / _S_PER_DAY:.3g} days" if unit == "ms" else f"{limit} bytes"
            yield TopicProblem(
                f"topic {topic.name} deletes records beyond {amount} ({name}={limit})",
                f"a run ends when records of it are deleted: {_alter(topic)} {name}=-1",
            )
    if topic.settings.get("unclean.leader.election.enable") == "true":
        yield TopicProblem(
            f"topic {topic.name} lets an incomplete replica lead: acknowledged records can be lost",
            f"{_alter(topic)} unclean.leader.election.enable=false",
        )
    possible = min(WANTED_REPLICAS, topic.brokers)
    if topic.replicas < possible:
        yield TopicProblem(
            f"topic {topic.name} has {topic.replicas} of {possible} possible replicas: "
            "the loss of a machine loses records",
            "raise its replication factor (kafka-reassign-partitions.sh), or start a new run",
        )
    in_sync = _number(topic, "min.insync.replicas", 1)
    if in_sync < min(topic.replicas, WANTED_REPLICAS) - 1:
        yield TopicProblem(
            f"topic {topic.name} has {topic.replicas} replicas and min.insync.replicas={in_sync}: "
            "an acknowledged record may be on one machine only",
            f"{_alter(topic)} min.insync.replicas={topic.replicas - 1}",
        )


def brokers_of(admin: KafkaAdminClient) -> list[int]:
    return sorted(int(broker["broker_id"]) for broker in admin.describe_cluster()["brokers"])


def _number(topic: TopicFacts, name: str, default: int) -> int:
    return int(topic.settings.get(name, default))


def _alter(topic: TopicFacts) -> str:
    options = f"--bootstrap-server {topic.servers} --alter"
    return f"kafka-configs.sh {options} --topic {topic.name} --add-config"


class Cluster(Protocol):
    """The part of `KafkaBus` used here."""

    def ask(self, call: Callable[[KafkaAdminClient], Answer], *, needs: str = "") -> Answer: ...

    def facts(self, topics: Sequence[str]) -> list[TopicFacts]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDir:
    """Log directory of a broker."""

    broker: int
    path: str
    failed: bool
    free_bytes: int | None
    """None if the broker does not report it."""

    @property
    def stops(self) -> str:
        """Return why it rejects records, or empty."""
        if self.failed:
            return f"{self._where} has failed: its disk is full, or broken"
        if self.free_bytes is not None and self.free_bytes < FULL_BYTES:
            return f"the disk under {self._where} is full: {self.free_bytes:,} B free"
        return ""

    @property
    def low(self) -> str:
        """Return why it will soon reject records, or empty."""
        if self.stops or self.free_bytes is None or self.free_bytes >= LOW_BYTES:
            return ""
        return f"the disk under {self._where} has only {self.free_bytes:,} B free"

    @property
    def _where(self) -> str:
        return f"log directory {self.path} of broker {self.broker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Partition of the run."""

    leader: int
    """Broker id; -1 without a leader."""
    replicas: frozenset[int]
    in_sync: frozenset[int]
    """In-sync replicas, without dead brokers and failed log directories."""
    needed: int
    """`min.insync.replicas`."""


def trouble_of(cluster: Cluster, topics: Sequence[str]) -> tuple[str, str]:
    """Return why appends fail, and why they soon will; empty if all is well.

    Asks each broker, because without a controller quorum descriptions are stale. Log directories
    need DESCRIBE on the cluster. Raises BusError.
    """
    dirs, silent = _asked(cluster, cluster.ask(brokers_of))
    needed = {
        fact.name: fact.settings.get("min.insync.replicas", "1") for fact in cluster.facts(topics)
    }
    parts = cluster.ask(lambda admin: _partitions(admin, topics, needed, silent))
    stops = [*(log_dir.stops for log_dir in dirs), too_few_of(parts)]
    low = [log_dir.low for log_dir in dirs]
    return "; ".join(filter(None, stops)), "; ".join(filter(None, low))


def _asked(cluster: Cluster, brokers: Sequence[int]) -> tuple[list[LogDir], frozenset[int]]:
    dirs: list[LogDir] = []
    silent: set[int] = set()
    for broker in brokers:
        ask = partial(KafkaAdminClient.describe_log_dirs, brokers=[broker])
        try:
            dirs += _log_dirs(cluster.ask(ask, needs="DESCRIBE on cluster"))
        except AccessRefused:
            continue
        except BusError:
            silent.add(broker)
    return dirs, frozenset(silent)


def too_few_of(partitions: Sequence[Partition]) -> str:
    """Describe partitions that accept no appends."""
    leaderless = [part for part in partitions if part.leader < 0]
    few = [part for part in partitions if part.leader >= 0 and len(part.in_sync) < part.needed]
    lost = [part.replicas - part.in_sync for part in (*leaderless, *few)]
    away = sorted(frozenset().union(*lost))
    messages = []
    if leaderless:
        messages.append(f"{len(leaderless)} partitions of the run have no leader")
    if few:
        messages.append(
            f"{len(few)} partitions of the run have fewer replicas in sync than an append needs "
            f"({max(part.needed for part in few)})"
        )
    if messages and away:
        who = "broker " if len(away) == 1 else "brokers "
        messages.append(
            f"{who}{', '.join(map(str, away))} stopped or cannot write: check their disks"
        )
    return "; ".join(messages)


def _log_dirs(answer: Sequence[Mapping[str, Any]]) -> list[LogDir]:
    return [
        LogDir(
            broker=int(broker["broker"]),
            path=str(log_dir["log_dir"]),
            failed=log_dir["error_code"] == kafka_errors.KafkaStorageError.errno,
            free_bytes=free if (free := int(log_dir.get("usable_bytes", -1))) >= 0 else None,
        )
        for broker in answer
        for log_dir in broker["log_dirs"]
    ]


def _partitions(
    admin: KafkaAdminClient,
    topics: Sequence[str],
    needed: Mapping[str, str],
    silent: frozenset[int],
) -> list[Partition]:
    return [
        Partition(
            leader=-1 if part["leader_id"] in silent else int(part["leader_id"]),
            replicas=frozenset(part["replica_nodes"]),
            in_sync=frozenset(part["isr_nodes"]) - {*part["offline_replicas"], *silent},
            needed=int(needed[topic["name"]]),
        )
        for topic in admin.describe_topics(list(topics))
        for part in topic["partitions"]
    ]
