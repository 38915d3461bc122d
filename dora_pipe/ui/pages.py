"""The pages of one step, group, version and trajectory; it decides what `--redact` hides.

Hidden are token ids and texts, and everything that a task may have said: errors of rewards, of
environments and of attempts, and what it left in `extra`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.errors import DoraError, SchemaError, UsageError
from dora_pipe.history.reading import record_at
from dora_pipe.policies.store import PolicyStore
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.ui import tables
from dora_pipe.ui.asking import Question
from dora_pipe.ui.book import Book
from dora_pipe.ui.figures import seconds, short
from dora_pipe.ui.rows import GroupRow, TrajectoryRow

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

TOKENS_MAX: Final = 2048
"""Tokens on one page of a trajectory."""

HIDDEN: Final = "(hidden)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a run's records lie; one thread uses it."""

    bus: Bus
    topics: Topics
    policies: PolicyStore | None
    """None where there is none: an archive may have been made without."""
    decode: Decode | None
    """None where there is no tokenizer."""
    redact: bool = False

    def said(self, text: str | None) -> str | None:
        """What a task said, if it may be shown."""
        return HIDDEN if text and self.redact else text

    def contributions(self, sha256: str) -> list[dict[str, Any]]:
        """Rows of a step; none where the file is gone or cannot be read."""
        if self.policies is None:
            return []
        try:
            if not self.policies.has_blob("contributions", sha256):
                return []
            return read_contributions(self.policies.blob("contributions", sha256))
        except (DoraError, OSError, ValueError):
            return []


def step_page(book: Book, source: Source, asked: Question) -> dict[str, Any]:
    """A step: what it was made of, and what it made. Raises UsageError."""
    number = _number(asked.path[-1])
    one = next((step for step in book.steps if step.step == number), None)
    if one is None:
        last = book.steps[-1].step if book.steps else "none"
        raise UsageError(f"step {number} is not committed", hint=f"the last one is {last}")
    found = [book.groups[name] for name in one.groups if name in book.groups]
    last_came = max(
        (row for group in found for row in group.trajectories if row.logged_ns),
        key=lambda row: (row.logged_ns, row.trajectory),
        default=None,
    )
    return {
        "step": dict(zip(tables.STEP_COLUMNS, tables.step_row(book, one), strict=True)),
        "facts": {
            "attempt": one.attempt,
            "committed": f"control:{one.offset}",
            "why then": one.reason,
            "came last": None if last_came is None else last_came.trajectory,
            "weights before": f"version {number} {one.digest_before}",
            "weights after": f"version {number + 1} {one.digest_after}",
            "adopted": one.adopted,
        },
        "figures": {name: short(value, 6) for name, value in sorted(one.figures.items())},
        "settings": dict(sorted(one.settings.items())),
        "groups": {
            "columns": list(tables.GROUP_COLUMNS),
            "rows": [tables.group_row(book, group) for group in found],
        },
        "versions": sorted(Counter(group.version for group in found).items()),
        "sampled_from": book.sampled_from[number + 1],
    }


def group_page(book: Book, source: Source, asked: Question) -> dict[str, Any]:
    """A group: its dispatch, its siblings, its fate. Raises UsageError."""
    name = asked.path[-1]
    group = book.groups.get(name)
    if group is None:
        raise UsageError(f"no group {name!r} in run {book.run}")
    return {
        "group": dict(zip(tables.GROUP_COLUMNS, tables.group_row(book, group), strict=True)),
        "facts": _group_facts(book, group),
        "siblings": {
            "columns": list(tables.TRAJECTORY_COLUMNS),
            "rows": [tables.trajectory_row(book, group, row) for row in group.trajectories],
        },
        "lineage": _lineage(book, group),
    }


def _group_facts(book: Book, group: GroupRow) -> dict[str, Any]:
    first = book.first_ns
    return {
        "purpose": group.purpose,
        "prompt": f"row {group.index}",
        "why dispatched": group.reason,
        "dispatched at s": seconds(group.dispatched_ns, first),
        "taken at s": seconds(group.taken_ns, first),
        "ended at s": seconds(group.ended_ns, first),
    }


def _lineage(book: Book, group: GroupRow) -> dict[str, Any]:
    """Back: the step that made its version. Forward: the version that its step made."""
    trained = group.fate == "trained"
    return {
        "version": group.version,
        "made_by": group.version - 1 if group.version > 0 else None,
        "step": group.step if trained else None,
        "makes": group.step + 1 if trained else None,
        "sampled_from_it": book.sampled_from[group.step + 1] if trained else None,
    }


