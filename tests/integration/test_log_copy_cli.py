"""`log copy`: a run's log as one file or on a broker, opened by the other commands."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.analysis.replay import SourceRun, replay_steps
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.launch.run_dir import find_run, opened
from dora_pipe.store.store import PolicyStore
from tests.support.command_line import Call, caller
from tests.support.kafka_broker import KafkaBroker
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.worker import VirtualClock


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return caller(monkeypatch, capsys)


@pytest.fixture
def sealed(call: Call, copy: RecordedRun, tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    copy.directory.rename(tmp_path / "runs" / copy.run)
    file = tmp_path / "sealed.sqlite"
    code, _, err = call("log", "copy", copy.run, file)
    assert code == 0, err
    (tmp_path / "runs" / copy.run / "log.sqlite").rename(tmp_path / "moved.sqlite")
    (tmp_path / "runs" / copy.run / "config.toml").unlink()
    return file


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "sealed.sqlite"), "recorded"),
        (("show", "sealed.sqlite", "g0000000010-001"), "published"),
        (("why", "sealed.sqlite"), "finished"),
        (("sql", "sealed.sqlite", "SELECT count(*) AS n FROM steps"), str(STEPS)),
    ],
)
def test_commands_open_a_copy(sealed: Path, call: Call, words: tuple[str, ...], says: str) -> None:
    code, out, err = call(*words)
    assert code == 0, err
    assert says in out


def test_audit_of_a_copy_equals_the_audit_of_its_source(sealed: Path, call: Call) -> None:
    code, own, err = call("audit", "moved.sqlite", "--json")
    assert code == 0, err
    code, copied, err = call("audit", sealed, "--json")
    assert code == 0, err
    assert json.loads(copied) == json.loads(own)


def test_replay_of_a_copy_trains_the_committed_weights(sealed: Path, recorded: RecordedRun) -> None:
    with opened(str(sealed)) as run:
        source = SourceRun(
            bus=run.bus,
            topics=run.topics,
            store=PolicyStore(recorded.store),
            make=lambda started: SimulatedLearner(),
            clock=VirtualClock(),
        )
        lines = list(replay_steps(source, range(3, 5)))
    assert len(lines) == 2 and all(line.replayed.equal for line in lines)


def test_copy_that_lies_among_the_runs_is_found_by_name(sealed: Path, call: Call) -> None:
    shutil.copy(sealed, "runs/again.sqlite")
    assert call("show", "again")[0] == 0
    with opened("again") as run:
        assert run.topics.run == "recorded"
    assert find_run("runs/again.sqlite").words == "runs/again.sqlite"


def test_changed_byte_of_a_copy_is_named(sealed: Path, call: Call) -> None:
    with closing(sqlite3.connect(sealed)) as file, file:
        (index,) = file.execute(
            "SELECT at FROM log WHERE topic = 'recorded.decisions' AND offset > 40 LIMIT 1"
        ).fetchone()
        file.execute("UPDATE records SET value = CAST(value || ' ' AS BLOB) WHERE at = ?", (index,))
    code, _, err = call("log", "copy", "moved.sqlite", sealed)
    assert code == 5
    assert "recorded.decisions/0 differs from its source" in err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("moved.sqlite", "same log"),
        ("copy.db", "cannot hold a copy"),
        ("nowhere/copy.sqlite", "there is no folder"),
        ("kafka://one:9092/other", "a copy keeps the name: kafka://one:9092/recorded"),
        ("kafka://one:9092", "is not a run"),
    ],
)
def test_odd_target_is_refused(sealed: Path, call: Call, target: str, says: str) -> None:
    code, _, err = call("log", "copy", "moved.sqlite", target)
    assert code == 2
    assert says in err


def test_file_that_is_no_run_is_refused(call: Call, tmp_path: Path) -> None:
    assert call("show", "nothing.sqlite")[0] == 2
    (tmp_path / "other.sqlite").write_text("no log, and long enough to be read as a file")
    code, _, err = call("show", "other.sqlite")
    assert code == 4
    assert "is damaged, or not a log" in err


@pytest.mark.kafka
def test_copy_goes_to_a_broker_and_back(
    sealed: Path, call: Call, kafka_broker: KafkaBroker
) -> None:
    address = f"kafka://{kafka_broker.bootstrap}/recorded"
    code, there, err = call("log", "copy", sealed, address)
    assert code == 0, err
    code, _, err = call("audit", address)
    assert code == 0, err
    code, back, err = call("log", "copy", address, "back.sqlite")
    assert code == 0, err
    assert there.splitlines()[-1] == back.splitlines()[-1]
