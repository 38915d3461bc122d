"""Tests of a run addressed by its log: its first record describes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import UsageError
from dora_pipe.launch import run_dir as rundir
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.schemas.topics import Topics
from dora_pipe.store import log_location
from tests.support.command_line import Call, caller
from tests.support.recorded_run import RecordedRun

URL = "kafka://one:9092,two:9092"
ADDRESS = f"{URL}/recorded"


@pytest.fixture
def directory(recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def open_here(url: str, *more: object, **settings: object) -> Bus:
        return open_bus(f"sqlite:{recorded.log}" if url == URL else url)

    monkeypatch.setattr(rundir, "open_bus", open_here)
    monkeypatch.setattr(log_location, "open_bus", open_here)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("COLUMNS", "200")
    return caller(monkeypatch, capsys)


def test_its_configuration_is_the_recorded_one_with_the_address_that_was_used(
    directory: Path, recorded: RecordedRun
) -> None:
    with opened(ADDRESS) as run, opened(str(recorded.directory)) as own:
        assert (run.config.run, run.config.bus.url) == (own.config.run, URL)
        assert run.config.sampling == own.config.sampling
        assert run.topics == own.topics
    assert find_run(ADDRESS).words == ADDRESS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", ADDRESS, "g0000000010-001"), "published"),
        (("top", ADDRESS, "--once"), "waits"),
        (("why", ADDRESS), "finished"),
        (("log", "topics", ADDRESS), "recorded.trajectories"),
        (("log", "read", ADDRESS, "control", "--limit", "1"), "run-started"),
    ],
)
def test_who_looks_finds_it_and_leaves_nothing_behind(
    directory: Path, call: Call, words: tuple[str, ...], says: str
) -> None:
    code, out, err = call(*words)
    assert code == 0, err
    assert says in out
    assert list(directory.iterdir()) == []


def test_audit_proves_it_without_the_store_that_it_cannot_reach(
    directory: Path, call: Call
) -> None:
    code, out, err = call("audit", ADDRESS, "--quick", "--no-store")
    assert code == 0, out + err
    assert "holds: 0 violations" in out
    assert list(directory.iterdir()) == [], "there is no directory of the run to write to"


@pytest.mark.parametrize("address", ["kafka://", "kafka://one:9092", "kafka://one:9092/"])
def test_address_without_a_run_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not a run") as refused:
        find_run(address)
    assert refused.value.hint == "kafka://HOST:PORT[,HOST:PORT]/RUN"


def test_run_that_is_not_there_is_told_with_those_that_are(
    directory: Path, call: Call, recorded: RecordedRun
) -> None:
    code, _, err = call("show", f"{URL}/other", "3")
    assert code == 2
    assert err.splitlines() == [
        f"error: no run 'other' is on {URL}",
        f"hint: there are: {recorded.run}",
    ]


def test_run_that_has_topics_and_no_record_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.sqlite"
    bus = SqliteBus(log)
    bus.create([TopicSpec(name=topic, partitions=1) for topic in Topics("early").all()])
    bus.close()
    monkeypatch.setattr(rundir, "open_bus", lambda url: SqliteBus(log))
    with pytest.raises(UsageError, match="has not started"):
        find_run(f"{URL}/early").config()
