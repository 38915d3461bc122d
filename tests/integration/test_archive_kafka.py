"""Archives of a log on a real broker that deletes its beginning, as retention does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPartition

from dora_pipe.audit.archive import Archiver, Pass, verify
from dora_pipe.audit.reading import records_of
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.tiered import TieredBus, tiered
from dora_pipe.bus.claim_check import ClaimBus, ClaimFiles
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.port import Append, Bus, Record, TopicPartition, TopicSpec
from dora_pipe.core.errors import LogTruncated
from dora_pipe.schemas.topics import Topics
from tests.support.bus_archive import everything as of_all
from tests.support.bus_archive import partitions_of
from tests.support.kafka_broker import KafkaBroker
from tests.support.user_run import until

pytestmark = pytest.mark.kafka

PARTITIONS = 2


@pytest.fixture
def topics() -> Topics:
    return Topics(f"run-{uuid4().hex[:8]}")


@pytest.fixture
def bus(kafka_broker: KafkaBroker, topics: Topics) -> Iterator[KafkaBus]:
    with closing(KafkaBus([kafka_broker.bootstrap])) as made:
        wide = TopicSpec(name=topics.trajectories, partitions=PARTITIONS)
        others = [TopicSpec(name=one) for one in topics.all() if one != topics.trajectories]
        made.create([*others, wide])
        yield made


def fill(bus: Bus, topics: Topics, name: str, count: int = 6) -> None:
    """Plain appends to trajectories, transactions (with their gaps) to control, all of them
    visible: a broker answers a commit before it has marked the partition."""
    last = 0
    with closing(bus.writer()) as plain, closing(bus.writer(exclusive=f"{topics.run}.w")) as alone:
        for n in range(count):
            value = f"{name}-{n}".encode()
            plain.append(
                [
                    Append(topic=topics.trajectories, partition=n % PARTITIONS, value=value),
                    Append(topic=topics.metrics, value=value),
                ]
            )
            (last,) = alone.append([Append(topic=topics.control, value=value, key=b"k")])
    until(lambda: bus.end(TopicPartition(topics.control, 0)) > last)


def archive(bus: Bus, topics: Topics, place: Path) -> Pass:
    with closing(Archiver(bus, topics, place, segment_bytes=20)) as archiver:
        return archiver.once()


def delete(broker: KafkaBroker, tp: TopicPartition, before: int) -> None:
    """What retention does, at once."""
    with closing(KafkaAdminClient(bootstrap_servers=[broker.bootstrap])) as admin:
        admin.delete_records({KafkaPartition(*tp): before})


def everything(bus: Bus, topics: Topics) -> dict[TopicPartition, list[Record]]:
    return of_all(bus, partitions_of({one: bus.partitions(one) for one in topics.all()}))


def test_an_archive_reads_as_the_broker_did_and_takes_over_what_it_deletes(
    kafka_broker: KafkaBroker, bus: KafkaBus, topics: Topics, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    fill(bus, topics, "early")
    archive(bus, topics, place)
    with closing(ArchiveBus(place)) as kept:
        assert everything(kept, topics) == everything(bus, topics)
        assert {tp: kept.end(tp) for tp in everything(kept, topics)} == {
            tp: bus.end(tp) for tp in everything(bus, topics)
        }
    fill(bus, topics, "late")
    whole = everything(bus, topics)
    tp, control = TopicPartition(topics.trajectories, 0), TopicPartition(topics.control, 0)
    delete(kafka_broker, tp, 2)
    delete(kafka_broker, control, 3)
    assert (bus.begin(tp), bus.begin(control)) == (2, 3)
    line = rf"{tp.topic}/0 begins at 2: the records from offset 0 on were deleted"
    with pytest.raises(LogTruncated, match=line) as refused:
        list(records_of(bus, {tp: bus.end(tp)}))
    assert refused.value.hint is not None and "--archive" in refused.value.hint
    both = TieredBus(ArchiveBus(place), bus)
    assert everything(both, topics) == whole
    both.archive.close()
    archive(bus, topics, place)
    assert verify(place).problems == []
    with closing(ArchiveBus(place)) as kept:
        assert everything(kept, topics) == whole


def test_a_beginning_that_was_deleted_before_it_was_archived_is_named(
    kafka_broker: KafkaBroker, bus: KafkaBus, topics: Topics, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    fill(bus, topics, "early")
    tp = TopicPartition(topics.trajectories, 1)
    delete(kafka_broker, TopicPartition(topics.metrics, 0), 4)
    done = archive(bus, topics, place)
    assert done.notes == [
        f"{topics.metrics}/0: offsets 0 to 3 were deleted before they were archived"
    ]
    fill(bus, topics, "late")
    gone = bus.end(tp) - 1
    cut = gone // 2 + 1
    delete(kafka_broker, tp, gone)
    line = f"begins at {gone}: the records from offset {cut} on were deleted before"
    with pytest.raises(LogTruncated, match=line) as refused:
        archive(bus, topics, place)
    assert "another archive" in (refused.value.hint or "")
    assert "--archive" not in (refused.value.hint or ""), "whoever archives has no other one yet"
    assert verify(place).problems == []
    with closing(ArchiveBus(place)) as kept, pytest.raises(LogTruncated, match="are in neither"):
        TieredBus(kept, bus).reader({tp: 0})


def test_large_values_are_archived_with_the_log_that_claims_them(
    bus: KafkaBus, topics: Topics, tmp_path: Path
) -> None:
    live = ClaimBus(bus, ClaimFiles(tmp_path / "claims"), above_bytes=100)
    place = tmp_path / "kept"
    large = bytes(range(256)) * 10
    with closing(live.writer()) as writer:
        writer.append([Append(topic=topics.trajectories, value=large), _small(topics)])
    archive(live, topics, place)
    assert verify(place).claims == 1
    kept = ClaimBus(ArchiveBus(place), ClaimFiles(place / "claims"))
    with closing(kept):
        assert everything(kept, topics) == everything(live, topics)
    for path in (tmp_path / "claims").iterdir():
        path.unlink()
    both = tiered(live, place)
    (first, _) = everything(both, topics)[TopicPartition(topics.trajectories, 0)]
    assert first.value == large
    for path in (place / "claims").iterdir():
        path.unlink()
    assert "the value that it claims is gone" in verify(place).problems[0]


def _small(topics: Topics) -> Append:
    return Append(topic=topics.trajectories, value=b"small")
