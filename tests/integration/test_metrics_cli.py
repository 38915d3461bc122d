"""Tests of `metrics` with a reachable and an unreachable log."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing

import pytest

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, LogTruncated, ResourceError, TopicMissing
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.http_server import PageServer
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe import following
from dora_pipe.observe.metrics import exporter as under_test
from dora_pipe.observe.metrics.exporter import Exporter, metrics_server
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore
from tests.support.command_line import Call
from tests.support.metrics import page_of, values_on
from tests.support.recorded_run import STEPS, RecordedRun

Answer = tuple[int, str, str]


@pytest.fixture
def bus(recorded: RecordedRun) -> Iterator[SqliteBus]:
    with closing(recorded.open()) as opened:
        yield opened


@pytest.fixture
def exporter(recorded: RecordedRun) -> Exporter:
    return Exporter(recorded.run, lambda _: [])


@pytest.fixture
def server(exporter: Exporter) -> Iterator[PageServer]:
    with metrics_server(exporter, port=0) as served:
        yield served


def port_of(server: PageServer) -> int:
    return int(server.origin.rpartition(":")[2])


def _ask(server: PageServer, path: str = "/metrics", host: str | None = None) -> Answer:
    with closing(
        http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)
    ) as connection:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        kind = answer.getheader("Content-Type") or ""
        return answer.status, kind, answer.read().decode()


def test_port_that_is_none_is_a_usage_error(call: Call, recorded: RecordedRun) -> None:
    code, _, err = call("metrics", recorded.directory, "--port", "70000")
    assert code == 2
    assert "Invalid value for '--port'" in err


def test_nothing_is_answered_before_the_log_was_read_once(
    server: PageServer, exporter: Exporter, bus: SqliteBus, recorded: RecordedRun
) -> None:
    assert _ask(server)[0] == 503
    stats = RunStats(recorded.run)
    with closing(stats.follow(bus, recorded.topics)) as follower:
        exporter.read(follower, stats)
    status, kind, text = _ask(server)
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert values_on(text)["dora_pipe_up"] == 1


def test_only_metrics_are_there_and_only_for_who_calls_this_machine_by_its_name(
    server: PageServer,
) -> None:
    assert server.origin.startswith("http://127.0.0.1:")
    assert _ask(server, "/")[0] == 404
    assert _ask(server, host="evil.example:9464")[0] == 400


def test_port_in_use_is_said_with_a_hint(server: PageServer, exporter: Exporter) -> None:
    with pytest.raises(ResourceError, match="is not available") as failed:
        metrics_server(exporter, port=port_of(server))
    assert "--port" in (failed.value.hint or "")


class _Clock(SystemClock):
    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_log_that_is_away_leaves_the_last_values_and_says_so_until_it_is_back(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, clock = Exporter(recorded.run, lambda _: []), _Clock()
    pages: list[dict[str, float]] = []
    real = LogFollower.advance

    def advance(follower: LogFollower) -> bool:
        if clock.slept == [following.TURN_S] or len(clock.slept) == 2:
            raise BusError("nobody answers")
        return real(follower)

    def stop() -> bool:
        if exporter.families is not None:
            pages.append(values_on(page_of(exporter)))
        return len(clock.slept) >= 4

    monkeypatch.setattr(LogFollower, "advance", advance)
    exporter.follow(bus, recorded.topics, clock, stop)
    assert clock.slept[1:3] == [following.RETRY_FIRST_S, 2 * following.RETRY_FIRST_S]
    ups = [page["dora_pipe_up"] for page in pages]
    assert ups[0] == ups[-1] == 1 and not all(ups)
    assert all(page["dora_pipe_policy_version"] == STEPS for page in pages)


def test_run_that_has_not_begun_is_waited_for_by_name_and_then_read(
    bus: SqliteBus,
    recorded: RecordedRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter, clock = Exporter(recorded.run, lambda _: []), _Clock()
    pages: list[dict[str, float]] = []

    class Early(RunStats):
        def follow(self, bus: Bus, topics: Topics, *, statuses: bool = True) -> LogFollower:
            if len(clock.slept) < 3:
                raise TopicMissing("no topic recorded.metrics")
            return super().follow(bus, topics, statuses=statuses)

    def stop() -> bool:
        if exporter.families is not None:
            pages.append(values_on(page_of(exporter)))
        return len(clock.slept) >= 4

    monkeypatch.setattr(under_test, "RunStats", Early)
    exporter.follow(bus, recorded.topics, clock, stop)
    assert caplog.messages == ["metrics wait for run recorded to begin"]
    assert all(page["dora_pipe_up"] == 1 for page in pages)
    assert not any(name.startswith("dora_pipe_run_info") for name in pages[0])
    assert pages[0]["dora_pipe_steps_total"] == 0
    assert pages[-1]["dora_pipe_steps_total"] == STEPS


def test_run_whose_topics_went_away_is_no_run_that_has_not_begun(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, clock = Exporter(recorded.run, lambda _: []), _Clock()
    real = LogFollower.advance

    def advance(follower: LogFollower) -> bool:
        if clock.slept:
            raise TopicMissing("no topic recorded.metrics")
        return real(follower)

    monkeypatch.setattr(LogFollower, "advance", advance)
    exporter.follow(bus, recorded.topics, clock, lambda: len(clock.slept) >= 2)
    values = values_on(page_of(exporter))
    assert values["dora_pipe_up"] == 0
    assert values["dora_pipe_steps_total"] == STEPS


def test_log_that_lost_what_was_read_ends_the_exporter(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advance(follower: LogFollower) -> bool:
        raise LogTruncated("gone")

    monkeypatch.setattr(LogFollower, "advance", advance)
    with pytest.raises(LogTruncated):
        Exporter(recorded.run, lambda _: []).follow(bus, recorded.topics, _Clock())


def test_ratios_of_the_newest_step_are_looked_at_once(
    bus: SqliteBus, recorded: RecordedRun
) -> None:
    asked: list[str] = []

    def rows(sha256: str) -> list[dict[str, object]]:
        asked.append(sha256)
        return [{"ratio_mean": 2.0, "staleness": 1}, {"ratio_mean": 1.0, "staleness": 1}]

    exporter = Exporter(recorded.run, rows)
    stats = RunStats(recorded.run)
    with closing(stats.follow(bus, recorded.topics)) as follower:
        exporter.read(follower, stats)
        exporter.read(follower, stats)
    assert len(asked) == 1
    assert PolicyStore(recorded.store).has_blob("contributions", asked[0])
    values = values_on(page_of(exporter))
    assert values["dora_pipe_step_effective_sample_ratio"] == pytest.approx(0.9)
    mismatch = values['dora_pipe_step_logprob_mismatch{staleness="1"}']
    assert mismatch == pytest.approx(0.3466, abs=1e-4)
