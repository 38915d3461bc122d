"""`audit --cassette`: which tools of a run answer otherwise than a cassette says."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Final

from dora_pipe.audit.cassette_diff import ComparedTool, answers_by_key, compare
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.core.console import say
from dora_pipe.core.errors import ReplayDiverged, UsageError, one_line
from dora_pipe.launch.cassettes import cassette_of, said_of, write_cassette
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.producers.tasks.cassette_file import CassetteFile

EXAMPLES: Final = 5
"""Of each tool."""

ANSWER_CHARACTERS: Final = 40


def audit_cassette(run: OpenRun, cassette: str, root: Path, *, as_json: bool) -> None:
    """Compare the answers in a run's log with a cassette, a file or another run.

    Raises ReplayDiverged where a tool answers otherwise, UsageError where nothing can be compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "run.jsonl")
        made = write_cassette(run, own, lambda *_: None)
        with (
            closing(CassetteFile(own, writes=False)) as found,
            closing(CassetteFile(cassette_of(cassette, root), writes=False)) as known,
        ):
            tools = compare(found.all(), answers_by_key(known.all()))
    say(f"{run.topics.run}: {said_of(made)}")
    if as_json:
        emit_json({"tools": [asdict(one) for one in tools]})
    else:
        _print(tools)
    if not any(one.compared for one in tools):
        raise UsageError(f"no call of {run.topics.run} is on {cassette}")
    if changed := [one for one in tools if one.changed]:
        names = ", ".join(f"{one.name} ({len(one.changed)} of {one.compared})" for one in changed)
        raise ReplayDiverged(
            f"answers otherwise than on {cassette}: {names}",
            hint='task.cassette_mode = "refresh" records what is answered now',
        )


def _print(tools: list[ComparedTool]) -> None:
    rows = [(one.name, one.compared, len(one.changed), one.unknown) for one in tools]
    emit_table(("answers of", "compared", "changed", "not on the cassette"), rows)
    examples = [
        (each.trajectory, each.call, _short(each.recorded), _short(each.found))
        for one in tools
        for each in one.changed[:EXAMPLES]
    ]
    if examples:
        emit_line()
        emit_table(("trajectory", "call", "on the cassette", "in the run"), examples)


def _short(text: str) -> str:
    return one_line(text, ANSWER_CHARACTERS)
