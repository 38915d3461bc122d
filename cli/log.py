"""`log` and `sql`: create, read and copy the topics of a run; query its tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.cells import cell_len

from dora_pipe.bus.base import records_of
from dora_pipe.bus.blobs import blob_bytes, lost_blob
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.copy import CopyTarget, FileTarget, FillingTarget, copy_topics
from dora_pipe.bus.logged import Damage
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli.options import (
    ConfigArgument,
    JsonOption,
    OverrideOption,
    RunArgument,
    RunsOption,
)
from dora_pipe.cli.output import emit_json, emit_line, emit_rows, emit_table, terminal_columns
from dora_pipe.cli.progress import progress
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import ConfigError, SchemaError, UsageError, printable
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.plan import create_topics, topic_specs
from dora_pipe.launch.run_dir import (
    IN_FILE,
    LOG_SUFFIX,
    ON_KAFKA,
    OpenRun,
    at_url,
    opened,
    run_dir,
    run_on_kafka,
)
from dora_pipe.ledger.calls import ask
from dora_pipe.ledger.tables import CALLS, TABLES, columns_of
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import AnyProgress, decode_any_progress, decode_trajectory

POLL_S: Final = 1.0

MORE: Final = len("  +99")


def create(config: ConfigArgument, override: OverrideOption = None) -> None:
    """Create the topics of a run, or check those that exist.

    `run` and `orchestrator` do the same if their user may create topics.
    """
    resolved = load_config(config, override or ())
    if not resolved.bus.url:
        raise ConfigError(
            "log create needs a kafka:// log; this run uses SQLite",
            hint="`dora-pipe run` creates a SQLite log in the run's directory",
        )
    with closing(run_dir(resolved).open_bus(resolved)) as bus:
        topics = create_topics(bus, resolved)
        for name in topics.all():
            say(f"{name}: {bus.partitions(name)} partitions")


def topics(run: RunArgument, as_json: JsonOption = False, root: RunsOption = RUNS) -> None:
    """List the topics of a run: partitions, positions, records and bytes."""
    with opened(run, root) as open_run:
        rows = topic_rows(open_run)
    emit_rows(("topic", "partition", "begin", "end", "records", "bytes"), rows, as_json=as_json)


def read(
    run: RunArgument,
    topic: Annotated[
        str,
        typer.Argument(help="control, metrics, decisions, trajectories, progress or dead-letters."),
    ] = "control",
    kind: Annotated[str, typer.Option(help="Only records of this kind.")] = "",
    key: Annotated[str, typer.Option(help="Only records with this key.")] = "",
    partition: Annotated[int, typer.Option(help="Partition; -1: all.")] = -1,
    offset: Annotated[int, typer.Option("--from", help="First offset.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Maximum records; 0: no limit.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Print the records of a topic, one per line; `--json` prints all fields, arrays as lengths."""
    with opened(run, root) as open_run:
        records = _records(open_run, topic, offset, partition, follow=follow)
        keyed = (record for record in records if key in ("", _text(record.key)))
        contents = ((record, readable(topic, record)) for record in keyed)
        matching = (pair for pair in contents if kind in ("", pair[1].get("kind")))
        for record, content in islice(matching, limit or None):
            if as_json:
                position = {"partition": record.partition, "offset": record.offset}
                emit_json({**position, "key": _text(record.key), "record": content})
            else:
                emit_line(record_line(record, content, terminal_columns()))


