"""Pages of one step, group, version and trajectory.

`--redact` hides token ids, texts, errors and `extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.reading import record_at
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import logged_trajectory
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.core.errors import InvariantBroken, SchemaError, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.calls import call_rows
from dora_pipe.ledger.database import counting_record
from dora_pipe.observe.web import tables
from dora_pipe.observe.web.view import HIDDEN, Query, RunView, short
from dora_pipe.schemas.contexts import bounds, pieces
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.store import PolicyStore

Decode = Callable[[Sequence[int]], str]

TOKENS_MAX: Final = 2048

_GROUP: Final = (
    *("group_id", "purpose", "row", "dispatch_reason", "dispatched_ns", "taken_ns", "ended_ns"),
    *("version", "step", "outcome", "end_reason"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """Access to a run's records; used by one thread."""

    bus: Bus
    topics: Topics
    policies: PolicyStore
    decode: Decode | None
    """None without a tokenizer."""
    redact: bool = False
    catalogue: Path | None = None
    """Folder of a finished run's cached tables; None if read-only."""

    def shown(self, text: str | None) -> str | None:
        """Return a task's text unless it is hidden."""
        return HIDDEN if text and self.redact else text

    def contributions(self, sha256: str) -> list[dict[str, Any]]:
        """Return the rows of a step; empty if unreadable."""
        return stored_contributions(self.policies, sha256)


def step_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Raises UsageError."""
    number = _number(asked.path[-1])
    listed = tables.STEPS.one(view, "step", number)
    if listed is None:
        last = view.version - 1 if view.version > 0 else "none"
        raise UsageError(f"step {number} is not committed", hint=f"the last one is {last}")
    (row,) = view.records(
        """select s.*, b.last_trajectory from steps s left join batches b
           on b.step = s.step and b.attempt = s.attempt where s.step = ?""",
        number,
    )
    versions = view.rows(
        """select version, count(*) from groups where step = ? and outcome = 'trained'
           group by version order by version""",
        number,
    )
    metrics = msgspec.json.decode(row["metrics"])
    conditions: list[tables.Condition] = [("g.step = ?", number), ("g.outcome = ?", "trained")]
    rows = tables.GROUPS.rows(view, conditions, order="group")
    groups = {"columns": tables.GROUPS.names, "rows": rows}
    return {
        "step": listed,
        "facts": {
            "attempt": row["attempt"],
            "batch reason": row["batch_reason"],
            "last trajectory": row["last_trajectory"],
            "committed at s": view.seconds(row["committed_ns"]),
            "record": f"control:{row['control_offset']}",
            "weights before": row["digest_before"],
            "weights after": row["digest_after"],
            "adopted": row["adopted"],
        },
        "metrics": {name: short(value, 6) for name, value in sorted(metrics.items())},
        "settings": dict(sorted(msgspec.json.decode(row["settings"]).items())),
        "groups": groups,
        **_parts(view, number, groups),
        "versions": versions,
        "sampled_from": view.sampled_from(number + 1),
        "newest": view.version - 1,
    }


def _parts(view: RunView, step: int, groups: dict[str, Any]) -> dict[str, Any]:
    parts = view.records("select * from parts where step = ? order by part", step)
    if not parts:
        return {}
    part_of = dict(view.rows("select group_id, part from groups where step = ?", step))
    groups["columns"] = [*groups["columns"], "part"]
    groups["rows"] = [[*row, part_of.get(row[0])] for row in groups["rows"]]
    rows = [
        [
            *(row["part"], view.seconds(row["taken_ns"]), view.seconds(row["begun_ns"])),
            *(short(row["waited_s"]), short(row["seconds"]), row["groups"]),
            *(row["tokens"], row["last_trajectory"], row["batch_reason"]),
        ]
        for row in parts
    ]
    columns = (
        "part, taken at s, begun at s, waited s, early s, groups, tokens, last trajectory, reason"
    )
    return {"parts": _table(columns, rows)}


def _table(columns: str, rows: list[list[Any]]) -> dict[str, Any]:
    return {"columns": columns.split(", "), "rows": rows}


def group_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Raises UsageError."""
    name = asked.path[-1]
    listed = tables.GROUPS.one(view, "g.group_id", name)
    if listed is None:
        raise UsageError(f"no group {name!r} in run {view.run}")
    group = _group(view, name)
    return {"group": listed, "facts": _group_facts(view, group), "lineage": _lineage(view, group)}


def _group(view: RunView, name: str) -> dict[str, Any]:
    (group,) = view.records(f"select {', '.join(_GROUP)} from groups where group_id = ?", name)
    return group


