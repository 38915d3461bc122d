"""Simulated runs under drawn faults: audit's ledger, the catalogue and a stranger's auditor agree.

The stranger's auditor knows only the page of records; it reads a copy of the log in SQLite with
equal offsets. Two seeds also show batches in parts and redundant trajectories.
"""

from __future__ import annotations

import logging
import runpy
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.trainer.effects import TrainPart
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.sim.paced_port import WorkingPort
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World
from tests.support.catalogue_stage import differences
from tests.support.tiers import more

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "own_auditor"
ENDS = "rounds the last round: folds control to "
"""A simulated bus leaves longer gaps than a file: its ends are not the file's."""
REDUNDANT, ONE_VERSION, IN_PARTS = 4, 7, 39


class ReadSeed(SeedRun):
    differences: list[str]
    findings: list[str]
    selection: list[dict[str, Any]]
    begun: list[int]
    """Steps with a part that began while a policy was published."""

    def _play(self) -> None:
        self.begun, start = [], WorkingPort.start

        def starts(port: WorkingPort, effect: Any) -> None:
            if isinstance(effect, TrainPart) and port._publishing.writing:
                self.begun.append(effect.decision.step)
            start(port, effect)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WorkingPort, "start", starts)
            super()._play()

    def _audit(self, world: World) -> None:
        super()._audit(world)
        self.differences = differences(world.bus, world.topics)
        self.findings = _findings(world)
        with closing(read_catalogue(world.bus, world.topics)) as tables:
            self.selection = list(tables.records("select * from selection"))


@cache
def read_seed(seed: int) -> ReadSeed:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)
    seed_run = ReadSeed(draw(seed))
    result = seed_run.run()
    assert result.holds, result.line
    return seed_run


def _findings(world: World) -> list[str]:
    own: Callable[[Path], Any] = runpy.run_path(str(FOLDER), run_name="own_auditor")["audit"]
    with TemporaryDirectory() as folder:
        copy_log(world, Path(folder) / "log.sqlite")
        ledger, standings = own(Path(folder))
    assert standings["counts"] > 0 and ledger.findings.looked > 200
    return [line for line in ledger.findings.lines if not line.startswith(ENDS)]


def copy_log(world: World, path: Path) -> None:
    bus, names = world.bus, world.topics.all()
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


SEEDS = [0, REDUNDANT, ONE_VERSION, IN_PARTS, *more(range(100, 140))]


@pytest.mark.parametrize("seed", SEEDS)
def test_ledger_catalogue_and_a_strangers_auditor_agree(seed: int) -> None:
    seed_run = read_seed(seed)
    assert seed_run.differences == []
    assert seed_run.findings == []


def test_catalogue_has_trajectories_that_were_not_waited_for() -> None:
    seed_run = read_seed(REDUNDANT)
    assert [row["outcome"] for row in seed_run.selection] == ["trained", "redundant"]
    assert seed_run.selection[1]["trajectories"] > 0
    assert seed_run.selection[1]["seconds"] is not None


def test_part_of_the_next_step_begins_while_a_policy_is_published() -> None:
    begun = read_seed(IN_PARTS).begun
    assert begun and min(begun) > 0
