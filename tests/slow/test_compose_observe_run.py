"""A run on a real broker is shown as compose.yaml shows it, from before it begins; and by `ui`.

What shows it are processes with the words, environment and configuration of their services. The
run is a recorded one, copied into the broker's topics record by record, to the same offsets.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.port import Append, Bus, Record, TopicPartition, TopicSpec
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.observe.metrics.exporter import Exporter
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.traces import names
from tests.support.compose import Containers, read
from tests.support.kafka_broker import KafkaBroker, free_ports
from tests.support.metrics import page_of
from tests.support.otlp_endpoint import OtlpEndpoint
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.traces import check_whole
from tests.support.user_run import until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LIMIT_S = 300.0
COUNTED = (
    "dora_pipe_steps_total",
    "dora_pipe_groups_ended_total",
    "dora_pipe_trajectories_total",
    "dora_pipe_staleness_steps_",
)
"""Metrics of records that were read, whatever log they are on."""


def test_run_is_shown_from_before_it_begins_until_it_is_over(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    services = read({"DORA_PIPE_RUN": recorded.run})
    observers = {name: one for name, one in services.items() if one.files}
    (port,) = free_ports(1)
    settings = services["kafka"].plain_settings()
    with (
        KafkaBroker(tmp_path / "broker", settings=settings) as broker,
        OtlpEndpoint() as endpoint,
    ):
        hosts = {
            "kafka:19092": broker.bootstrap,
            "otel-collector:4318": endpoint.address.removeprefix("http://"),
            "0.0.0.0": "127.0.0.1",
            "9464": str(port),
        }
        with Containers(tmp_path, {}, hosts, beside=observers) as containers:
            containers.launch("metrics")
            traces = containers.launch("traces")
            watched_from_before(containers, port)
            shutil.copytree(recorded.store, containers.volume("store"), dirs_exist_ok=True)
            pour(recorded, broker.bootstrap)
            check_metrics(recorded, containers, port)
            check_traces(traces, containers, endpoint)
            place = tmp_path / "elsewhere"
            check_pages([str(with_log_at(recorded, broker.bootstrap, place))], place)
            check_pages([f"kafka://{broker.bootstrap}/{recorded.run}"], place)


def pour(recorded: RecordedRun, bootstrap: str) -> None:
    """The log into topics of the broker; rounds last, as they lead to all others."""
    with closing(recorded.open()) as log, closing(KafkaBus([bootstrap])) as bus:
        topics = recorded.topics.all()
        bus.create([TopicSpec(name=one, partitions=log.partitions(one)) for one in topics])
        with closing(bus.writer()) as plain, closing(bus.writer(exclusive="pour")) as alone:
            for topic in sorted(topics, key=lambda one: one == recorded.topics.decisions):
                for partition in range(log.partitions(topic)):
                    at = TopicPartition(topic, partition)
                    for records, follows in pieces(log, at):
                        (alone if follows else plain).append([again(one) for one in records])
                    # The end of a transaction is acknowledged before its mark lies in the topic.
                    end = log.end(at)
                    until(lambda at=at, end=end: bus.end(at) == end, LIMIT_S)  # type: ignore[misc]


def pieces(log: Bus, at: TopicPartition) -> Iterator[tuple[list[Record], bool]]:
    """Records without a gap among them, and whether one follows: it is the end of a transaction."""
    end = log.end(at)
    records = list(records_of(log, {at: end}))
    nexts = [*(one.offset for one in records[1:]), end]
    piece: list[Record] = []
    for record, following in zip(records, nexts, strict=False):
        piece.append(record)
        gap = following - record.offset - 1
        assert gap in (0, 1)
        if gap or following == end:
            yield piece, bool(gap)
            piece = []


def again(record: Record) -> Append:
    """The same, to be written."""
    return Append(
        topic=record.topic,
        partition=record.partition,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )


def watched_from_before(containers: Containers, port: int) -> None:
    """Both wait by name for a run whose topics nobody has made, and are well."""
    until(lambda: "metrics wait for run recorded to begin" in containers.said("metrics"), LIMIT_S)
    until(lambda: 'dora_pipe_steps_total{run="recorded"} 0.0\n' in metrics_at(port), LIMIT_S)
    assert containers.check("metrics") == 0
    until(lambda: "traces wait: the log has no run recorded" in containers.said("traces"), LIMIT_S)


def metrics_at(port: int) -> str:
    """What Prometheus would be told; nothing where there is no answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text: bytes = answer.read()
            return text.decode()
    except urllib.error.URLError:
        return ""


