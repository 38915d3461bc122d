"""Write rows of figures to TensorBoard's event files or to Weights & Biases.

Rules that one contract suite checks:

1. `begin` comes first, once, and returns the number of rows of this run that an earlier export
   wrote; they are not given again.
2. A row is there whole or not at all, and has left this process when `step` returns.
3. The step of a row may be smaller than that of the row before: an evaluation is known later than
   the steps after it.
4. Nothing is fetched or sent unless the user's environment says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.core.errors import ResourceError, UsageError, install_hint
from dora_pipe.observe.following import Checkpoint

ID_HEX: Final = 16

ROWS: Final = "dora-pipe.rows"
"""The file beside event files with the number of rows, and where they end."""

EVENTS: Final = "*tfevents*"

CONFIG: Final = "run/config"
"""Tag of the text with the configuration."""

MODE: Final = "WANDB_MODE"

OFFLINE_MODES: Final = frozenset({"offline", "dryrun"})
"""`dryrun` is W&B's earlier name."""

STEP: Final = "step"
"""The figure that is the axis of all others in W&B."""

QUIET: Final = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
}
"""Defaults: this process is not the run, so its output, code and cost say nothing of the run; and
W&B's errors are not sent to W&B."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How often each of a few whole numbers was there. Example: ``Spread(((0, 3), (1, 29)))``."""

    counts: tuple[tuple[int, int], ...]
    """(value, times), ascending by value; at least one."""

    @property
    def bins(self) -> tuple[list[float], list[int]]:
        """(edges, times): a bin for every value from the first to the last."""
        first, last, times = self.counts[0][0], self.counts[-1][0], dict(self.counts)
        edges = [value - 0.5 for value in range(first, last + 2)]
        return edges, [times.get(value, 0) for value in range(first, last + 1)]


