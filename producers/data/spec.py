"""Specification of data: sources and their files, selection of rows, names of columns.

Content identifies Parquet, gzip and zstd; the suffix identifies CSV and TSV. Other text is
JSON, one object per line or one array.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from dora_pipe.core.errors import TaskError
from dora_pipe.core.system.own_code import nearest

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


def describe_sources(sources: tuple[str, ...]) -> str:
    """Return the sources as named in messages."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{more}"


def without(columns: Mapping[str, str]) -> Iterator[str]:
    return (new for new, old in columns.items() if not old)


DEFAULT_SPLIT: Final = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSet:
    """Data set on the Hugging Face hub, such as ``hf:openai/gsm8k:main@v1``."""

    name: str
    config: str
    revision: str
    split: str

    def __str__(self) -> str:
        return f"{HUB}{self.name}"


Source = Path | HubSet
"""File or data set with rows."""


def identity(source: Source) -> tuple[str | int, ...]:
    """Return what shows a change: path, size, time and inode of a file; the hub's content may
    change. Raises TaskError."""
    if isinstance(source, HubSet):
        return source.name, source.config, source.revision, source.split
    try:
        stat = source.stat()
    except OSError as error:
        raise TaskError(f"{source}: {error.strerror}") from error
    return str(source.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino


def sources_of(spec: DataSpec) -> list[Source]:
    """Return files and hub data sets in order, those of a glob sorted. Raises TaskError for missing
    files or splits."""
    sources: list[Source] = []
    for named in spec.sources:
        sources += [_hub(named, spec.split)] if named.startswith(HUB) else _local(named, spec.split)
    return sources


def _hub(named: str, split: str) -> HubSet:
    name, _, revision = named.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    if not name:
        raise TaskError(f"`{named}` is not a data set", hint='for instance "hf:openai/gsm8k:main"')
    return HubSet(name=name, config=config, revision=revision, split=split or DEFAULT_SPLIT)


def _local(named: str, split: str) -> Iterator[Path]:
    for path in _matches(named):
        if path.is_dir():
            raise TaskError(
                f"{path}: is a directory", hint=f'name the files, for instance "{path}/*.parquet"'
            )
        if split:
            raise TaskError(f"{path}: a file has no split `{split}`")
        yield path


def _matches(named: str) -> Sequence[Path]:
    path = Path(named)
    if path.exists():
        return [path]
    if glob.has_magic(named):
        matching = sorted(glob.glob(named, recursive=True))  # noqa: PTH207  # a pattern of any root
        if not matching:
            raise TaskError(f"{named}: no file matches")
        return [Path(path) for path in matching]
    beside = [path.name for path in path.parent.iterdir()] if path.parent.is_dir() else []
    raise TaskError(f"{path}: No such file or directory", hint=nearest(path.name, beside))
