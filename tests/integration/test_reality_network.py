"""A network that stalls, cuts, loses answers or crawls between us and a real broker.

Every wait is bounded, every failure is one of our errors on one line, nothing acknowledged is lost,
and what may have happened twice says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.client import PROBE_LIMIT_S, QUIET_LIMIT_S
from dora_pipe.core.errors import BusError, OutcomeUnknown
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.kafka_broker import KafkaBroker, advertise
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

AT = TopicPartition("t", 0)
LIMIT_S = 3.0
"""Delivery limit of the bus under test."""
SLACK_S = 60.0
WAIT_S = 60.0


class Line:
    def __init__(self, broker: KafkaBroker, proxy: Proxy) -> None:
        self.proxy = proxy
        self.bus = KafkaBus([proxy.address], delivery_limit_s=LIMIT_S)
        self.around = KafkaBus([broker.bootstrap])

    def log(self) -> list[str]:
        reader = self.around.reader({AT: 0})
        records: list[Record] = []
        end = self.around.end(AT)
        until_s = time.monotonic() + WAIT_S
        while reader.position(AT) < end:
            records += reader.poll(timeout_s=0.2)
            assert time.monotonic() < until_s
        reader.close()
        return [record.value.decode() for record in records]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, Proxy]]:
    folder: Path = tmp_path_factory.mktemp("proxied")
    with Proxy(lambda: broker.address("PROXIED")) as proxy:
        broker = KafkaBroker(folder, listeners={"PROXIED": "PLAINTEXT"})
        advertise(broker, "PROXIED", proxy.address)
        with broker:
            yield broker, proxy
    gc.collect()


@pytest.fixture
def line(proxied: tuple[KafkaBroker, Proxy]) -> Iterator[Line]:
    line = Line(*proxied)
    line.around.create([TopicSpec(name="t")])
    yield line
    line.proxy.flow()
    line.bus.close()
    admin = line.around._admin
    admin.delete_topics(["t"])
    until_s = time.monotonic() + WAIT_S
    while "t" in line.around.topics():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    line.around.close()
    gc.collect()


def texts(*given: str) -> list[Append]:
    return [Append(topic="t", value=text.encode()) for text in given]


def append_again(line: Line, text: str) -> None:
    writer = line.bus.writer()
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            writer.append(texts(text))
            return
        except BusError as error:
            assert "\n" not in error.message
            assert time.monotonic() < until_s


@pytest.mark.parametrize("exclusive", ["", "stalled"])
def test_a_stall_beyond_the_limit_is_an_unknown_outcome_in_bounded_time(
    line: Line, exclusive: str
) -> None:
    writer = line.bus.writer(exclusive=exclusive or None)
    writer.append(texts("a"))
    line.proxy.stall()
    began_s = time.monotonic()
    with pytest.raises(OutcomeUnknown) as unknown:
        writer.append(texts("perhaps"))
    assert time.monotonic() - began_s < LIMIT_S + SLACK_S
    assert "\n" not in unknown.value.message
    line.proxy.flow()
    if exclusive:
        with pytest.raises(BusError, match="open a new one"):
            writer.append(texts("never"))
        line.bus.writer(exclusive=exclusive).append(texts("z"))
        assert line.log() in (["a", "z"], ["a", "perhaps", "z"])
    else:
        append_again(line, "z")
        log = line.log()
        assert [entry for entry in log if entry != "perhaps"] == ["a", "z"]
        assert log.count("perhaps") <= 1


def test_a_reader_behind_a_stall_says_so_and_goes_on_without_a_gap(line: Line) -> None:
    reader = line.bus.reader({AT: 0})
    line.around.writer().append(texts("a"))
    values = [record.value for record in reader.poll(timeout_s=WAIT_S)]
    began_s = time.monotonic()
    while time.monotonic() - began_s < QUIET_LIMIT_S + 1:
        assert reader.poll(timeout_s=0.1) == [], "a quiet log is no outage"
    line.proxy.stall()
    line.around.writer().append(texts("b", "c"))
    began_s = time.monotonic()
    with pytest.raises(BusError):
        while time.monotonic() - began_s < WAIT_S:
            values += [record.value for record in reader.poll(timeout_s=0.1)]
    assert time.monotonic() - began_s < QUIET_LIMIT_S + PROBE_LIMIT_S + SLACK_S
    line.proxy.flow()
    until_s = time.monotonic() + WAIT_S
    while len(values) < 3 and time.monotonic() < until_s:
        with suppress(BusError):
            values += [record.value for record in reader.poll(timeout_s=0.2)]
    assert values == [b"a", b"b", b"c"]


def test_cut_connections_lose_nothing_and_double_nothing(line: Line) -> None:
    plain, exclusive = line.bus.writer(), line.bus.writer(exclusive="cut")
    reader = line.bus.reader({AT: 0})
    acknowledged: list[str] = []
    cut = 0
    for number in range(30):
        if number % 5 == 2:
            cut += line.proxy.reset()
        text = f"{number}"
        try:
            if number % 2:
                plain.append(texts(text))
            else:
                exclusive.append(texts(text))
        except OutcomeUnknown:
            exclusive = line.bus.writer(exclusive="cut")
            continue
        acknowledged.append(text)
    assert cut > 5
    log = line.log()
    assert [entry for entry in log if entry in acknowledged] == acknowledged
    assert len(acknowledged) >= 20
    read: list[str] = []
    until_s = time.monotonic() + WAIT_S
    while len(read) < len(log) and time.monotonic() < until_s:
        with suppress(BusError):
            read += [record.value.decode() for record in reader.poll(timeout_s=0.2)]
    assert read == log


def test_a_lost_answer_is_an_unknown_outcome_and_appending_again_is_seen_as_that(
    line: Line,
) -> None:
    writer = line.bus.writer()
    writer.append(texts("a"))
    line.proxy.drop_answers()
    with pytest.raises(OutcomeUnknown):
        writer.append(texts("b"))
    assert line.proxy.dropped_bytes > 0
    assert line.log() == ["a", "b"], "it is there, and nobody was told"
    line.proxy.flow()
    line.proxy.reset()
    append_again(line, "b")
    assert line.log() == ["a", "b", "b"], "identity, not the bus, makes the second harmless"


def test_a_lost_answer_of_an_exclusive_writer_is_settled_by_its_successor(line: Line) -> None:
    first = line.bus.writer(exclusive="heir")
    first.append(texts("a"))
    line.proxy.drop_answers()
    with pytest.raises(OutcomeUnknown):
        first.append(texts("b"))
    line.proxy.flow()
    line.proxy.reset()
    second = line.bus.writer(exclusive="heir")
    before = line.log()
    assert before in (["a"], ["a", "b"])
    second.append(texts("c"))
    assert line.log() == [*before, "c"], "what it read before it wrote is final"


def test_a_reader_on_a_slow_line_is_held_back_and_sees_no_outage(line: Line) -> None:
    value = bytes(range(256)) * 8192
    line.around.writer().append([Append(topic="t", value=value)])
    reader = line.bus.reader({AT: 0})
    line.proxy.slow(len(value) / 5)
    came: list[Record] = []
    held: list[TopicPartition] = []
    until_s = time.monotonic() + WAIT_S
    while not came and time.monotonic() < until_s:
        came = reader.poll(timeout_s=0.2)
        held = held or reader.held_back()
    assert [record.value for record in came] == [value]
    assert held == [AT]
    assert reader.poll(timeout_s=0.0) == [] and reader.held_back() == []
