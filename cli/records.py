"""Rows of `show`, `log topics` and `log read`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.cells import cell_len

from dora_pipe.bus.blobs import blob_bytes, lost_blob
from dora_pipe.cli.output import emit_json, emit_line, terminal_columns
from dora_pipe.core.errors import DoraError, SchemaError, UsageError, printable
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.launch.run_dir import OpenRun, RunDir, opened
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.trajectory import EpisodeProgress, Progress, Trajectory, TurnProgress
from dora_pipe.schemas.trajectory_codec import AnyProgress, decode_any_progress, decode_trajectory

POLL_S: Final = 1.0

MORE: Final = len("  +99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Filter of `log read`; empty, 0 and -1 match all."""

    topic: str
    kind: str = ""
    key: str = ""
    partition: int = -1
    offset: int = 0
    limit: int = 0
    follow: bool = False


def run_rows(root: Path) -> list[dict[str, Any]]:
    """Return a row per run; unreadable runs give the reason."""
    rows = []
    for path in sorted(root.glob("*/config.toml")):
        try:
            with opened(RunDir(path.parent).words) as run:
                rows.append(_run_row(run))
        except DoraError as error:
            rows.append({"run": path.parent.name, "state": f"unreadable: {error.message}"})
    return rows


def _run_row(run: OpenRun) -> dict[str, Any]:
    stats = RunStats(run.topics.run)
    stats.read(run.bus, run.topics, statuses=False)
    return {
        "run": run.config.run.name,
        "steps": stats.version,
        "reward": stats.steps[-1].reward if stats.steps else None,
        "of": run.config.run.steps,
        "task": ", ".join(task.name or task.kind for task in run.config.tasks),
        "log": run.directory.bus_url(run.config),
        "state": stats.state,
    }


def topic_rows(run: OpenRun) -> list[dict[str, Any]]:
    return [
        _topic_row(run, TopicPartition(topic, partition))
        for topic in run.topics.all()
        for partition in range(run.bus.partitions(topic))
    ]


def _topic_row(run: OpenRun, tp: TopicPartition) -> dict[str, Any]:
    """`begin` is 0 until retention deletes; deleted records are not counted."""
    begin = run.bus.begin(tp)
    sizes = [len(record.value) for record in _from(run, tp.topic, begin, tp.partition)]
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "begin": begin,
        "end": run.bus.end(tp),
        "records": len(sizes),
        "bytes": sum(sizes),
    }


def print_records(run: OpenRun, query: Wanted, *, as_json: bool) -> None:
    """Print one line per record.

    Raises UsageError for an unknown topic.
    """
    name = f"{run.config.run.name}.{query.topic}"
    if name not in run.topics.all():
        known_topics = ", ".join(topic.partition(".")[2] for topic in run.topics.all())
        raise UsageError(f"no topic {query.topic!r}", hint=f"there are: {known_topics}")
    partition = None if query.partition < 0 else query.partition
    shown = 0
    for record in _from(run, name, query.offset, partition, follow=query.follow):
        if query.key and _text(record.key) != query.key:
            continue
        content = readable(query.topic, record)
        if query.kind and content.get("kind") != query.kind:
            continue
        if as_json:
            emit_json({**_place(record), "key": _text(record.key), "record": content})
        else:
            emit_line(record_line(record, content, terminal_columns()))
        shown += 1
        if shown == query.limit:
            break


def _place(record: Record) -> dict[str, int]:
    return {"partition": record.partition, "offset": record.offset}


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
            return _summary(decode_trajectory(record.value))
        case "progress":
            progress = decode_any_progress(record.value)
            return _call(progress) if isinstance(progress, TurnProgress) else _chunk(progress)
        case _:
            return {
                "kind": "dead-letter",
                "headers": {name: value.decode(errors="replace") for name, value in record.headers},
                "bytes": len(record.value),
            }


def _summary(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "kind": "trajectory",
        "trajectory": trajectory.trajectory,
        "version": trajectory.version,
        "digest": trajectory.digest,
        "reward": trajectory.reward,
        "tokens": len(trajectory.token_ids),
        "sampled": trajectory.sampled,
        "meta": msgspec.to_builtins(trajectory.meta),
    }


def _progress(progress: AnyProgress) -> dict[str, Any]:
    return {
        "trajectory": progress.trajectory,
        "attempt": progress.attempt,
        "version": progress.version,
        "worker": progress.worker,
    }


def _chunk(progress: Progress | EpisodeProgress) -> dict[str, Any]:
    content = {
        "kind": "progress",
        **_progress(progress),
        "start": progress.start,
        "tokens": len(progress.token_ids),
        "previous": progress.previous,
    }
    if isinstance(progress, EpisodeProgress):
        turns = {segment.turn for segment in progress.segments if segment.kind == "model"}
        content |= {"kind": "episode-progress", "turns": sorted(turns), "finish": progress.finish}
    return content


def _call(progress: TurnProgress) -> dict[str, Any]:
    return {
        "kind": "turn-progress",
        **_progress(progress),
        "turn": progress.turn,
        "context": progress.context,
        "given": len(progress.given_ids),
        "tokens": len(progress.token_ids),
        "previous": progress.previous,
        "call": msgspec.to_builtins(progress.call),
    }


def _from(
    run: OpenRun, topic: str, offset: int, partition: int | None, *, follow: bool = False
) -> Iterator[Record]:
    numbers = range(run.bus.partitions(topic)) if partition is None else [partition]
    partitions = [TopicPartition(topic, number) for number in numbers]
    ends = {tp: run.bus.end(tp) for tp in partitions}
    reader = run.bus.reader(dict.fromkeys(partitions, offset))
    try:
        while follow or any(reader.position(tp) < end for tp, end in ends.items()):
            yield from reader.poll(timeout_s=POLL_S)
    finally:
        reader.close()
