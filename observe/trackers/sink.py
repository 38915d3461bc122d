"""Write metric rows to TensorBoard or Weights & Biases.

Contract, checked by one test suite:

1. `begin` is called first, once, and returns the number of rows that an earlier export of this run
   wrote; they are not given again.
2. A row is written completely or not at all, and has left this process when `step` returns.
3. Steps may decrease: an evaluation ends after later steps.
4. Network access requires the user's environment to allow it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import ResourceError, UsageError, install_hint
from dora_pipe.observe.following import Checkpoint

ID_HEX: Final = 16

RUN_ID: Final = "dora-pipe.run"
"""File next to event files that names their run."""

EVENTS: Final = "*tfevents*"
CONFIG: Final = "run/config"
MODE: Final = "WANDB_MODE"

OFFLINE_MODES: Final = frozenset({"offline", "dryrun"})
"""`dryrun` is W&B's earlier name."""

STEP: Final = "step"
"""Metric that is the x-axis in W&B."""

QUIET: Final = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
}
"""Defaults: do not record this process's output, code or cost; send no errors to W&B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    name: str
    started_ns: int
    """Wall clock of `run started`; distinguishes runs of the same name."""
    config: Mapping[str, Any]
    """Resolved configuration; contains no secret."""

    @property
    def id(self) -> str:
        """Return an id that distinguishes runs of the same name."""
        text = f"{self.name}\x1f{self.started_ns}"
        return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX]


class Tracker(ABC):
    """Accept the rows of one run, in log order."""

    before = 0
    rows = -1
    """Rows so far; -1 before `begin`."""

    def begin(self, run: TrackedRun) -> int:
        """Open for a run and count its rows. Raises UsageError, ResourceError."""
        if self.rows < 0:
            self.before = self.rows = self._open(run)
        return self.rows

    def step(self, step: int, metrics: Mapping[str, float], *, at_ns: int) -> None:
        """Add a row; `at_ns` is wall clock. Raises ResourceError."""
        self._write(step, metrics, at_ns)
        self.rows += 1

    @abstractmethod
    def close(self) -> None:
        """Release everything; idempotent, and allowed before `begin`."""

    @abstractmethod
    def _open(self, run: TrackedRun) -> int: ...

    @abstractmethod
    def _write(self, step: int, metrics: Mapping[str, float], at_ns: int) -> None: ...


class TensorBoardTracker(Tracker):
    """Event files in `FOLDER/RUN`, replaced by each export.

    Example: ``TensorBoardTracker(Path("tb"))`` for `tensorboard --logdir tb`. Raises UsageError if
    tensorboardX is missing.
    """

    def __init__(self, folder: Path) -> None:
        hint = install_hint("trackers")
        self._events = _package("tensorboardX.event_file_writer", hint)
        self._proto = _package("tensorboardX.proto.event_pb2", hint)
        self._summary = _package("tensorboardX.summary", hint)
        self._folder = folder
        self._open_files = ExitStack()

    def _open(self, run: TrackedRun) -> int:
        self._path = self._folder / run.name
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._open_files.callback(os.close, _locked(self._path))
            checkpoint = Checkpoint(self._path / RUN_ID)
            if (checkpoint.read() or run.id) != run.id:
                raise UsageError(
                    f"{self._path} holds another run", hint="choose another folder, or remove it"
                )
            checkpoint.write(run.id)
            for file in self._path.glob(EVENTS):
                file.unlink()
            self._writer = self._events.EventsWriter(str(self._path / "events"))
            self._open_files.callback(self._writer.close)
        except OSError as error:
            raise self._failed(error) from None
        text = json.dumps(run.config, indent=2, sort_keys=True, ensure_ascii=False)
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._add(wall_time=run.started_ns / 1e9, summary=self._summary.text(CONFIG, block))
        return 0

    def _write(self, step: int, metrics: Mapping[str, float], at_ns: int) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=metric) for name, metric in sorted(metrics.items())]
        summary = self._summary.Summary(value=values)
        self._add(wall_time=at_ns / 1e9, step=step, summary=summary)

    def close(self) -> None:
        self._open_files.close()

    def _add(self, **event: Any) -> None:
        try:
            self._writer.write_event(self._proto.Event(**event))
            self._writer.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> ResourceError:
        return ResourceError(f"{self._path} cannot be written: {error.strerror}")


class WandbTracker(Tracker):
    """W&B project, offline unless WANDB_MODE says otherwise.

    W&B's step is the row number, because it must not decrease; charts use the training step. The
    server (online) or a local file counts existing rows. Raises UsageError if the package is
    missing.
    """

    def __init__(self, project: str, environment: MutableMapping[str, str] | None = None) -> None:
        if not project or "/" in project:
            raise UsageError(
                f"{project!r} is no name of a project", hint="WANDB_ENTITY names a team"
            )
        self._environment = os.environ if environment is None else environment
        for name, value in QUIET.items():
            self._environment.setdefault(name, value)
        self._wandb = _package("wandb", "pip install wandb")
        self._project = project
        self._run: Any = None
        self._checkpoint = Checkpoint(None)

    def _open(self, run: TrackedRun) -> int:
        mode = self._environment.get(MODE, "offline")
        folder = Path(self._environment.get("WANDB_DIR", "."))
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", hint="WANDB_DIR names it")
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=run.id,
                name=run.name,
                config=dict(run.config),
                mode=mode,
                dir=str(folder),
                resume="allow" if mode == "online" else None,
            )
        except self._wandb.Error as error:
            raise ResourceError(f"W&B: {error}", hint=f"{MODE}=offline needs no server") from None
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if mode in OFFLINE_MODES:
            name = f"dora-pipe-{self._project}-{run.id}.rows"
            self._checkpoint = Checkpoint(folder / "wandb" / name)
            return self._checkpoint.read() or 0
        return int(self._run.starting_step)

    def _write(self, step: int, metrics: Mapping[str, float], at_ns: int) -> None:
        try:
            self._run.log({STEP: step, **metrics}, step=self.rows, commit=True)
        except self._wandb.Error as error:
            raise ResourceError(f"W&B: {error}") from None
        self._checkpoint.write(self.rows + 1)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _package(name: str, hint: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name.partition('.')[0]} is not installed", hint=hint) from error


def _locked(folder: Path) -> int:
    """Return a descriptor that locks the folder. Raises UsageError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"another export writes to {folder}", hint="end it, or choose another folder"
        ) from None
    return descriptor
