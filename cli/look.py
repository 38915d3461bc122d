"""Commands that look at runs: `runs`, `topics`, `cat`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dora_pipe.bus.claims import claimed_bytes, lost_claim
from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.cli.output import emit_json, emit_rows, emit_table
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.errors import DoraError, SchemaError, UsageError
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_progress, decode_trajectory

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where runs lie.")]
RunArgument = Annotated[
    str,
    typer.Argument(help="A run's name, the path of its directory or archive, or kafka://.../RUN."),
]
ArchiveOption = Annotated[
    Path | None,
    typer.Option("--archive", metavar="DIR", help="Where what the log no longer has is read."),
]

POLL_S = 1.0


def runs(as_json: JsonOption = False, root: RunsOption = RUNS) -> None:
    """List the runs on this machine."""
    rows = []
    for path in sorted(root.glob("*/config.toml")):
        try:
            with opened(str(path.parent)) as run:
                rows.append(_run_row(run))
        except DoraError as error:
            rows.append({"run": path.parent.name, "state": f"unreadable: {error.message}"})
    emit_rows(("run", "steps", "of", "task", "log", "state"), rows, as_json=as_json)


def _run_row(run: OpenRun) -> dict[str, Any]:
    steps = 0
    for record in _from(run, run.topics.control, 0, None):
        if record.value.startswith(b'{"kind":"step-committed"'):
            steps += 1
    return {
        "run": run.config.run.name,
        "steps": steps,
        "of": run.config.run.steps,
        "task": run.config.task.kind,
        "log": run.directory.bus_url(run.config),
        "state": "finished" if _stopped(run) else "open",
    }


def _stopped(run: OpenRun) -> bool:
    return any(
        b'"kind":"stop-run"' in record.value for record in _from(run, run.topics.decisions, 0, None)
    )


def topics(
    run: RunArgument,
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """List a run's topics: partitions, positions, records and bytes."""
    with opened(run, root, archive) as open_run:
        rows = []
        for topic in open_run.topics.all():
            for partition in range(open_run.bus.partitions(topic)):
                rows.append(_topic_row(open_run, TopicPartition(topic, partition)))
    emit_rows(("topic", "partition", "begin", "end", "records", "bytes"), rows, as_json=as_json)


def _topic_row(run: OpenRun, tp: TopicPartition) -> dict[str, Any]:
    """`begin` is 0 until retention deletes; what lies before it is not counted."""
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


def cat(
    run: RunArgument,
    topic: Annotated[
        str,
        typer.Argument(help="control, metrics, decisions, trajectories, progress or dead-letters."),
    ] = "control",
    kind: Annotated[str, typer.Option(help="Only records of this kind.")] = "",
    key: Annotated[str, typer.Option(help="Only records with this key.")] = "",
    partition: Annotated[int, typer.Option(help="-1 is all.")] = -1,
    offset: Annotated[int, typer.Option("--from", help="From this offset on.")] = 0,
    limit: Annotated[int, typer.Option(help="Stop after so many; 0 does not.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Print the records of a topic."""
    with opened(run, root, archive) as open_run:
        name = f"{open_run.config.run.name}.{topic}"
        if name not in open_run.topics.all():
            known = ", ".join(one.partition(".")[2] for one in open_run.topics.all())
            raise UsageError(f"no topic {topic!r}", hint=f"there are: {known}")
        wanted = None if partition < 0 else partition
        shown = 0
        for record in _from(open_run, name, offset, wanted, follow=follow):
            if key and record.key.decode(errors="replace") != key:
                continue
            content = readable(topic, record)
            if kind and content.get("kind") != kind:
                continue
            _print_record(record, content, as_json=as_json)
            shown += 1
            if shown == limit:
                return


def _print_record(record: Record, content: dict[str, Any], *, as_json: bool) -> None:
    at = {"partition": record.partition, "offset": record.offset, "key": record.key.decode()}
    if as_json:
        emit_json({**at, "record": content})
        return
    kind = content.pop("kind", "")
    text = msgspec.json.encode(content).decode()
    emit_table(("", "", ""), [(f"{record.partition}:{record.offset}", kind, text)])


def readable(topic: str, record: Record) -> dict[str, Any]:
    """A record's content as plain values; one that cannot be read says why."""
    if lost := lost_claim(record):
        return {"kind": "unreadable", "why": lost, "bytes": claimed_bytes(record)}
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
            return _chunk(decode_progress(record.value))
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


def _chunk(progress: Progress) -> dict[str, Any]:
    return {
        "kind": "progress",
        "trajectory": progress.trajectory,
        "attempt": progress.attempt,
        "version": progress.version,
        "worker": progress.worker,
        "start": progress.start,
        "tokens": len(progress.token_ids),
        "previous": progress.previous,
    }


def _from(
    run: OpenRun, topic: str, offset: int, partition: int | None, *, follow: bool = False
) -> Iterator[Record]:
    """Records of a topic from an offset to the present end, or for ever."""
    wanted = range(run.bus.partitions(topic)) if partition is None else [partition]
    partitions = [TopicPartition(topic, one) for one in wanted]
    ends = {tp: run.bus.end(tp) for tp in partitions}
    reader = run.bus.reader(dict.fromkeys(partitions, offset))
    try:
        while follow or any(reader.position(tp) < end for tp, end in ends.items()):
            yield from reader.poll(timeout_s=POLL_S)
    finally:
        reader.close()
