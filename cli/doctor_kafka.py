"""What `dora-pipe doctor` says of a Kafka cluster: brokers, and the topics of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dora_pipe.bus.checks import check_same
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.cluster import (
    WANTED_REPLICAS,
    TopicFacts,
    brokers_of,
    fetch_problem,
    problems_of,
    replica_fetch_bytes,
)
from dora_pipe.bus.port import Bus, TopicSpec
from dora_pipe.cli.check_result import CheckResult, State, failed
from dora_pipe.config.model import Config
from dora_pipe.core.errors import AccessRefused, BusError
from dora_pipe.schemas.topics import Topics


def cluster_findings(
    bus: Bus, config: Config | None, topics: Sequence[str]
) -> Iterator[CheckResult]:
    """Rows about the brokers, and about the settings of a run's topics that are there."""
    assert isinstance(bus, KafkaBus), "the log of a kafka: address"
    count = len(bus.ask(brokers_of))
    enough = count >= WANTED_REPLICAS
    means = "any one of their machines may die" if enough else "what they hold dies with a disk"
    yield CheckResult(what="brokers", state="ok" if enough else "note", detail=f"{count}: {means}")
    if config is None or not topics:
        return
    facts = bus.facts(topics)
    found = [*_sizes(facts, config), *_settings(facts), *_brokers(bus, facts)]
    yield from found or [CheckResult(what="settings", state="ok", detail="of all its topics")]


def _sizes(facts: Sequence[TopicFacts], config: Config) -> Iterator[CheckResult]:
    """What the run itself would refuse."""
    names = Topics(config.run.name)
    for topic in facts:
        many = topic.name in (names.trajectories, names.progress)
        wanted = TopicSpec(
            name=topic.name,
            partitions=config.bus.partitions if many else 1,
            record_bytes_max=config.bus.record_bytes_max,
        )
        try:
            check_same(wanted, topic.spec)
        except BusError as error:
            yield failed("settings", error)


def _settings(facts: Sequence[TopicFacts]) -> Iterator[CheckResult]:
    for one in (each for topic in facts for each in problems_of(topic)):
        state: State = "fail" if one.fatal else "note"
        yield CheckResult(what="settings", state=state, detail=f"{one.text}; {one.hint}")


def _brokers(bus: KafkaBus, facts: Sequence[TopicFacts]) -> Iterator[CheckResult]:
    try:
        fetched = bus.ask(replica_fetch_bytes)
    except AccessRefused:
        return
    if fetched is None:
        return  # the cluster tells an administrator only
    small = next(filter(None, (fetch_problem(topic, fetched) for topic in facts)), None)
    if small is not None:
        yield CheckResult(what="brokers", state="note", detail=f"{small.text}; {small.hint}")