def version_page(book: Book, source: Source, asked: Question) -> dict[str, Any]:
    """A version: who made it, who hosted it, what was sampled from it. Raises UsageError."""
    number = _number(asked.path[-1])
    if not 0 <= number <= book.version:
        raise UsageError(f"no version {number}", hint=f"the newest is {book.version}")
    own = [one for one in book.groups.values() if one.version == number]
    hosts = [
        [worker.worker, worker.epoch, seconds(stay.ready_ns, book.first_ns)]
        for worker in book.workers.values()
        for stay in worker.stays
        if stay.version == number
    ]
    steps = Counter(one.step for one in own if one.fate == "trained")
    return {
        "version": number,
        "made_by": number - 1 if number else None,
        "hosts": {"columns": ["worker", "role epoch", "ready at s"], "rows": hosts},
        "fates": dict(sorted(Counter(f"{one.fate} ({one.purpose})" for one in own).items())),
        "steps": sorted(steps.items()),
    }


def trajectory_page(book: Book, source: Source, asked: Question) -> dict[str, Any]:
    """A trajectory, with at most `TOKENS_MAX` tokens from `from` on. Raises UsageError."""
    name = asked.path[-1]
    row, group = book.trajectories.get(name), book.group_of(name)
    if row is None or group is None:
        raise UsageError(f"no trajectory {name!r} in run {book.run}")
    first = book.first_ns
    return {
        "row": dict(
            zip(tables.TRAJECTORY_COLUMNS, tables.trajectory_row(book, group, row), strict=True)
        ),
        "group": group.group,
        "facts": _group_facts(book, group) | {"fate": group.fate, "why": group.why},
        "attempts": {
            "columns": ["attempt", "placed", "worker", "role epoch", "goes on at token", "why"],
            "rows": [
                [
                    one.attempt,
                    seconds(one.at_ns, first),
                    one.worker,
                    one.epoch,
                    one.resumed,
                    one.reason,
                ]
                for one in row.placements
            ],
        },
        "errors": [source.said(one) for one in row.errors],
        "record": _record(source, row, max(0, asked.whole("from"))),
        "contribution": _contribution(book, source, group, name),
        "lineage": _lineage(book, group),
        "redacted": source.redact,
    }


def _contribution(book: Book, source: Source, group: GroupRow, name: str) -> dict[str, Any] | None:
    if group.fate != "trained":
        return None
    step = next((one for one in book.steps if one.step == group.step), None)
    rows = [] if step is None else source.contributions(step.contributions)
    return next((one for one in rows if one["trajectory"] == name), None)


def _record(source: Source, row: TrajectoryRow, start: int) -> dict[str, Any]:
    """What the record says; why it says nothing, where it does not."""
    if row.offset < 0:
        return {"missing": "no record of it counts yet"}
    at = TopicPartition(source.topics.trajectories, row.partition)
    record = record_at(source.bus, at, row.offset)
    if record is None:
        return {"missing": f"trajectories:{row.partition}:{row.offset} is gone"}
    try:
        found = decode_trajectory(record.value)
    except SchemaError as error:
        return {"missing": f"trajectories:{row.partition}:{row.offset}: {error.message}"}
    meta = found.meta
    return {
        "place": f"trajectories:{row.partition}:{row.offset}",
        "bytes": len(record.value),
        "reward_raw": meta.reward_raw,
        "reward_parts": meta.reward_parts,
        "reward_error": source.said(meta.reward_error),
        "error": source.said(meta.error),
        "finish": meta.finish,
        "moves": meta.moves,
        "prefills": list(meta.prefills),
        "prompt_tokens": meta.prompt_tokens,
        "times": _times(found),
        "segments": _segments(source, found),
        "tokens": _tokens(source, found, start),
    }


def _times(found: Trajectory) -> list[list[Any]]:
    """[what, ms after it was placed] for everything that happened to it."""
    times = found.meta.times
    names = ("started", "first_token", "finished", "rewarded")
    marks = [(name, getattr(times, name)) for name in names]
    return [[name, short((at - times.placed) / 1e6, 6)] for name, at in marks if at is not None]


def _segments(source: Source, found: Trajectory) -> dict[str, Any]:
    rows = [
        [
            one.kind,
            one.turn,
            one.start,
            one.end,
            one.worker or None,
            one.version if one.version >= 0 else None,
            short((one.end_ns - one.start_ns) / 1e6, 6),
        ]
        for one in found.segments
    ]
    columns = ["kind", "turn", "from token", "to token", "worker", "version", "ms"]
    return {"columns": columns, "rows": rows}


def _tokens(source: Source, found: Trajectory, start: int) -> dict[str, Any]:
    """Arrays over tokens [start, start + TOKENS_MAX): text, log-probs, mask.

    `text` is null where there is no tokenizer, ids and text are null where they are hidden. A token
    that is part of a character shows as the replacement character.
    """
    end = min(len(found.token_ids), start + TOKENS_MAX)
    ids = list(found.token_ids[start:end])
    decode = None if source.redact else source.decode
    return {
        "total": len(found.token_ids),
        "from": start,
        "ids": None if source.redact else ids,
        "text": None if decode is None else [decode([one]) for one in ids],
        "mask": list(found.loss_mask[start:end]),
        "logprob": [short(one) for one in found.logprobs[start:end]],
        "sampler": [short(one) for one in found.sampler_logprobs[start:end]],
    }


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number") from None
