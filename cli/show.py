"""`show`: everything the log knows of one trajectory, group or step."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dora_pipe.cli.audit_index import remembered_of
from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_pairs, emit_table, say
from dora_pipe.cli.rundir import RUNS, opened
from dora_pipe.errors import PolicyError
from dora_pipe.history.story import TRACE, Decode, Story, tell
from dora_pipe.telemetry import tree

CELL_CHARACTERS_MAX: Final = 600
"""Longer cells are cut in tables; `--json` gives them whole."""


def show(
    run: RunArgument,
    wanted: Annotated[
        str, typer.Argument(metavar="ID", help="g0000000042-003, g0000000042, or 7 (a step).")
    ],
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Show where a trajectory, group or step came from, what became of it, and its trace."""
    with opened(run, root, archive) as open_run, remembered_of(open_run) as known:
        story = tell(
            open_run.bus,
            open_run.topics,
            open_run.policies,
            wanted,
            decoder=_decoder,
            known=known,
        )
    if as_json:
        emit_json(story)
        return
    _print(story)


def _decoder(assets: Path) -> Decode | None:
    """The run's tokenizer; None, and said, where it cannot be used."""
    if importlib.util.find_spec("tokenizers") is None:
        say("texts are shown as token ids: `tokenizers` is not installed (dora-pipe[torch])")
        return None
    if not any(assets.glob("tokenizer*")):
        say("texts are shown as token ids: the model directory has no tokenizer")
        return None
    from dora_pipe.producers.tokenizer import Tokenizer

    try:
        return Tokenizer(assets).full_text
    except (PolicyError, OSError) as error:
        say(f"texts are shown as token ids: {error}")
        return None


def _print(story: Story) -> None:
    for section, content in story.items():
        if isinstance(content, Mapping):
            emit_pairs({name: _cut(value) for name, value in content.items()}, title=section)
        elif section == TRACE:
            emit_table(tree.COLUMNS, tree.draw(content), title=section)
        else:
            _print_rows(section, content)
        typer.echo()


def _print_rows(section: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        emit_pairs({"none": "-"}, title=section)
        return
    cells = [[_cut(row.get(column)) for column in columns] for row in rows]
    emit_table(columns, cells, title=section)


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= CELL_CHARACTERS_MAX:
        return value
    return f"{value[:CELL_CHARACTERS_MAX]}... ({len(value)} characters)"
