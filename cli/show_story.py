"""How the story of a trajectory, a group or a step looks on a terminal, whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora_pipe.audit.describe import TRACE, Decode, Story
from dora_pipe.cli.output import draws_blocks, emit_line, emit_pairs, emit_table
from dora_pipe.core.console import say
from dora_pipe.core.errors import PolicyError
from dora_pipe.observe.traces import tree

CELL_CHARACTERS_MAX: Final = 600
"""Longer texts are cut in tables; `--json` gives them whole."""

DROP: Final = (
    *("micro_batch", "minibatch", "weight_mean", "masked_share", "kl", "loss_share", "engine"),
    *("bytes", "logged", "sha256", "turn", "ms", "staleness", "clipped_share", "group"),
    *("deadline", "row", "attempt", "attempts", "finish"),
)
"""Columns that go where a terminal is too narrow, the first first."""


def text_decoder(assets: Path) -> Decode | None:
    """The run's tokenizer; None, and said, where it cannot be used."""
    if importlib.util.find_spec("tokenizers") is None:
        say("texts are shown as token ids: `tokenizers` is not installed (dora-pipe[torch])")
        return None
    if not any(assets.glob("tokenizer*")):
        say("texts are shown as token ids: the model directory has no tokenizer")
        return None
    from dora_pipe.producers.worker.tokenizer import Tokenizer

    try:
        return Tokenizer(assets).full_text
    except (PolicyError, OSError) as error:
        say(f"texts are shown as token ids: {error}")
        return None


def print_story(story: Story) -> None:
    """Every section, in order."""
    for section, content in story.items():
        if isinstance(content, Mapping):
            emit_pairs({name: _cut(value) for name, value in content.items()}, title=section)
        elif section == TRACE:
            rows = tree.draw(content, plain=not draws_blocks())
            emit_table(tree.COLUMNS, rows, title=section)
        else:
            _print_rows(section, content)
        emit_line()


def _print_rows(section: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        emit_pairs({"none": "-"}, title=section)
        return
    cells = [[_cut(row.get(column)) for column in columns] for row in rows]
    emit_table(columns, cells, title=section, drop=DROP)


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= CELL_CHARACTERS_MAX:
        return value
    return f"{value[:CELL_CHARACTERS_MAX]}... ({len(value)} characters)"
