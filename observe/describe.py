"""Describe a trajectory, group or step as sections, for the terminal and the pages.

A section is a mapping of names to values, or rows; `--json` returns it unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from dora_pipe.audit.reading import record_at
from dora_pipe.bus.logged import fault_of, logged_trajectory
from dora_pipe.core.errors import InvariantBroken, SchemaError, UsageError, one_line
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.account import mean
from dora_pipe.ledger.calls import call_rows
from dora_pipe.ledger.database import counting_record, logged_records
from dora_pipe.ledger.history import REQUEUED
from dora_pipe.ledger.tables import CallRow
from dora_pipe.observe.traces.history import History
from dora_pipe.observe.web.view import RunSource, RunView
from dora_pipe.schemas.contexts import bounds
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.trajectory import Segment, Times, Trajectory

Description = dict[str, Any]
Rows = list[dict[str, Any]]
Shown = Callable[[str | None], str | None]
"""Returns a task's text, or a note that it is hidden."""

CUT_AT: Final = 120
"""Shown characters of an agent's answer."""

TRACE: Final = "trace"

DAMAGE: Final = "damage"
"""Section with damage of the record that counts."""

_STEP: Final = re.compile(r"^(?:step[- ]?)?(\d+)$")
_TRAJECTORY: Final = re.compile(r"^[ge]\d{10}-\d{3}$")


def describe(view: RunView, source: RunSource, name: str) -> Description:
    """Describe ``g0000000042-003``, ``g0000000042`` or ``7`` (a step), with its trace.

    Without a tokenizer, texts are token ids. Raises UsageError for an unknown id.
    """
    if step := _STEP.match(name):
        return _describe_step(view, source, int(step[1]))
    trajectory = name if _TRAJECTORY.match(name) else ""
    if trajectory:
        description, _ = trajectory_sections(view, source, name, texts=True)
    else:
        description = group_sections(view, name)
    own_group = group_of(trajectory) if trajectory else name
    history = History(source.bus, source.topics, group=own_group)
    trace = history.group_trace(only=trajectory)
    if not trajectory:
        description |= _scoring(history)
        if lines := history.damage.lines:
            description[DAMAGE] = [{"what": line} for line in lines]
    started, group = history.account.started, _group(view, own_group)
    trained = group["step"] if group["outcome"] == "trained" else None
    description["lineage"] = _lineage(view, started, group["version"], trained)
    description[TRACE] = trace
    return description


def _describe_step(view: RunView, source: RunSource, number: int) -> Description:
    description = step_sections(view, number)
    history = History(source.bus, source.topics, step=number)
    assert history.step is not None
    fact = history.step.fact
    description["step"]["batch digest"] = fact.batch_digest
    description["weights"] |= {
        "bytes": fact.policy.bytes,
        "tensors": len(fact.policy.tensors),
        "checkpoint": "-" if fact.checkpoint is None else fact.checkpoint.sha256,
        "contributions": fact.contributions.sha256,
    }
    description["numerics"] = dict(sorted(fact.numerics.items()))
    description["trajectories"] = source.contributions(fact.contributions.sha256)
    description["lineage"] = _lineage(view, history.account.started, number, number)
    description[TRACE] = history.step_trace()
    return description