def check_metrics(recorded: RecordedRun, containers: Containers, port: int) -> None:
    """The run on the broker is told as the recorded one is."""
    until(lambda: 'dora_pipe_run_over{run="recorded"} 1.0\n' in metrics_at(port), LIMIT_S)
    exporter = Exporter(recorded.run, lambda sha256: ())
    with closing(recorded.open()) as log:
        stats = RunStats(recorded.run)
        with closing(stats.follow(log, recorded.topics)) as follower:
            exporter.read(follower, stats)
    assert counts_in(metrics_at(port)) == counts_in(page_of(exporter))
    assert containers.check("metrics") == 0
    waits = [one for one in containers.said("metrics").splitlines() if "wait for run" in one]
    assert len(waits) == 1, "a wait is said once"


def counts_in(page: str) -> list[str]:
    """What of a page is counted record by record."""
    found = [one for one in page.splitlines() if one.startswith(COUNTED)]
    assert {one.split("{")[0] for one in found} >= set(COUNTED[:3])
    return found


def check_traces(
    process: subprocess.Popen[bytes], containers: Containers, endpoint: OtlpEndpoint
) -> None:
    """Everything was sent, once, and the follower has ended with the run."""
    assert process.wait(LIMIT_S) == 0, containers.said("traces")
    spans = endpoint.spans
    check_whole(spans)
    steps = {one.attributes[names.STEP]: one for one in spans if one.stage == "step"}
    assert steps.keys() == set(range(STEPS))
    assert all(step.links for step in steps.values())
    trained = {one.attributes[names.STEP] for one in spans if one.stage == "trained"}
    assert trained == steps.keys()
    assert {one["dora.run"] for one in endpoint.resources()} == {"recorded"}
    assert f"{len(spans)} spans" in containers.said("traces")


def with_log_at(recorded: RecordedRun, bootstrap: str, place: Path) -> Path:
    """A run directory of somebody who has the configuration alone; its log is on the broker."""
    directory = place / "runs" / "mine"
    directory.mkdir(parents=True)
    config = load_config(recorded.directory / "config.toml", [f"bus.url=kafka://{bootstrap}"])
    (directory / "config.toml").write_text(dump_toml(config))
    return directory


@contextmanager
def pages_of(words: Sequence[str], place: Path) -> Iterator[str]:
    """`dora-pipe ui WORDS` at a free port: where it serves."""
    process = subprocess.Popen(
        [Path(sys.executable).parent / "dora-pipe", "ui", *words, "--port", "0"],
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def check_pages(words: Sequence[str], place: Path) -> None:
    """`ui` shows a run whose log is on Kafka: its lists, and tokens that it reads there."""
    with pages_of(words, place) as address:

        def ask(path: str) -> Any:
            with urllib.request.urlopen(f"{address}api/{path}", timeout=LIMIT_S) as answer:
                return json.load(answer)

        until(lambda: ask("run")["read"] == 1.0, LIMIT_S)
        shown = ask("run")
        assert (shown["name"], shown["state"]) == ("recorded", "finished")
        assert [row[0] for row in ask("steps")["rows"]] == list(reversed(range(STEPS)))
        first = ask("trajectories?fate=trained")["rows"][0][0]
        page = ask(f"trajectory/{first}")
        assert page["record"]["tokens"], "the record itself was read from Kafka"
        assert page["lineage"]
