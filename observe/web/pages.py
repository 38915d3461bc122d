"""Pages of one step, group, version and trajectory.

`--redact` hides token ids, texts, errors and `extra`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.describe import (
    DAMAGE,
    group_sections,
    step_sections,
    trajectory_sections,
)
from dora_pipe.observe.web import tables
from dora_pipe.observe.web.view import Decode, Query, RunSource, RunView, short
from dora_pipe.schemas.contexts import bounds, pieces
from dora_pipe.schemas.trajectory import Trajectory

TOKENS_MAX: Final = 2048


def step_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Raises UsageError."""
    number = _number(asked.path[-1])
    versions = view.rows(
        """select version, count(*) from groups where step = ? and outcome = 'trained'
           group by version order by version""",
        number,
    )
    return {
        "sections": step_sections(view, number),
        "row": tables.STEPS.one(view, "step", number),
        "versions": versions,
        "sampled_from": view.sampled_from(number + 1),
        "newest": view.version - 1,
    }


def group_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Raises UsageError."""
    name = asked.path[-1]
    sections, row = group_sections(view, name), tables.GROUPS.one(view, "g.group_id", name)
    return {"sections": sections, "row": row, "lineage": _lineage(view, row or {})}


def _lineage(view: RunView, row: Mapping[str, Any]) -> dict[str, Any]:
    step = row["step"] if row["outcome"] == "trained" else None
    sampled_from = None if step is None else view.sampled_from(step + 1)
    return {"version": row["version"], "step": step, "sampled_from": sampled_from}


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
    outcomes = view.records(
        """select purpose, outcome, count(*) as groups, avg(reward) as reward from groups
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
        "served": [
            {"worker": worker, "incarnation": incarnation, "ready at s": view.seconds(ready_ns)}
            for worker, incarnation, ready_ns in served
        ],
        "outcomes": outcomes,
        "evaluations": evaluations,
        "steps": steps,
    }


def trajectory_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Return at most `TOKENS_MAX` tokens, starting at `from`. Raises UsageError."""
    name = asked.path[-1]
    sections, trajectory = trajectory_sections(view, source, name)
    row = tables.TRAJECTORIES.one(view, "t.trajectory_id", name) or {}
    if trajectory is None:
        damage = sections.pop(DAMAGE, [{"what": "No record of this trajectory counts yet."}])
        record = {"missing": damage[0]["what"]}
    else:
        record = {
            "segments": _segments(trajectory),
            "tree": tree_of(trajectory),
            "tokens": _tokens(source, trajectory, max(0, asked.whole("from"))),
        }
    return {
        "sections": sections,
        "row": row,
        "record": record,
        "lineage": _lineage(view, row),
        "redacted": source.redact,
    }


def _segments(trajectory: Trajectory) -> dict[str, Any]:
    rows = [
        [
            *(segment.kind, segment.turn, segment.start, segment.end, segment.worker or None),
            segment.version if segment.version >= 0 else None,
            short((segment.end_ns - segment.start_ns) / 1e6, 6),
        ]
        for segment in trajectory.segments
    ]
    columns = ["kind", "turn", "from token", "to token", "worker", "version", "ms"]
    return {"columns": columns, "rows": rows}


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


def tree_of(trajectory: Trajectory) -> dict[str, Any] | None:
    """Return contexts of a record; None for one context without calls.

    `contexts`: [parent or null, shared tokens, start, end]; `shared`: stretches of the record that
    each begins with; `starts`: start of the sampled tokens of each call.
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
    }