def step_sections(view: RunView, number: int) -> Description:
    """Describe a committed step. Raises UsageError."""
    rows = view.records(
        """select s.*, b.round, b.last_trajectory from steps s left join batches b
           on b.step = s.step and b.attempt = s.attempt where s.step = ?""",
        number,
    )
    if not rows:
        last = view.version - 1 if view.version > 0 else "none"
        what = f"step {number} is not committed in run {view.run}"
        raise UsageError(what, hint=f"the last one is {last}")
    (row,) = rows
    parts = _parts(view, number)
    seconds = {"early s": round(row["early_s"], 3)}
    if row["overlap_s"]:
        seconds["overlap s"] = round(row["overlap_s"], 3)
    sizes = " ".join(str(part["groups"]) for part in parts)
    return {
        "step": {
            "step": number,
            "attempt": row["attempt"],
            "committed": f"control:{row['control_offset']}",
            "committed at s": view.seconds(row["committed_ns"]),
            "taken": f"round {row['round']}",
            "last trajectory": row["last_trajectory"],
            "batch reason": row["batch_reason"],
            "compute s": row["compute_s"],
            **({"parts": sizes, **seconds} if parts else {}),
            "adopted": row["adopted"],
        },
        "weights": {
            "before": f"version {number} {row['digest_before']}",
            "after": f"version {number + 1} {row['digest_after']}",
        },
        "metrics": dict(sorted(msgspec.json.decode(row["metrics"]).items())),
        "settings": dict(sorted(msgspec.json.decode(row["settings"]).items())),
        "groups": _groups_of_step(view, number),
        **({"parts": parts} if parts else {}),
    }


def _groups_of_step(view: RunView, number: int) -> Rows:
    rows = view.records(
        """select g.group_id as "group", g.version, g.deadline, g.staleness, g.row, g.reward,
                  string_agg(coalesce(format('{:g}', t.reward), '-'), ' ' order by t.sample)
                      as rewards,
                  string_agg(t.error_class, ' ' order by t.sample) as "no reward",
                  g.tokens, g.part
           from groups g join trajectories t using (group_id)
           where g.step = ? and g.outcome = 'trained' and t.record_offset is not null
           group by all order by g.part, g.group_id""",
        number,
    )
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _parts(view: RunView, number: int) -> Rows:
    rows = view.records("select * from parts where step = ? order by part", number)
    return [
        {
            "part": row["part"],
            "taken at s": view.seconds(row["taken_ns"]),
            "begun at s": view.seconds(row["begun_ns"]),
            "waited s": row["waited_s"],
            "early s": row["seconds"],
            "groups": row["groups"],
            "tokens": row["tokens"],
            "last trajectory": row["last_trajectory"],
            "reason": row["batch_reason"],
        }
        for row in rows
    ]


def group_sections(view: RunView, name: str) -> Description:
    """Describe a group. Raises UsageError."""
    group = _group(view, name)
    rows = _samples(view, "t.group_id = ?", name)
    return {
        "group": _dispatch(view, group),
        "samples": [
            {
                "trajectory": row["trajectory_id"],
                "status": row["status"],
                "attempts": row["attempts"],
                "worker": row["worker"],
                "reward": row["reward"],
                "tokens": row["tokens"],
                "finish": row["finish"],
            }
            for row in rows
        ],
        "outcome": _outcome(view, group),
    }


def trajectory_sections(
    view: RunView, source: RunSource, name: str, *, texts: bool = False
) -> tuple[Description, Trajectory | None]:
    """Describe a trajectory; also return its record that counts, if readable.

    `texts` adds its segments. Raises UsageError.
    """
    samples = _samples(view, "t.trajectory_id = ?", name)
    if not samples:
        raise _unknown(view, name)
    (sample,), group = samples, _group(view, group_of(name))
    errors = view.records(
        """select concat('attempt ', attempt, ': ', error, ': ', message) as what from failures
           where trajectory_id = ? order by rowid""",
        name,
    )
    description: Description = {
        "trajectory": {"trajectory": name, "status": sample["status"]},
        "group": _dispatch(view, group),
        "attempts": _attempts(view, name),
    }
    if errors:
        description["errors"] = [{"what": source.shown(row["what"])} for row in errors]
    description["records"] = list(_records(view, source, name))
    record, damage = _counting_trajectory(view, source, name)
    if record is not None:
        description |= record_sections(record, source.shown)
        if texts:
            description["segments"] = list(_segments(source, record))
    if damage:
        description[DAMAGE] = [{"what": damage}]
    if sample["group_parts"] is not None:
        parts = {"reward": sample["reward"], "parts": sample["group_parts"]}
        description["scored together"] = parts
    description["outcome"] = _outcome(view, group)
    if (outcome := sample["outcome"]) is not None:
        description["outcome"] = {"outcome": outcome, "reason": _WHY_LEFT[outcome]}
    description["contribution"] = _contribution(view, source, group, name)
    return description, record


