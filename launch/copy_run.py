"""Open the target log of a copy: a SQLite file or Kafka topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.copy import CopyTarget, FileTarget, FillingTarget
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS
from dora_pipe.launch.plan import topic_specs
from dora_pipe.launch.run_dir import IN_FILE, LOG_SUFFIX, ON_KAFKA, OpenRun, at_url, run_on_kafka


@contextmanager
def copy_target(run: OpenRun, address: str, runs: Path = RUNS) -> Iterator[CopyTarget]:
    """Open a log as the target of a copy, with the run's topics. Raises UsageError, BusError."""
    if address.startswith(ON_KAFKA):
        with closing(_on_kafka(run, address, runs)) as bus:
            _create_topics(run, bus)
            yield FillingTarget(bus)
    elif address.endswith(LOG_SUFFIX):
        file = Path(address)
        if run.log.url.startswith(IN_FILE):
            _refuse_itself(file.resolve() == Path(run.log.url.removeprefix(IN_FILE)).resolve())
        if not file.absolute().parent.is_dir():
            raise UsageError(f"there is no folder {file.absolute().parent}")
        with closing(SqliteBus(file)) as copy:
            _create_topics(run, copy)
            yield FileTarget(copy)
    else:
        raise UsageError(
            f"{address} cannot hold a copy", hint="FILE.sqlite or kafka://HOST:PORT/RUN"
        )


def _on_kafka(run: OpenRun, address: str, runs: Path) -> Bus:
    there = run_on_kafka(address, runs)
    if there.path.name != run.topics.run:
        raise UsageError(
            f"{address} names run {there.path.name!r}, the source is run {run.topics.run!r}",
            hint=f"a copy keeps the name: {there.url}/{run.topics.run}",
        )
    _refuse_itself(there.url == run.log.url)
    return there.open_bus(at_url(run.config, there.url))


def _refuse_itself(same: bool) -> None:
    if same:
        raise UsageError("source and copy are the same log")


def _create_topics(run: OpenRun, bus: Bus) -> None:
    specs = topic_specs(run.config)
    bus.create([replace(spec, partitions=run.bus.partitions(spec.name)) for spec in specs])
