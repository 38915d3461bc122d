"""The file beside a run in which audit keeps what it has read; it decides when that is believed.

The file is disposable: without it, an audit begins at the beginning. So it does when the file was
written by other code, for another run, or in another depth; when what the log has at the remembered
places is not what was there; and whenever something was wrong, since only what holds is remembered.
A log that has become shorter than it was, or whose rounds or facts are not those that were looked
at, is reported, before it is read from the beginning.

While an audit runs, the same file holds what has ended and would fill memory: groups, versions,
steps, batches, and evidence of records that nobody has named.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.audit.audit_state import AuditState, fingerprint
from dora_pipe.audit.index_file import FILE_NAME, SCHEMA, AuditIndex, Remembered
from dora_pipe.audit.reading import records_from, records_of
from dora_pipe.audit.round_reader import rolled
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.core.errors import TopicMissing
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

__all__ = ["FILE_NAME", "SCHEMA", "AuditIndex", "Opened", "Remembered", "look_up", "open_index"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An index with what is to be begun from; `said` is a line for people, `cut` a violation."""

    index: AuditIndex
    books: AuditState
    again: Remembered | None
    """What the books go on from; None at the beginning."""
    said: str = ""


def open_index(
    path: Path | None,
    bus: Bus,
    topics: Topics,
    *,
    whole: bool,
    files: bool,
    fresh: bool = False,
    mark: str = "",
) -> Opened:
    """The index at `path` and the books that it remembers, if the log is the one they are of.

    Without a path, or where the file cannot be used, a temporary one takes its place. `whole` and
    `files` say what is wanted: books that looked at less are not gone on with. Raises BusError.
    """
    said = ""
    index: AuditIndex | None = None
    if path is not None:
        try:
            index = AuditIndex(path)
        except sqlite3.Error as error:
            said = f"{path} cannot be used ({error}): nothing is remembered"
    if index is None:
        index = AuditIndex(None)
    remembered = None if fresh else index.remembered()
    doubt, cut = "", ""
    if remembered is not None:
        doubt = _unlike(remembered, topics, whole, files, mark)
        if not doubt:
            doubt, cut = _compare(remembered, bus, topics)
        if not doubt and not cut:
            cut = _changed(remembered, bus, topics)
        books = None if doubt or cut else index.books()
        if books is not None:
            return Opened(index=index, books=index.attach(books), again=remembered, said=said)
        said = said or (f"begins at the beginning: {doubt}" if doubt else said)
    if cut:  # What it remembers stays, so that the next look says the same.
        index.close()
        index = AuditIndex(None)
    index.clear()
    books = index.attach(AuditState(topics.run, whole=whole))
    if cut:
        books.findings.add("records", "log", cut)
    return Opened(index=index, books=books, again=None, said=said)


def look_up(path: Path, bus: Bus, topics: Topics, mark: str = "") -> Opened | None:
    """The books in a file as they were remembered, to be read; None if there are none of this log.

    Close the index when they are not needed any more.
    """
    if not path.is_file():
        return None
    with suppress(sqlite3.Error):
        index = AuditIndex(path, write=False)
        remembered = index.remembered()
        if remembered is not None and not _unlike(remembered, topics, False, False, mark):
            same = _compare(remembered, bus, topics) == ("", "")
            books = index.books() if same else None
            if books is not None:
                return Opened(index=index, books=index.attach(books), again=remembered)
        index.close()
    return None


def _unlike(one: Remembered, topics: Topics, whole: bool, files: bool, mark: str) -> str:
    """Why what is remembered is of no use here; empty if it may be."""
    if one.run != topics.run:
        return f"the index is of run {one.run}"
    if one.mark != mark:
        return "the log is another file than the one that was looked at"
    if one.code != fingerprint():
        return "the index was written by another version"
    if (whole and not one.whole) or (files and not one.files):
        return "the index was written by an audit that looked at less"
    return ""


def _compare(one: Remembered, bus: Bus, topics: Topics) -> tuple[str, str]:
    """(why the log is another one, what is gone of this one); both empty if it is all there."""
    control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
    places = {control: one.control, decisions: one.decisions}
    for partition, offset, sha256 in one.trajectories:
        places[TopicPartition(topics.trajectories, partition)] = offset, sha256
    try:
        ends = {tp: bus.end(tp) for tp in places}
    except TopicMissing:
        return "the index is of another log", ""
    there = {tp: offset for tp, (offset, _) in places.items() if offset < ends[tp]}
    found = records_from(bus, there)

    def is_there(tp: TopicPartition) -> bool:
        record, (offset, sha256) = found.get(tp), places[tp]
        same = record is not None and record.offset == offset
        return record is not None and same and sha256_hex(record.value) == sha256

    if not is_there(control):
        return "the index is of another log", ""
    for tp, (offset, _) in places.items():
        name = f"{tp.topic.removeprefix(f'{topics.run}.')}:{tp.partition}"
        if tp not in there:
            return "", f"{name} ends at {ends[tp]} and held offset {offset} when audit last looked"
        if not is_there(tp):
            return "", f"{name} has another record at offset {offset} than audit has seen there"
    return "", ""


def _changed(one: Remembered, bus: Bus, topics: Topics) -> str:
    """What is gone from the rounds and facts that were looked at, or was changed; read as bytes."""
    for topic, (end, expected) in zip((topics.control, topics.decisions), one.rolled, strict=True):
        at, name = TopicPartition(topic, 0), topic.removeprefix(f"{topics.run}.")
        if bus.end(at) < end:
            return f"{name}:0 ends at {bus.end(at)} and was read up to {end} when audit last looked"
        digest = ""
        with closing(records_of(bus, {at: end})) as records:
            for record in records:
                digest = rolled(digest, record)
        if digest != expected:
            return f"{name}:0 has other records below offset {end} than audit has seen there"
    return ""
