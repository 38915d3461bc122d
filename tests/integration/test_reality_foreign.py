"""Tests of foreign records in the topics: a run continues, or ends with one clear line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.core.errors import DoraError, InvariantBroken, SchemaError
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import (
    Command,
    LoggedEntry,
    RoleStarted,
    StepCommitted,
    TrajectoriesLogged,
    decode_control,
)
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.rounds import Round, StopRun, decode_round
from dora_pipe.schemas.wire import encode
from tests.support.cluster import ORCHESTRATOR, Cluster, make_config

EVERY_TICKS = 9
"""Between two foreign records."""
WARM_TICKS = 120
"""Until there is something to copy and to forge."""

GARBAGE = (b"", b"\x00\xff\xfe not json", b'{"kind": 7}', b'["a", "list"]', b"\xff" * 200_000)
UNKNOWN = b'{"kind":"weather-changed","at_ns":1,"to":"rain"}'
WRONG_SCHEMA = b'{"kind":"step-committed","at_ns":"yesterday","step":-1}'


LIES = (
    "starts another run",
    "by w9, but no decision scheduled it there",
    "is of another run, in the log at trajectories:1:",
    "its bytes at trajectories:2:",
    "was logged, but trajectories:",
    "is committed twice",
)
"""What audit names of the foreign records, sorted by its lines: these, and nothing else."""


def value_of(cluster: Cluster, kind: type) -> bytes:
    records = cluster.records(cluster.topics.control)
    return next(
        record.value for record in records if isinstance(decode_control(record.value), kind)
    )


def in_control(cluster: Cluster) -> list[bytes]:
    other = encode(cluster.run_started).replace(b'"small"', b'"other"')
    commit = decode_control(value_of(cluster, StepCommitted))
    assert isinstance(commit, StepCommitted)
    entry = LoggedEntry(
        trajectory="g0000000000-000",
        attempt=1,
        partition=0,
        offset=5,
        sha256="0" * 64,
        bytes=10,
        reward=1.0,
        tokens=3,
        finish="stop",
    )
    lies = [
        other,
        encode(commit),
        value_of(cluster, TrajectoriesLogged),
        encode(
            TrajectoriesLogged(
                at_ns=1,
                worker="w9",
                incarnation=3,
                version=0,
                digest="0" * 64,
                trajectories=(entry,),
            )
        ),
        encode(
            RoleStarted(
                at_ns=1, role="trainer", incarnation=0, instance="x", host="x", pid=1, package="0"
            )
        ),
        encode(Command(at_ns=1, user="nobody", verb="drain", args={"worker": "w9"})),
    ]
    return [*GARBAGE, UNKNOWN, WRONG_SCHEMA, *lies]


def in_trajectories(cluster: Cluster) -> list[Append]:
    topic = cluster.topics.trajectories
    real = cluster.records(topic)[0]
    run = (("run", b"other"),)
    headers = tuple(header for header in real.headers if header[0] != "run")
    return [
        *(
            Append(topic=topic, partition=index % 3, value=value)
            for index, value in enumerate(GARBAGE)
        ),
        Append(topic=topic, partition=1, value=b"x", headers=(("version", b"-1"), ("x", b"y"))),
        Append(topic=topic, partition=1, value=real.value, headers=(*run, *headers)),
        Append(topic=topic, partition=2, value=b"forged", headers=real.headers, key=real.key),
        Append(
            topic=topic,
            partition=real.partition,
            value=real.value,
            headers=real.headers,
            key=real.key,
        ),
    ]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, make_config(run__steps=12), on_disk=False)


def sprinkle(cluster: Cluster, records: Sequence[Append]) -> None:
    writer = cluster.bus.writer()
    for record in records:
        writer.append([record])
        cluster.ticks(EVERY_TICKS)


def test_a_run_among_foreign_records_ends_whole_its_dead_letters_hold_them_and_audit_names_them(
    cluster: Cluster,
) -> None:
    with cluster:
        cluster.until(lambda: cluster.version >= 1)
        topics = cluster.topics
        sprinkle(
            cluster, [Append(topic=topics.control, value=entry) for entry in in_control(cluster)]
        )
        sprinkle(cluster, [Append(topic=topics.metrics, value=value) for value in GARBAGE])
        sprinkle(cluster, in_trajectories(cluster))
        sprinkle(cluster, [Append(topic=topics.progress, value=value) for value in GARBAGE])
        cluster.restart(ORCHESTRATOR)
        cluster.restart("trainer")
        cluster.run()
        report = audit(cluster.bus, topics, cluster.store.root)
        assert report.finished
        assert report.steps == cluster.config.run.steps
        lines = [violation.line for violation in report.violations]
        assert len(lines) == len(LIES), lines
        for line, lie in zip(sorted(lines), LIES, strict=True):
            assert lie in line
        letters = cluster.records(topics.dead_letters)
        buried = [decode_dead_letter(letter.value, letter.headers) for letter in letters]
        for topic in (topics.control, topics.metrics, topics.trajectories):
            garbage = {
                (record.partition, record.offset): record.value
                for record in cluster.records(topic)
                if record.value in GARBAGE
            }
            held = {
                (record.partition, record.offset): record.value
                for record in buried
                if record.topic == topic
            }
            assert len(garbage) == len(GARBAGE)
            assert garbage.items() <= held.items(), topic
        whys = [letter.reason for letter in buried if letter.topic == topics.trajectories]
        assert any("a record of run other" in why for why in whys)
        assert any("not the sha256" in why for why in whys)


def newest_round(cluster: Cluster) -> Round:
    return decode_round(cluster.records(cluster.topics.decisions)[-1].value)


def stop(cluster: Cluster, *, ordinal: int, incarnation: int) -> bytes:
    last = newest_round(cluster)
    return encode(
        Round(
            ordinal=last.ordinal + ordinal,
            incarnation=last.incarnation + incarnation,
            now_ns=last.now_ns,
            control_next=last.control_next,
            decisions=(StopRun(reason="forged"),),
        )
    )


FORGED: dict[str, tuple[Callable[[Cluster], bytes], type[DoraError], str]] = {
    "garbage": (lambda cluster: GARBAGE[1], SchemaError, "decisions offset"),
    "a later round": (
        lambda cluster: stop(cluster, ordinal=9, incarnation=0),
        InvariantBroken,
        "comes after round",
    ),
    "a round twice": (
        lambda cluster: encode(newest_round(cluster)),
        InvariantBroken,
        "comes after round",
    ),
    "the next round, forged": (
        lambda cluster: stop(cluster, ordinal=1, incarnation=0),
        InvariantBroken,
        "comes after round",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_foreign_record_among_the_decisions_ends_the_run_with_one_line(
    cluster: Cluster, name: str
) -> None:
    forge, error, words = FORGED[name]
    with cluster:
        cluster.ticks(WARM_TICKS)
        value = forge(cluster)
        cluster.bus.writer().append([Append(topic=cluster.topics.decisions, value=value)])
        with pytest.raises(error, match=words) as caught:
            cluster.run()
        assert "\n" not in caught.value.message
        assert caught.value.hint
        with pytest.raises((SchemaError, InvariantBroken)) as again:
            cluster.restart(ORCHESTRATOR)
        assert "\n" not in again.value.message, "an orchestrator does not go on from it either"


def test_a_round_of_an_older_orchestrator_is_obeyed_by_nobody(cluster: Cluster) -> None:
    with cluster:
        cluster.restart(ORCHESTRATOR)
        cluster.ticks(WARM_TICKS)
        value = stop(cluster, ordinal=1, incarnation=-1)
        cluster.bus.writer().append([Append(topic=cluster.topics.decisions, value=value)])
        cluster.run()
        report = audit(cluster.bus, cluster.topics, cluster.store.root)
        assert report.steps == cluster.config.run.steps, "nobody went when it told them to"
        assert not report.holds, "and audit says that it is there"