def _unknown(view: RunView, name: str) -> UsageError:
    return UsageError(
        f"{name!r} is not in run {view.run}",
        hint="a trajectory (g0000000042-003), a group (g0000000042) or a step (7)",
    )


def _group(view: RunView, name: str) -> dict[str, Any]:
    sql = """select g.*, v.digest from groups g left join versions v using (version)
             where group_id = ?"""
    rows = view.records(sql, name)
    if not rows:
        raise _unknown(view, name)
    return rows[0]


def _dispatch(view: RunView, group: Mapping[str, Any]) -> dict[str, Any]:
    prompt = f"row {group['row']} of {group['dataset_digest'][:12]}, pass {group['data_epoch']}"
    redundancy = group["redundancy"]
    return {
        "group": group["group_id"],
        "purpose": group["purpose"],
        **{name: group[name] for name in ("task", "evaluation") if group[name]},
        "samples": group["size"],
        **({"redundant trajectories": redundancy} if redundancy else {}),
        "prompt": prompt,
        "seed": group["seed"],
        "dispatched": f"round {group['round']} ({group['dispatch_reason']})",
        "dispatched at s": view.seconds(group["dispatched_ns"]),
        "taken at s": view.seconds(group["taken_ns"]),
        "version": f"{group['version']} ({group['digest']})",
        "deadline": "none" if group["purpose"] == "eval" else f"step {group['deadline']}",
    }


def _samples(view: RunView, where: str, value: str) -> Rows:
    rows = view.records(
        f"""select t.trajectory_id, t.outcome, t.attempts, t.reward, t.tokens, t.finish,
                   t.group_parts, t.logged_ns, if(t.logged_ns is null, null, t.worker) as worker,
                   count(*) filter (a.outcome in ('failed', 'fenced')) as faults,
                   last(a.outcome order by a.attempt) as last,
                   t.trajectory_id in (
                       select trajectory_id from failures where not retryable) as final,
                   (select config->'rollout'->'max_attempts' from runs)::int as attempts_max
            from trajectories t left join attempts a using (trajectory_id)
            where {where} group by all order by t.trajectory_id""",
        value,
    )
    return [{**row, "status": _status(row)} for row in rows]


def _status(sample: Mapping[str, Any]) -> str:
    if sample["logged_ns"] is not None:
        return "logged"
    if sample["final"] or sample["faults"] >= sample["attempts_max"]:
        return "failed"
    if sample["outcome"] is not None:
        return str(sample["outcome"])
    if not sample["attempts"]:
        return "queued"
    if sample["last"] in REQUEUED:
        return "waiting for another worker"
    return sample["last"] or "running"


def _attempts(view: RunView, name: str) -> Rows:
    rows = view.records("select * from attempts where trajectory_id = ? order by attempt", name)
    return [
        {
            "attempt": row["attempt"],
            "worker": _worker(row["worker"], row["incarnation"]),
            "round": row["round"],
            "scheduled at s": view.seconds(row["scheduled_ns"]),
            "resumed tokens": row["resumed_tokens"],
            "reason": row["schedule_reason"],
        }
        for row in rows
    ]


