"""Commands on the topics of a run's log."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from dora_pipe.cli.lazy import lazy_app
from dora_pipe.cli.options import (
    ConfigArgument,
    JsonOption,
    OverrideOption,
    RunArgument,
    RunsOption,
)
from dora_pipe.cli.output import emit_json, emit_line, emit_rows
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.console import RUNS, say


def create(config: ConfigArgument, override: OverrideOption = None) -> None:
    """Create the topics of a run, or check those that exist.

    `run` and `orchestrator` do the same if their user may create topics.
    """
    from dora_pipe.launch import plan as prepare
    from dora_pipe.launch.run import load_wanted
    from dora_pipe.launch.run_dir import run_dir

    resolved = load_wanted(config, override or ())
    if not resolved.bus.url:
        raise ConfigError(
            "log create needs a kafka:// log; this run uses SQLite",
            hint="`dora-pipe run` creates a SQLite log in the run's directory",
        )
    with closing(run_dir(resolved).open_bus(resolved)) as bus:
        topics = prepare.create_topics(bus, resolved)
        for name in topics.all():
            say(f"{name}: {bus.partitions(name)} partitions")


def topics(run: RunArgument, as_json: JsonOption = False, root: RunsOption = RUNS) -> None:
    """List the topics of a run: partitions, positions, records and bytes."""
    from dora_pipe.cli.records import topic_rows
    from dora_pipe.launch.run_dir import opened

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
    limit: Annotated[int, typer.Option(help="Maximum records; 0: no limit.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Print the records of a topic, one per line; `--json` prints all fields."""
    from dora_pipe.cli.records import Wanted, print_records
    from dora_pipe.launch.run_dir import opened

    query = Wanted(
        topic=topic,
        kind=kind,
        key=key,
        partition=partition,
        offset=offset,
        limit=limit,
        follow=follow,
    )
    with opened(run, root) as open_run:
        print_records(open_run, query, as_json=as_json)


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
    from dora_pipe.bus.copy import copy_topics
    from dora_pipe.cli.progress import progress
    from dora_pipe.launch.copy_run import copy_target
    from dora_pipe.launch.run_dir import opened

    with (
        opened(run, root) as source,
        copy_target(source, target, root) as copied,
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


log = lazy_app(
    {
        "Commands": {
            "create": (
                "cli.commands.log:create",
                "Create or check the topics of a run.",
                "log create config.toml",
            ),
            "topics": (
                "cli.commands.log:topics",
                "List the topics of a run: records and bytes.",
                "log topics demo",
            ),
            "read": (
                "cli.commands.log:read",
                "Print the records of a topic.",
                "log read demo trajectories --limit 3",
            ),
            "copy": (
                "cli.commands.log:copy",
                "Copy a run's log into one file or onto Kafka, and compare both.",
                "log copy kafka://broker:9092/mine mine.sqlite",
            ),
        }
    },
    name="log",
    help="Create, read and copy the topics of a run.",
)
