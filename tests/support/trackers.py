"""Trackers for tests, each with a third-party reader, and an in-memory W&B."""

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
"""Seconds for W&B's process to write its file."""

Rows = list[tuple[int, dict[str, float]]]


class Harness(Protocol):
    def open(self) -> Tracker: ...

    def rows(self, run: TrackedRun = RUN) -> Rows: ...


class TensorBoardHarness:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tb"

    def open(self) -> Tracker:
        return TensorBoardTracker(self.folder)

    def rows(self, run: TrackedRun = RUN) -> Rows:
        rows = event_rows(self.folder / run.name)
        return [(step, metrics) for step, _, metrics in rows]


def event_rows(folder: Path) -> list[tuple[int, float, dict[str, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    results = []
    for path in sorted(folder.glob(EVENTS)):
        for event in EventFileLoader(str(path)).Load():
            values = event.summary.value
            if values and not values[0].tag.startswith(CONFIG):
                arrays = {value.tag: tensor_util.make_ndarray(value.tensor) for value in values}
                metrics = {tag: float(array) for tag, array in arrays.items()}
                results.append((event.step, event.wall_time, metrics))
    return results


class Row(NamedTuple):
    step: int
    at_ns: int
    metrics: dict[str, float]


class Kept(Tracker):
    def __init__(self, there: int = 0) -> None:
        self.there = there
        self.runs: list[TrackedRun] = []
        self.given: list[Row] = []

    def _open(self, run: TrackedRun) -> int:
        self.runs.append(run)
        return self.there

    def _write(self, step: int, metrics: Mapping[str, float], at_ns: int) -> None:
        self.given.append(Row(step, at_ns, dict(metrics)))

    def close(self) -> None:
        """See Tracker."""


@dataclass
class FakeWandb:
    """Fake `wandb` module: runs by id with logged rows. Decreasing steps, which W&B drops, are
    an error."""

    runs: dict[str, FakeRun] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    refuses: str = ""

    def module(self) -> ModuleType:
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
    rows: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, str | None] = field(default_factory=dict)
    starting_step: int = 0
    finished: bool = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: Mapping[str, Any], step: int, commit: bool) -> None:
        assert commit and not self.finished
        assert step == len(self.rows), "W&B drops a row whose step falls"
        self.rows.append(dict(data))

    def finish(self) -> None:
        self.finished = True


class FakeWandbHarness:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "") -> None:
        self.fake = FakeWandb()
        self.environment = {"WANDB_DIR": str(folder)} | ({"WANDB_MODE": mode} if mode else {})
        monkeypatch.setitem(importlib.import_module("sys").modules, "wandb", self.fake.module())

    def open(self) -> Tracker:
        return WandbTracker(PROJECT, self.environment)

    def rows(self, run: TrackedRun = RUN) -> Rows:
        fake_run = self.fake.runs.get(run.id, FakeRun())
        assert not fake_run.rows or fake_run.axes == {STEP: None, "*": STEP}
        return [
            (row[STEP], {name: float(value) for name, value in row.items() if name != STEP})
            for row in fake_run.rows
        ]


class RealWandbHarness:
    """Tracker of the real W&B package, offline, with a reader of its files."""

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
        rows: Rows = []
        for path in sorted(self.folder.glob(f"wandb/offline-run-*/run-{run.id}.wandb")):
            for record in _ended(path):
                row: dict[str, Any] = {}
                for item in record.history.item if record.HasField("history") else ():
                    (name,) = item.nested_key or (item.key,)
                    if not name.startswith("_"):
                        row[name] = json.loads(item.value_json)
                if row:
                    rows.append(
                        (row.pop(STEP), {name: float(entry) for name, entry in row.items()})
                    )
        return rows


def _ended(path: Path) -> list[Any]:
    give_up_s = time.monotonic() + FLUSH_LIMIT_S
    while True:
        records = list(_wandb_records(path.read_bytes()))
        if records and records[-1].HasField("exit"):
            return records
        assert time.monotonic() < give_up_s, "W&B never ended the run"
        time.sleep(0.05)


def _wandb_records(data: bytes, block: int = 32768) -> Iterator[Any]:
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    index, full = 7, b""
    while index + 7 <= len(data):
        if block - index % block < 7:
            index += block - index % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, index)
        full += data[index + 7 : index + 7 + size]
        index += 7 + size
        if kind in (1, 4):  # an entire record, or its last part
            record = proto.Record()
            record.ParseFromString(full)
            yield record
            full = b""
