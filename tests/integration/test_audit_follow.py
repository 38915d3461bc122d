"""Tests of repeated audits and of `audit --follow` on a live run."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from dora_pipe.cli import audit as audit_module
from dora_pipe.schemas.control import TrajectoriesLogged, decode_control
from dora_pipe.schemas.rounds import decode_round
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun

OFFSETS = (1 << 40) - 1
"""Bits of a row's number that are the offset."""


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_log_that_was_cut_after_an_audit_is_named_by_every_later_one(
    copy: RecordedRun, call: Call
) -> None:
    code, first, _ = call("audit", str(copy.directory))
    assert code == 0
    assert (copy.directory / "audit.json").is_file()
    assert call("audit", str(copy.directory))[:2] == (0, first)
    with sqlite3.connect(copy.log) as log:
        log.execute(
            "DELETE FROM records WHERE at = (SELECT max(at) FROM records WHERE at >> 52 = "
            "(SELECT id FROM topics WHERE name LIKE '%.decisions'))"
        )
    log.close()
    for _ in range(2):
        code, out, _ = call("audit", str(copy.directory))
        assert code == 5
        assert "when audit last looked" in unwrapped(out)


def test_copied_run_is_not_taken_for_the_one_that_was_audited(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    first, second = recorded.copy(tmp_path / "first"), tmp_path / "second"
    call("audit", str(first.directory))
    shutil.copytree(first.directory, second)
    with sqlite3.connect(second / "log.sqlite") as log:
        log.execute("UPDATE records SET value = zeroblob(9) WHERE at >> 52 = 4")
    log.close()
    code, _, text = call("audit", str(second))
    assert code == 5
    assert text


def test_follow_and_json_exclude_each_other(call: Call, recorded: RecordedRun) -> None:
    code, _, text = call("audit", str(recorded.directory), "--follow", "--json")
    assert code == 2
    assert "--follow" in text


def _grown(recorded: RecordedRun, directory: Path, share: float) -> Path:
    shutil.copytree(recorded.directory, directory)
    log = directory / "log.sqlite"
    with sqlite3.connect(log) as connection:
        connection.execute("CREATE TABLE kept AS SELECT * FROM records")
        _keep(connection, recorded, share)
    connection.close()
    return log


def _keep(connection: sqlite3.Connection, recorded: RecordedRun, share: float) -> None:
    topics = recorded.topics
    ids = dict(connection.execute("SELECT name, id FROM topics"))
    connection.execute("DELETE FROM records")
    connection.execute("INSERT INTO records SELECT * FROM kept")

    def rows(topic: str) -> list[tuple[int, bytes]]:
        sql = "SELECT at, value FROM records WHERE at >> 52 = ? ORDER BY at"
        return connection.execute(sql, (ids[topic],)).fetchall()

    rounds = rows(topics.decisions)
    kept = rounds[: int(share * len(rounds))]
    removed = [key for key, _ in rounds[len(kept) :]]
    if removed:
        control_next, named = decode_round(kept[-1][1]).control_next, set()
        for key, value in rows(topics.control):
            fact = decode_control(value)
            if key & OFFSETS >= control_next:
                removed.append(key)
            elif isinstance(fact, TrajectoriesLogged):
                named |= {
                    trajectory.partition << 40 | trajectory.offset
                    for trajectory in fact.trajectories
                }
        records = [key for key, _ in rows(topics.trajectories)]
        removed += [key for key in records if key & (1 << 52) - 1 not in named]
    connection.executemany("DELETE FROM records WHERE at = ?", [(key,) for key in removed])


def test_following_audit_ends_with_the_run_and_says_what_it_finds_at_once(
    call: Call, recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "growing"
    log = _grown(recorded, directory, 0.3)
    shares = iter([0.6, 0.9, 1.0])
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        with sqlite3.connect(log) as connection:
            _keep(connection, recorded, next(shares))
        connection.close()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(audit_module, "LINE_S", 0.0)
    code, out, text = call("audit", str(directory), "--follow")
    assert code == 0, out + text
    assert len(slept) == 3
    assert "finished" in out
    assert "violations" in text


def test_following_audit_that_is_interrupted_reports_what_it_has_seen(
    call: Call, recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "growing"
    _grown(recorded, directory, 0.5)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    code, out, _ = call("audit", str(directory), "--follow")
    assert code == 0
    assert "the run is not finished" in out
