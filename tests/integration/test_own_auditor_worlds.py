"""Simulated runs under drawn faults, as a stranger's auditor sees them: nothing is found.

What the page of records says of fences, moves, refused batches, commands, dead letters and workers
that host several versions is what happens. The logs are copied to SQLite, offset by offset.
"""

from __future__ import annotations

import logging
import runpy
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.topics import Topics
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_auditor"
ENDS = "rounds the last round: folds control to "
"""A simulated bus leaves longer gaps than a file: its ends are not the file's."""


def copy_log(bus: Bus, topics: Topics, path: Path) -> None:
    names = topics.all()
    with closing(SqliteBus(path)) as new_bus:
        new_bus.create([TopicSpec(name=name, partitions=bus.partitions(name)) for name in names])
    with closing(sqlite3.connect(path)) as log:
        numbers = dict(log.execute("SELECT name, id FROM topics").fetchall())
        for name in names:
            for partition in range(bus.partitions(name)):
                position = TopicPartition(name, partition)
                base = numbers[name] << 52 | partition << 40
                rows = (
                    (base | record.offset, record.key, _packed(record.headers), record.value)
                    for record in records_of(bus, {position: bus.end(position)})
                )
                log.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        log.commit()


def _packed(headers: tuple[tuple[str, bytes], ...]) -> bytes | None:
    return msgspec.msgpack.encode(headers) if headers else None


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def _findings(seed: int, path: Path) -> list[str]:
    path.mkdir()
    seed_run = SeedRun(draw(seed))
    close = World.close

    def close_copied(self: World) -> None:
        copy_log(self.bus, self.topics, path / "log.sqlite")
        close(self)

    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(World, "close", close_copied)
        played = seed_run.run()
    assert played.holds, played.line
    own: Callable[[Path], Any] = runpy.run_path(str(FOLDER), run_name="own_auditor")["audit"]
    ledger, standings = own(path)
    assert standings["counts"] > 0 and ledger.findings.looked > 200
    return [line for line in ledger.findings.lines if not line.startswith(ENDS)]


@pytest.mark.parametrize("seed", [7, 39], ids=["one-version", "several"])
def test_a_seed_that_holds_has_no_finding(seed: int, tmp_path: Path) -> None:
    assert _findings(seed, tmp_path / "run") == []


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_many_seeds_that_hold_have_no_finding(chunk: int, tmp_path: Path) -> None:
    for seed in range(100 + 10 * chunk, 110 + 10 * chunk):
        findings = _findings(seed, tmp_path / str(seed))
        assert findings == [], seed
