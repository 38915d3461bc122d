"""What is asked of data: which files, which rows of them, under which names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

HUB: Final = "hf:"
"""How a source begins that is the name of a data set on the Hugging Face hub."""


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of one or several sources, in their order.

    Columns are renamed first; `filter`, `part` and `prompt` see the new names.

    Example: ``DataSpec(sources=("train-*.parquet",), columns={"prompt": "question"})``.
    """

    sources: tuple[str, ...]
    """Paths, globs, directories that `save_to_disk` wrote, or `hf:NAME[:CONFIG][@REVISION]`."""
    split: str = ""
    """Of saved data sets and those of the hub; empty: the only one, or `train`."""
    columns: Mapping[str, str] = {}
    """New name to old name; a new name of nothing ("") leaves that column out."""
    filter: str = ""
    """An expression over the columns; see `filters`."""
    part: Literal["all", "train", "eval"] = "all"
    """Of the rows that are left: those that `held_out` leaves, or those that it takes."""
    held_out: float = 0.0
    """Share of the rows, chosen by a hash of their content."""
    prompt: str = ""
    """A column that must hold text or a conversation in every row; empty: none is asked for."""


class DataProgress(msgspec.Struct, frozen=True, tag="progress"):
    """What preparing says of itself while it goes on."""

    text: str


class DataRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why data cannot be read."""

    message: str
    hint: str | None
    kind: str
    """Name of the error's class."""


def said_of(sources: tuple[str, ...]) -> str:
    """The sources as a message names them."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{more}"


def without(columns: Mapping[str, str]) -> Iterator[str]:
    return (new for new, old in columns.items() if not old)