def _records(view: RunView, source: RunSource, name: str) -> Iterator[dict[str, Any]]:
    named = logged_records(view.catalogue, "trajectory_id = ?", [name])
    rows = view.records(
        """select r.*, w.worker, concat_ws(' ', w.engine, w.engine_version) as engine
           from records r left join workers w using (incarnation)
           where trajectory_id = ? order by control_offset""",
        name,
    )
    for row in rows:
        record = named[row["partition"], row["record_offset"]]
        partition = TopicPartition(source.topics.trajectories, record.partition)
        fault = fault_of(record_at(source.bus, partition, record.offset), record)
        yield {
            "position": f"trajectories:{record.partition}:{record.offset}",
            "status": record.status,
            "attempt": record.attempt,
            "worker": _worker(row["worker"], record.incarnation),
            "engine": row["engine"],
            "logged": f"control:{row['control_offset']}",
            "bytes": row["size_bytes"],
            "sha256": record.sha256,
            "comparison": fault or "as logged",
        }


def _counting_trajectory(
    view: RunView, source: RunSource, name: str
) -> tuple[Trajectory | None, str]:
    """Return the record that counts, and why it cannot be read."""
    named = counting_record(view.catalogue, name)
    if named is None:
        return None, ""
    partition = TopicPartition(source.topics.trajectories, named.partition)
    try:
        return logged_trajectory(record_at(source.bus, partition, named.offset), named), ""
    except (InvariantBroken, SchemaError) as error:
        return None, error.message


def _outcome(view: RunView, group: Mapping[str, Any]) -> dict[str, Any]:
    step = group["step"]
    if group["outcome"] == "open":
        what = "not taken yet" if step is None else f"in the batch of step {step}"
        return {"outcome": "open", "reason": what}
    outcome: dict[str, Any] = {"outcome": group["outcome"], "reason": group["end_reason"]}
    outcome["ended at s"] = view.seconds(group["ended_ns"])
    if step is not None:
        outcome |= {"step": step, "staleness": group["staleness"]}
    return outcome


def _contribution(
    view: RunView, source: RunSource, group: Mapping[str, Any], name: str
) -> dict[str, Any]:
    if group["outcome"] != "trained":
        return {"none": "it was not trained"}
    digest = view.value("select contributions from steps where step = ?", group["step"])
    own = [row for row in source.contributions(digest) if row["trajectory"] == name]
    return own[0] if own else {"none": "its contributions file is not in the store"}


def _scoring(history: History) -> Description:
    ended, started = history.group, history.account.started
    if ended is None or started is None or ended.group.spec.source not in started.scored_together:
        return {}
    by = ended.group.asked
    unscored = "not yet" if ended.outcome == "open" else "failed"
    return {
        "scored together": {
            "attempts": 0 if by is None else by.attempt,
            "worker": "-" if by is None else _worker(by.worker, by.incarnation),
            "scored": unscored if ended.group.scores is None else "yes",
        }
    }


def _lineage(
    view: RunView, started: RunStarted | None, version: int, step: int | None
) -> dict[str, str]:
    """Return what made a version, and the use of the version that a step made."""
    lineage = {f"made version {version}": _origin(view, started, version)}
    if step is not None:
        count = view.sampled_from(step + 1)
        text = f"{count} groups sampled from it" if count else "nothing was sampled"
        lineage[f"its step made version {step + 1}"] = text
    return lineage


def _origin(view: RunView, started: RunStarted | None, version: int) -> str:
    if version == 0:
        parent = None if started is None else started.lineage
        if parent is None:
            return "the model the run started with"
        state = ", with its optimizer's state" if parent.optimizer is not None else ""
        return f"run {parent.run}, after step {parent.step} ({parent.digest}){state}"
    rows = view.rows(
        """select staleness, count(*) from groups where step = ? and outcome = 'trained'
           group by all order by all""",
        version - 1,
    )
    if not rows:
        return "no commit in the log"
    mixed = ", ".join(f"{count} groups of staleness {staleness}" for staleness, count in rows)
    return f"step {version - 1}, from {mixed}"