def _group_facts(view: RunView, group: dict[str, Any]) -> dict[str, Any]:
    return {
        "purpose": group["purpose"],
        "data row": group["row"],
        "dispatch reason": group["dispatch_reason"],
        "dispatched at s": view.seconds(group["dispatched_ns"]),
        "taken at s": view.seconds(group["taken_ns"]),
        "ended at s": view.seconds(group["ended_ns"]),
    }


def _lineage(view: RunView, group: dict[str, Any]) -> dict[str, Any]:
    version = group["version"]
    step = group["step"] if group["outcome"] == "trained" else None
    return {
        "version": version,
        "made_by": version - 1 if version > 0 else None,
        "step": step,
        "makes": None if step is None else step + 1,
        "sampled_from_it": None if step is None else view.sampled_from(step + 1),
    }


def version_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Raises UsageError."""
    number = _number(asked.path[-1])
    if not 0 <= number <= view.version:
        raise UsageError(f"no version {number}", hint=f"the newest is {view.version}")
    served = view.rows(
        """select worker, incarnation, ready_ns from served_versions
           where version = ? order by incarnation, ready_ns""",
        number,
    )
    outcomes = view.rows(
        """select purpose, outcome, count(*), avg(reward) from groups
           where version = ? group by all order by all""",
        number,
    )
    steps = view.rows(
        """select step, count(*) from groups
           where version = ? and outcome = 'trained' group by step order by step""",
        number,
    )
    evaluations = view.rows(
        "select evaluation, reward, valid, trajectories from evaluations where version = ?", number
    )
    return {
        "version": number,
        "made_by": number - 1 if number else None,
        "served": _table(
            "worker, incarnation, ready at s",
            [[*worker, view.seconds(ready_ns)] for *worker, ready_ns in served],
        ),
        "outcomes": _table(
            "purpose, outcome, groups, reward", [[*row, short(mean)] for *row, mean in outcomes]
        ),
        "evaluations": _table(
            "evaluation, reward, valid, trajectories",
            [[name or "default", short(reward), *rest] for name, reward, *rest in evaluations],
        ),
        "steps": steps,
    }


def trajectory_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Return at most `TOKENS_MAX` tokens, starting at `from`. Raises UsageError."""
    name = asked.path[-1]
    listed = tables.TRAJECTORIES.one(view, "t.trajectory_id", name)
    if listed is None:
        raise UsageError(f"no trajectory {name!r} in run {view.run}")
    group = _group(view, group_of(name))
    attempts = view.rows(
        """select attempt, scheduled_ns, worker, incarnation, resumed_tokens, schedule_reason
           from attempts where trajectory_id = ? order by attempt""",
        name,
    )
    errors = view.rows(
        """select concat('attempt ', attempt, ': ', error, ': ', message) from failures
           where trajectory_id = ? order by rowid""",
        name,
    )
    return {
        "row": listed,
        "group": group["group_id"],
        "facts": _group_facts(view, group) | {"end reason": group["end_reason"]},
        "attempts": _table(
            "attempt, scheduled at s, worker, incarnation, resumed tokens, reason",
            [[number, view.seconds(at_ns), *rest] for number, at_ns, *rest in attempts],
        ),
        "errors": [source.shown(text) for (text,) in errors],
        "record": _record(view, source, name, max(0, asked.whole("from"))),
        "contribution": _contribution(view, source, group, name),
        "lineage": _lineage(view, group),
        "redacted": source.redact,
    }


def _contribution(
    view: RunView, source: RunSource, group: dict[str, Any], name: str
) -> dict[str, Any] | None:
    if group["outcome"] != "trained":
        return None
    digests = view.rows("select contributions from steps where step = ?", group["step"])
    rows = [row for (digest,) in digests for row in source.contributions(digest)]
    return next((row for row in rows if row["trajectory"] == name), None)


def _record(view: RunView, source: RunSource, name: str, start: int) -> dict[str, Any]:
    named = counting_record(view.catalogue, name)
    if named is None:
        return {"missing": "No record of this trajectory counts yet."}
    partition = TopicPartition(source.topics.trajectories, named.partition)
    record = record_at(source.bus, partition, named.offset)
    try:
        trajectory = logged_trajectory(record, named)
    except (InvariantBroken, SchemaError) as error:
        return {"missing": error.message}
    assert record is not None
    meta = trajectory.meta
    return {
        "position": f"trajectories:{named.partition}:{named.offset}",
        "bytes": len(record.value),
        "reward_raw": meta.reward_raw,
        "reward_parts": meta.reward_parts | _group_parts(view, name),
        "reward_answer": source.shown(meta.reward_answer),
        "reward_error": source.shown(meta.reward_error),
        "error": source.shown(meta.error),
        "finish": meta.finish,
        "migrations": meta.migrations,
        "prefills": list(meta.prefills),
        "prompt_tokens": meta.prompt_tokens,
        "times": _times(trajectory),
        "segments": _segments(trajectory),
        "tree": tree_of(trajectory, source.shown),
        "tokens": _tokens(source, trajectory, start),
    }