def copy(
    run: RunArgument,
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="FILE.sqlite, or kafka://HOST:PORT[,HOST:PORT]/RUN."),
    ],
    allow_lost: Annotated[
        bool,
        typer.Option("--allow-lost", help="Copy records whose blob is lost, without the blob."),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Copy a run's log into a SQLite file or onto Kafka, and compare both.

    Keeps offsets and large values. Run it again to continue an interrupted copy, or to copy newer
    records. Other commands accept the file as a run.
    """
    with (
        opened(run, root) as source,
        _copy_target(source, target, root) as copied,
        progress("copying") as report,
    ):
        done = copy_topics(source.bus, copied, source.topics.all(), report, allow_lost=allow_lost)
    if as_json:
        emit_json({"records": done.records, "added": done.added, "digest": done.digest})
        return
    if done.lost:
        say(f"{done.lost} large values are lost in the source and in the copy")
    emit_line(f"{target}: {done.added} records copied, {done.records} compared")
    emit_line(f"digest {done.digest}")


def topic_rows(run: OpenRun) -> list[dict[str, Any]]:
    return [
        _topic_row(run, TopicPartition(topic, partition))
        for topic in run.topics.all()
        for partition in range(run.bus.partitions(topic))
    ]


def _topic_row(run: OpenRun, tp: TopicPartition) -> dict[str, Any]:
    """`begin` is 0 until retention deletes; deleted records are not counted."""
    begin, end = run.bus.begin(tp), run.bus.end(tp)
    sizes = [len(record.value) for record in records_of(run.bus, {tp: end}, start=begin)]
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "begin": begin,
        "end": end,
        "records": len(sizes),
        "bytes": sum(sizes),
    }


def _records(
    run: OpenRun, topic: str, offset: int, partition: int, *, follow: bool
) -> Iterator[Record]:
    name = f"{run.config.run.name}.{topic}"
    if name not in run.topics.all():
        known_topics = ", ".join(name.partition(".")[2] for name in run.topics.all())
        raise UsageError(f"no topic {topic!r}", hint=f"there are: {known_topics}")
    numbers = range(run.bus.partitions(name)) if partition < 0 else [partition]
    ends = {tp: run.bus.end(tp) for tp in (TopicPartition(name, number) for number in numbers)}
    with closing(run.bus.reader(dict.fromkeys(ends, offset))) as reader:
        while follow or any(reader.position(tp) < end for tp, end in ends.items()):
            yield from reader.poll(timeout_s=POLL_S)


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def record_line(record: Record, content: Mapping[str, Any], width: int | None) -> str:
    """Return a record on one line: position, kind, key, whole fields that fit, count of the rest.

    Example: ``0:7  step-committed  trainer  step=3 attempt=1 +12``
    """
    head = [f"{record.partition}:{record.offset}", str(content.get("kind", ""))]
    line = printable("  ".join(part for part in [*head, _text(record.key)] if part))
    omitted = 0
    for name, value in sorted(content.items(), key=lambda item: item[0].endswith("_ns")):
        field = printable(f"{name}={_brief(value)}")
        if name == "kind":
            continue
        if width is not None and cell_len(line) + cell_len(field) + len("  ") + MORE > width:
            omitted += 1
        else:
            line += f"  {field}"
    return f"{line}  +{omitted}" if omitted else line


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{len(value)}}}" if value else "{}"
    if isinstance(value, str):
        return value or '""'
    if not isinstance(value, Sequence):
        return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    kinds = Counter(
        entry["kind"] for entry in value if isinstance(entry, Mapping) and "kind" in entry
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"[{counts or len(value)}]" if value else "[]"


def readable(topic: str, record: Record) -> dict[str, Any]:
    """Return a record's content as plain values, or why it is unreadable."""
    if lost := lost_blob(record):
        return {"kind": "unreadable", "why": lost, "bytes": blob_bytes(record)}
    try:
        plain = msgspec.to_builtins(_decoded(topic, record))
    except SchemaError as error:
        return {"kind": "unreadable", "why": error.message, "bytes": len(record.value)}
    assert isinstance(plain, dict)
    return plain


def _decoded(topic: str, record: Record) -> Any:
    match topic:
        case "control":
            return decode_control(record.value)
        case "metrics":
            return decode_metrics(record.value)
        case "decisions":
            return decode_round(record.value)
        case "trajectories":
            return _fields(decode_trajectory(record.value))
        case "progress":
            return _fields(decode_any_progress(record.value))
        case _:
            return {
                "kind": "dead-letter",
                "headers": {name: value.decode(errors="replace") for name, value in record.headers},
                "bytes": len(record.value),
            }


def _fields(record: Trajectory | AnyProgress) -> dict[str, Any]:
    kind = re.sub(r"(?<!^)(?=[A-Z])", "-", type(record).__name__).lower()
    content: dict[str, Any] = {"kind": kind}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name != "routed_experts":
            array = isinstance(value, Sequence) and not isinstance(value, str)
            content[field.name] = len(value) if array else value
    return content


@contextmanager
def _copy_target(run: OpenRun, address: str, runs: Path) -> Iterator[CopyTarget]:
    if address.startswith(ON_KAFKA):
        with closing(_target_on_kafka(run, address, runs)) as bus:
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


def _target_on_kafka(run: OpenRun, address: str, runs: Path) -> Bus:
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


def sql(
    run: RunArgument,
    query: Annotated[
        str | None,
        typer.Argument(help="A DuckDB statement; default: list the tables."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Query the tables of a run's log in SQL; docs/reference/sql.md lists them.

    The tables of a finished run are kept in its directory, in catalogue.duckdb.
    """
    if query is None:
        names = ["table", "columns", "row"]
        rows: list[tuple[Any, ...]] = [
            (table.name, len(columns_of(table.row)), table.description)
            for table in (*TABLES, CALLS)
        ]
        damage = Damage()
    else:
        phase = "reading the log"
        with (
            opened(run, root) as open_run,
            progress(phase) as report,
            closing(open_run.tables(lambda share: report(phase, share, 1.0))) as tables,
        ):
            names, rows, damage = ask(tables, open_run.bus, open_run.topics, query)
    if as_json:
        for row in rows:
            emit_json(dict(zip(names, row, strict=True)))
    else:
        emit_table(names, rows)
    if query is None:
        say("docs/reference/sql.md describes each column")
    damage.raise_if_any(": their calls are not in the table")