def record_sections(trajectory: Trajectory, shown: Shown) -> Description:
    """Describe a record: its result, times, contexts and calls."""
    meta = trajectory.meta
    return {
        "result": {
            "reward": trajectory.reward,
            "raw reward": meta.reward_raw,
            "reward error": shown(meta.reward_error),
            "reward parts": msgspec.json.encode(meta.reward_parts).decode(),
            "answer": shown(meta.reward_answer) or None,
            "rewarded by": meta.rewarded_by,
            "agent's answer": shown(one_line(meta.agent_answer or "", CUT_AT)) or None,
            "finish": meta.finish,
            "error": shown(meta.error),
            "tokens": f"{len(trajectory.token_ids)} ({trajectory.sampled} sampled)",
            "prompt tokens": meta.prompt_tokens,
            "migrations": meta.migrations,
            "prefilled at": " ".join(map(str, meta.prefills)),
            "mean log-prob": mean([value for value in trajectory.logprobs if value is not None]),
        },
        "times": _times(meta.times),
        **_branches(trajectory, shown),
    }


def _segments(source: RunSource, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    for context, segment in by_context(trajectory):
        ids = trajectory.token_ids[segment.start : segment.end]
        yield {
            **({"context": context} if trajectory.meta.contexts else {}),
            "kind": segment.kind,
            "turn": segment.turn,
            "tokens": f"{segment.start}-{segment.end}",
            "worker": _worker(segment.worker, segment.incarnation) if segment.worker else "-",
            "version": segment.version if segment.version >= 0 else None,
            "ms": (segment.end_ns - segment.start_ns) / 1e6,
            "text": " ".join(map(str, ids)) if source.decode is None else source.decode(ids),
        }


def by_context(trajectory: Trajectory) -> Iterator[tuple[int, Segment]]:
    """Yield the segments with the number of their context."""
    number = -1
    for segment in trajectory.segments:
        number += segment.kind == "prompt"
        yield max(0, number), segment


def _branches(trajectory: Trajectory, shown: Shown) -> Description:
    meta, rows = trajectory.meta, list(call_rows(trajectory))
    description: Description = {}
    if meta.contexts or rows:
        calls = Counter(row.context for row in rows)
        parents = [(-1, 0), *((context.parent, context.shared) for context in meta.contexts)]
        places = bounds(meta.contexts, trajectory.length)
        description["contexts"] = [
            {
                "context": number,
                "parent": None if parent < 0 else parent,
                "shared": shared,
                "tokens": shared + end - start,
                "sampled": int(sum(trajectory.loss_mask[start:end])),
                "calls": calls[number],
            }
            for number, ((parent, shared), (start, end)) in enumerate(
                zip(parents, places, strict=True)
            )
        ]
    if rows:
        scheduled_ns = meta.times.scheduled
        description["calls"] = [_call_row(row, scheduled_ns, shown) for row in rows]
    return description


def _call_row(call: CallRow, scheduled_ns: int, shown: Shown) -> dict[str, Any]:
    return {
        "call": call.call,
        "context": call.context,
        "caller": shown(call.caller),
        "asked ms": (call.asked_ns - scheduled_ns) / 1e6,
        "took ms": (call.answered_ns - call.asked_ns) / 1e6,
        "idle before ms": call.idle_ns / 1e6,
        "prompt tokens": call.prompt_tokens,
        "tokens": call.tokens,
        "finish": call.finish,
        "again": call.occurrence or None,
        "api": call.api or None,
        "ignored settings": shown(call.ignored_settings),
    }


def _worker(name: str | None, incarnation: int) -> str:
    return f"{name or '-'} (incarnation {incarnation})"


_WHY_LEFT: Final = {
    "redundant": "its group had enough valid trajectories without it",
    "expired": "its group was open for too long",
}


def _times(times: Times) -> dict[str, Any]:
    """Return the placement in ns and later times in ms after it."""
    values: dict[str, Any] = {"scheduled": times.scheduled}
    for name in ("started", "first_token", "finished", "rewarded"):
        time_ns = getattr(times, name)
        label = f"{name.replace('_', ' ')} after ms"
        values[label] = None if time_ns is None else (time_ns - times.scheduled) / 1e6
    return values