Figure = float | Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that is tracked."""

    name: str
    started_ns: int
    """Of `run started`, wall clock: a name may be used again on another day."""
    config: Mapping[str, Any]
    """The resolved configuration as plain values; no key of it holds a secret."""

    @property
    def id(self) -> str:
        """A function of the run, to tell it from others of its name."""
        text = f"{self.name}\x1f{self.started_ns}"
        return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX]


class Tracker(Protocol):
    """Takes the rows of one run, in the order of its log."""

    def begin(self, run: TrackedRun) -> int:
        """Open it for a run and count its rows. Raises UsageError, ResourceError."""
        ...

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """Add a row, of a moment by wall clock. Raises ResourceError where it cannot be kept."""
        ...

    def close(self) -> None:
        """Release everything; idempotent, and allowed before `begin`."""
        ...


class TensorBoardTracker:
    """Event files in `FOLDER/RUN`. Example: ``TensorBoardTracker(Path("tb"))`` for
    `tensorboard --logdir tb`. Raises UsageError where the package tensorboardX is missing.

    An export writes one file, a row is one record. The file `ROWS` says how far the records are
    counted; what a killed export wrote after that is cut off and written again.
    """

    def __init__(self, folder: Path) -> None:
        hint = install_hint("trackers")
        self._events = _package("tensorboardX.event_file_writer", hint)
        self._proto = _package("tensorboardX.proto.event_pb2", hint)
        self._summary = _package("tensorboardX.summary", hint)
        self._folder = folder
        self._lock = -1
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> int:
        """Return the rows that are there. Raises UsageError for another run's folder."""
        self._run, self._path = run, self._folder / run.name
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._path)
            self._checkpoint = Checkpoint(self._path / ROWS)
            files = list(self._path.glob(EVENTS))
            fresh = {"run": "" if files else run.id, "rows": 0, "file": "", "bytes": 0}
            known: dict[str, Any] = self._checkpoint.read() or fresh
            if known["run"] != run.id:
                raise UsageError(
                    f"{self._path} holds another run", hint="choose another folder, or remove it"
                )
            for file in files:
                if file.name == known["file"]:
                    os.truncate(file, known["bytes"])
                elif file.name > known["file"]:
                    file.unlink()  # no row of it was counted
            self._checkpoint.write(known)
        except OSError as error:
            raise _failed(self._path, error) from None
        self._rows = int(known["rows"])
        return self._rows

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """Append one record and remember where it ends."""
        summary = self._summary.Summary(
            value=[self._value(name, figure) for name, figure in sorted(figures.items())]
        )
        event = self._proto.Event(wall_time=at_ns / 1e9, step=step, summary=summary)
        try:
            if self._writer is None:
                self._open()
            self._writer.write_event(event)
            self._writer.flush()
            self._rows += 1
            place = {"file": self._file.name, "bytes": self._file.stat().st_size}
            self._checkpoint.write({"run": self._run.id, "rows": self._rows, **place})
        except OSError as error:
            raise _failed(self._path, error) from None

    def close(self) -> None:
        """Close the file and release the folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        before = set(self._path.glob(EVENTS))
        self._writer = self._events.EventsWriter(str(self._path / "events"), f".{self._rows:08d}")
        (self._file,) = set(self._path.glob(EVENTS)) - before
        if self._rows == 0:
            text = json.dumps(self._run.config, indent=2, sort_keys=True, ensure_ascii=False)
            block = "\n".join(f"    {line}" for line in text.splitlines())
            summary = self._summary.text(CONFIG, block)
            at_s = self._run.started_ns / 1e9
            self._writer.write_event(self._proto.Event(wall_time=at_s, summary=summary))

    def _value(self, name: str, figure: Figure) -> Any:
        """A scalar, or a histogram with a bucket for every value."""
        value = self._summary.Summary.Value
        if not isinstance(figure, Spread):
            return value(tag=name, simple_value=figure)
        edges, times = figure.bins
        squares = sum(one * one * count for one, count in figure.counts)
        histogram = self._summary.HistogramProto(
            min=edges[0],  # TensorBoard makes the outermost buckets of them
            max=edges[-1],
            num=sum(times),
            sum=sum(one * count for one, count in figure.counts),
            sum_squares=squares,
            bucket_limit=edges[1:],
            bucket=times,
        )
        return value(tag=name, histo=histogram)


class WandbTracker:
    """A project of W&B, offline unless WANDB_MODE says otherwise.

    A row's number is W&B's step, since that may never fall; the training step is the axis of all
    charts. W&B's server counts the rows of a run that is online, a file beside W&B's own those of
    one that is not. Raises UsageError where the package is missing.
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

    def begin(self, run: TrackedRun) -> int:
        """Return the rows that are there. Raises ResourceError for what W&B refuses."""
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
            self._rows = self._checkpoint.read() or 0
        else:
            self._rows = int(self._run.starting_step)
        return self._rows

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """Log one row; W&B has a clock of its own."""
        values = {name: self._value(figure) for name, figure in figures.items()}
        try:
            self._run.log({STEP: step, **values}, step=self._rows, commit=True)
        except self._wandb.Error as error:
            raise ResourceError(f"W&B: {error}") from None
        self._rows += 1
        self._checkpoint.write(self._rows)

    def close(self) -> None:
        """End W&B's run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _value(self, figure: Figure) -> Any:
        """A number, or a histogram with a bin for every value."""
        if not isinstance(figure, Spread):
            return figure
        edges, times = figure.bins
        return self._wandb.Histogram(np_histogram=(times, edges))


def _package(name: str, hint: str) -> Any:
    """The user's own installation. Raises UsageError."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name.partition('.')[0]} is not installed", hint=hint) from error


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder until it is closed. Raises UsageError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"another export writes to {folder}", hint="end it, or choose another folder"
        ) from None
    return descriptor


def _failed(place: Path, error: OSError) -> ResourceError:
    return ResourceError(f"{place} cannot be written: {error.strerror}")
