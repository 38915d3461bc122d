"""TensorBoard's event files; it decides how files of a run are told from those of another.

`DIR/RUN` gets one file per export. A row is one record of it, appended by one write, so that the
files themselves say how far an earlier export came: a record that was torn by a kill is passed over
by every reader, and written again. The head of every file names the run by its id.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import ResourceError, UsageError, install_hint
from dora_pipe.observe.trackers.port import Figure, Spread, TrackedRun

HINT: Final = install_hint("trackers")

FILE_VERSION: Final = "brain.Event:2"
"""What TensorBoard expects in the first record of a file."""

OWN: Final = "dora-pipe "
"""Begins the name of the writer in the first record; the run's id follows."""

CONFIG: Final = "run/config"
"""Tag of the text in the first record behind the head."""


class TensorBoardTracker:
    """Event files below a folder. Example: ``TensorBoardTracker(Path("tb"))`` for
    `tensorboard --logdir tb`. Raises UsageError where the package tensorboard is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._protos = _Protos()
        self._folder = folder
        self._place = -1
        """Descriptor of the run's folder, which is locked by it."""
        self._path = folder
        self._file: FileIO | None = None
        self._heads: list[Any] = []
        """What stands before the first row: an export without rows leaves no file."""

    def begin(self, run: TrackedRun) -> int:
        """See the port. Raises UsageError for a folder that another run or export has."""
        folder = self._folder / run.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._place = os.open(folder, os.O_RDONLY)
            _lock(self._place, folder)
            files = sorted(folder.glob("*tfevents*"))
            rows = sum(self._rows(path, run.id) for path in files)
        except OSError as error:
            raise _failed(folder, error) from None
        name = f"events.out.tfevents.{int(time.time()):010d}.{len(files):04d}.dora-pipe"
        self._path = folder / name
        self._heads = [self._head(run)] + [self._config(run)] * (not files)
        return rows

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """See the port."""
        assert self._place >= 0, "a row before `begin`"
        for head in self._heads:
            self._write(head)
        self._heads = []
        values = [self._protos.value(name, figure) for name, figure in sorted(figures.items())]
        row = self._protos.summary(values)
        self._write(self._protos.event.Event(wall_time=at_ns / 1e9, step=step, summary=row))

    def close(self) -> None:
        """See the port."""
        if self._file is not None:
            self._file.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1

    def _head(self, run: TrackedRun) -> Any:
        event = self._protos.event
        writer = event.SourceMetadata(writer=OWN + run.id)
        return event.Event(
            wall_time=run.started_ns / 1e9, file_version=FILE_VERSION, source_metadata=writer
        )

    def _config(self, run: TrackedRun) -> Any:
        text = self._protos.summary([self._protos.text(CONFIG, _block(run.config))])
        return self._protos.event.Event(wall_time=run.started_ns / 1e9, summary=text)

    def _write(self, event: Any) -> None:
        """One record, in one write, as a whole. Raises ResourceError."""
        record = BytesIO()
        self._protos.record_writer(record).write(event.SerializeToString())
        try:
            if self._file is None:
                self._file = FileIO(self._path, "xb")
            written = self._file.write(record.getvalue())
        except OSError as error:
            raise _failed(self._path, error) from None
        if written != len(record.getvalue()):
            raise ResourceError(f"{self._path} has no room", hint="the same command goes on")

    def _rows(self, path: Path, run_id: str) -> int:
        """Rows of a file; one in which nothing could be written has none."""
        rows = 0
        for number, event in enumerate(self._protos.events(path)):
            if number == 0 and event.source_metadata.writer != OWN + run_id:
                raise UsageError(
                    f"{path} is not of this run", hint="choose another folder, or remove it"
                )
            rows += bool(event.summary.value) and event.summary.value[0].tag != CONFIG
        return rows


class _Protos:
    """What is used of the package tensorboard, which is imported when it is asked for."""

    def __init__(self) -> None:
        try:
            from tensorboard.backend.event_processing import event_file_loader
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise UsageError(
                f"event files are written with {error.name}, which is not installed", hint=HINT
            ) from None
        self.event: Any = event_pb2
        self.record_writer: Any = RecordWriter
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._types: Any = types_pb2
        self._loader: Any = event_file_loader.LegacyEventFileLoader

    def events(self, path: Path) -> Iterator[Any]:
        """The records of a file up to the first that is not whole."""
        yield from self._loader(str(path)).Load()

    def summary(self, values: list[Any]) -> Any:
        return self._summary.Summary(value=values)

    def value(self, name: str, figure: Figure) -> Any:
        """A scalar, or a histogram with a bucket for every value."""
        if isinstance(figure, Spread):
            return self._summary.Summary.Value(tag=name, histo=self._histogram(figure))
        return self._summary.Summary.Value(tag=name, simple_value=figure)

    def _histogram(self, spread: Spread) -> Any:
        first, last = spread.counts[0][0], spread.counts[-1][0]
        times = dict(spread.counts)
        return self._summary.HistogramProto(
            min=first - 0.5,  # edges: TensorBoard makes the outermost buckets of them
            max=last + 0.5,
            num=sum(times.values()),
            sum=sum(value * count for value, count in spread.counts),
            sum_squares=sum(value * value * count for value, count in spread.counts),
            bucket_limit=[value + 0.5 for value in range(first, last + 1)],
            bucket=[times.get(value, 0) for value in range(first, last + 1)],
        )

    def text(self, name: str, text: str) -> Any:
        """For TensorBoard's page of texts."""
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.Summary.Value(
            tag=name,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(
                dtype=self._types.DT_STRING, string_val=[text.encode()]
            ),
        )


def _block(config: Mapping[str, Any]) -> str:
    """The configuration as a block of Markdown."""
    lines = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).splitlines()
    return "\n".join(f"    {line}" for line in lines)


def _lock(descriptor: int, folder: Path) -> None:
    """Until it is closed; a process that dies lets go of it. Raises UsageError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another export writes to {folder}", hint="end it, or choose another folder"
        ) from None


def _failed(place: object, error: OSError) -> ResourceError:
    return ResourceError(f"{place} cannot be written: {error.strerror}")