def _group_parts(view: RunView, name: str) -> dict[str, float]:
    parts = view.value("select group_parts from trajectories where trajectory_id = ?", name)
    return msgspec.json.decode(parts, type=dict[str, float]) if parts else {}


def _times(trajectory: Trajectory) -> list[list[Any]]:
    """Return [event, ms after placement]."""
    times = trajectory.meta.times
    names = ("started", "first_token", "finished", "rewarded")
    marks = [(name, getattr(times, name)) for name in names]
    return [
        [name, short((at_ns - times.scheduled) / 1e6, 6)]
        for name, at_ns in marks
        if at_ns is not None
    ]


def _segments(trajectory: Trajectory) -> dict[str, Any]:
    rows = [
        [
            *(segment.kind, segment.turn, segment.start, segment.end, segment.worker or None),
            segment.version if segment.version >= 0 else None,
            short((segment.end_ns - segment.start_ns) / 1e6, 6),
        ]
        for segment in trajectory.segments
    ]
    return _table("kind, turn, from token, to token, worker, version, ms", rows)


def _tokens(source: RunSource, trajectory: Trajectory, start: int) -> dict[str, Any]:
    """Return arrays over tokens [start, start + TOKENS_MAX): text, log-probs, mask.

    `text` is null without a tokenizer; ids and text are null when hidden. A partial character
    appears as the replacement character.
    """
    end = min(len(trajectory.token_ids), start + TOKENS_MAX)
    ids = list(trajectory.token_ids[start:end])
    decode = None if source.redact else source.decode
    return {
        "total": len(trajectory.token_ids),
        "from": start,
        "ids": None if source.redact else ids,
        "text": None if decode is None else token_texts(decode, trajectory.token_ids, start, end),
        "mask": list(trajectory.loss_mask[start:end]),
        "logprob": [short(logprob) for logprob in trajectory.logprobs[start:end]],
        "sampler": [short(logprob) for logprob in trajectory.sampler_logprobs[start:end]],
    }


def token_texts(decode: Decode, token_ids: Sequence[int], start: int, end: int) -> list[str]:
    """Return the text that each token in [start, end) adds.

    Word tokenizers add a blank between tokens: for ``[5, 6, 7]`` ``["a", " b", " c"]``.
    """
    texts = []
    for index in range(start, end):
        alone = decode(token_ids[index : index + 1])
        before = decode(token_ids[index - 1 : index]) if index else ""
        both = decode(token_ids[index - 1 : index + 1]) if index else alone
        added = both[len(before) :] if both.startswith(before) else ""
        texts.append(added or alone)
    return texts


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number") from None


MS: Final = 1e6

CALL_COLUMNS: Final = (
    *("call", "context", "caller", "api", "asked at ms", "took ms", "idle before ms"),
    *("prompt tokens", "tokens", "finish", "occurrence", "ignored settings"),
)


def tree_of(
    trajectory: Trajectory, printable: Callable[[str | None], str | None]
) -> dict[str, Any] | None:
    """Return contexts and calls of a record; None for one context without calls.

    `contexts`: [parent or null, shared tokens, start, end]; `shared`: stretches of the record that
    each begins with. Calls are in ms after placement. `printable` returns texts that may be shown.
    """
    meta = trajectory.meta
    if not meta.contexts and not meta.calls:
        return None
    parents = [(None, 0), *((context.parent, context.shared) for context in meta.contexts)]
    places = bounds(meta.contexts, trajectory.length)
    return {
        "contexts": [
            [None if parent == -1 else parent, shared, *span]
            for (parent, shared), span in zip(parents, places, strict=True)
        ],
        "shared": [
            pieces(meta.contexts, number, trajectory.length)[:-1] for number in range(len(places))
        ],
        "starts": [call.start for call in meta.calls],
        "calls": {"columns": list(CALL_COLUMNS), "rows": list(_rows(trajectory, printable))},
    }


def _rows(
    trajectory: Trajectory, printable: Callable[[str | None], str | None]
) -> Iterator[list[Any]]:
    scheduled_ns = trajectory.meta.times.scheduled
    for row in call_rows(trajectory):
        yield [
            row.call,
            row.context,
            printable(row.caller),
            row.api or None,
            short((row.asked_ns - scheduled_ns) / MS, 6),
            short((row.answered_ns - row.asked_ns) / MS, 6),
            short(row.idle_ns / MS, 6),
            row.prompt_tokens,
            row.tokens,
            row.finish,
            row.occurrence,
            printable(row.ignored_settings),
        ]
