"""Trackers for tests: each with a reader that is not our own, and a W&B that lives in memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import pytest

from dora_pipe.observe.trackers.sink import (
    CONFIG,
    EVENTS,
    STEP,
    TensorBoardTracker,
    TrackedRun,
    Tracker,
    WandbTracker,
)

RUN: Final = TrackedRun(name="demo", started_ns=10**18, config={"run": {"name": "demo"}})
PROJECT: Final = "arithmetic"

FLUSH_LIMIT_S: Final = 60.0
"""W&B's own process writes its file, and has so long for it."""

Rows = list[tuple[int, dict[str, float]]]


class Harness(Protocol):
    """A tracker, and what a reader of it sees."""

    def open(self) -> Tracker:
        """As an export does."""
        ...

    def rows(self, run: TrackedRun = RUN) -> Rows:
        """The rows of a run in the order in which they were given."""
        ...


class TensorBoardHarness:
    """Event files, read by tensorboard's own reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tb"

    def open(self) -> Tracker:
        return TensorBoardTracker(self.folder)

    def rows(self, run: TrackedRun = RUN) -> Rows:
        found = event_rows(self.folder / run.name)
        return [(step, figures) for step, _, figures in found]


def event_rows(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    """(step, wall time, figures) of all files of a run, by tensorboard's own reader."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    found = []
    for path in sorted(folder.glob(EVENTS)):
        for event in EventFileLoader(str(path)).Load():
            values = event.summary.value
            if values and not values[0].tag.startswith(CONFIG):
                arrays = {one.tag: tensor_util.make_ndarray(one.tensor) for one in values}
                figures = {tag: float(array) for tag, array in arrays.items()}
                found.append((event.step, event.wall_time, figures))
    return found


class Row(NamedTuple):
    """A row as a tracker was given it."""

    step: int
    at_ns: int
    figures: dict[str, float]


class Kept(Tracker):
    """Keeps what it is given, and says that so many rows were there before."""

    def __init__(self, there: int = 0) -> None:
        self.there = there
        self.runs: list[TrackedRun] = []
        self.given: list[Row] = []

    def _open(self, run: TrackedRun) -> int:
        self.runs.append(run)
        return self.there

    def _write(self, step: int, figures: Mapping[str, float], at_ns: int) -> None:
        self.given.append(Row(step, at_ns, dict(figures)))

    def close(self) -> None:
        """See Tracker."""


@dataclass
class FakeWandb:
    """What `import wandb` gives in a test: runs by id, with what was logged to each.

    It keeps W&B's rule that a step never falls: what breaks it is dropped there, and fails here.
    """

    runs: dict[str, FakeRun] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    refuses: str = ""

    def module(self) -> ModuleType:
        """To be put into `sys.modules`."""
        module = ModuleType("wandb")
        module.Error = FakeError  # type: ignore[attr-defined]
        module.init = self._init  # type: ignore[attr-defined]
        return module

    def _init(self, **words: Any) -> FakeRun:
        if self.refuses:
            raise FakeError(self.refuses)
        self.calls.append(words)
        (Path(words["dir"]) / "wandb").mkdir(exist_ok=True)
        run = self.runs.setdefault(words["id"], FakeRun())
        run.starting_step = len(run.rows) if words["mode"] == "online" else 0
        run.finished = False
        return run


class FakeError(Exception):
    """`wandb.Error`."""


@dataclass
class FakeRun:
    """A run of W&B; an offline one is what all its folders hold together."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, str | None] = field(default_factory=dict)
    starting_step: int = 0
    finished: bool = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        """A row, whole and at once."""
        assert commit and not self.finished
        assert step == len(self.rows), "W&B drops a row whose step falls"
        self.rows.append(dict(data))

    def finish(self) -> None:
        """No more rows."""
        self.finished = True


class FakeWandbHarness:
    """The tracker of W&B on a module that stands in for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "") -> None:
        self.fake = FakeWandb()
        self.environment = {"WANDB_DIR": str(folder)} | ({"WANDB_MODE": mode} if mode else {})
        monkeypatch.setitem(importlib.import_module("sys").modules, "wandb", self.fake.module())

    def open(self) -> Tracker:
        return WandbTracker(PROJECT, self.environment)

    def rows(self, run: TrackedRun = RUN) -> Rows:
        found = self.fake.runs.get(run.id, FakeRun())
        assert not found.rows or found.axes == {STEP: None, "*": STEP}
        return [
            (row[STEP], {name: float(value) for name, value in row.items() if name != STEP})
            for row in found.rows
        ]


class RealWandbHarness:
    """The tracker of W&B on the real package, offline; its files are read as W&B lays them out."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if importlib.util.find_spec("wandb") is None:
            pytest.skip("wandb is not installed")
        self.folder = folder
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("WANDB_DIR", str(folder))

    def open(self) -> Tracker:
        return WandbTracker(PROJECT)

    def rows(self, run: TrackedRun = RUN) -> Rows:
        found: Rows = []
        for path in sorted(self.folder.glob(f"wandb/offline-run-*/run-{run.id}.wandb")):
            for record in _ended(path):
                row: dict[str, Any] = {}
                for item in record.history.item if record.HasField("history") else ():
                    (name,) = item.nested_key or (item.key,)
                    if not name.startswith("_"):
                        row[name] = json.loads(item.value_json)
                if row:
                    found.append((row.pop(STEP), {name: float(one) for name, one in row.items()}))
        return found


def _ended(path: Path) -> list[Any]:
    """All records of a file of W&B, whose own process may still be writing the last ones."""
    give_up_s = time.monotonic() + FLUSH_LIMIT_S
    while True:
        records = list(_wandb_records(path.read_bytes()))
        if records and records[-1].HasField("exit"):
            return records
        assert time.monotonic() < give_up_s, "W&B never ended the run"
        time.sleep(0.05)


def _wandb_records(data: bytes, block: int = 32768) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format behind seven bytes."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = proto.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
