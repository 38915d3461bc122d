"""Specification of data: sources, selection of rows, names of columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

HUB: Final = "hf:"
"""Prefix of a source on the Hugging Face hub."""


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of one or several sources, in order.

    Columns are renamed first; `filter`, `part` and `prompt` use the new names.
    """

    sources: tuple[str, ...]
    """Paths, globs, or `hf:NAME[:CONFIG][@REVISION]`."""
    split: str = ""
    """Split of hub data sets; empty: `train`."""
    columns: Mapping[str, str] = {}
    """Old name by new name; an empty new name drops the column."""
    filter: str = ""
    part: Literal["all", "train", "eval"] = "all"
    """Training or held-out part of the remaining rows."""
    held_out: float = 0.0
    """Held-out share of the rows, chosen by a hash of their content."""
    prompt: str = ""
    """Column that must hold text or a conversation in every row; empty: no check."""


class DataProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of preparation."""

    text: str


class DataRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Reason why data cannot be read."""

    message: str
    hint: str | None
    kind: str


def describe_sources(sources: tuple[str, ...]) -> str:
    """Return the sources as named in messages."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{more}"


def without(columns: Mapping[str, str]) -> Iterator[str]:
    return (new for new, old in columns.items() if not old)
