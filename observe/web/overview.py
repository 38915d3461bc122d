"""Data of the first page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

import msgspec

from dora_pipe.audit.group_ledger import bucket_of
from dora_pipe.audit.report import OUTCOMES
from dora_pipe.ledger.evaluations import metrics_of, samples_by_prompt
from dora_pipe.observe.run_stats import LEARNING, learning_of
from dora_pipe.observe.waits import for_batches, waits_of
from dora_pipe.observe.web.timeline import timeline, utilisation
from dora_pipe.observe.web.view import RunView, marks_of, short
from dora_pipe.observe.why import ADVICE
from dora_pipe.schemas.control import FAULTS, by_fault, fault_of

Points = dict[str, list[Any]]

POINTS_MAX: Final = 400
"""Most points of a series; longer runs average neighboring steps."""

WAITS_MAX: Final = 8

PHASES: Final = ("queued", "worker", "samples", "batch", "training")
"""Phases end at: first placement; logged; last trajectory of the group logged; batch taken; step
committed."""

_POINTS: Final = f"""(
    select *, (row_number() over (order by step) - 1) * {POINTS_MAX}
              // greatest(count(*) over (), {POINTS_MAX}) as point from steps)"""

_WHOLE_S: Final = "greatest(0, coalesce(seconds, (committed_ns - taken_ns) / 1e9))"
"""Seconds of a step, including its wait."""

_POINT: Final = {
    "step": "min(step)",
    "last": "max(step)",
    "n_steps": "count(*)",
    "n": "sum(valid)::bigint",
    "invalid": "sum(trajectories - valid)::bigint",
    "valid": "sum(reward * valid) / nullif(sum(valid), 0)",
    "raw": "sum(reward_raw * trajectories) / nullif(sum(trajectories), 0)",
    "reward_low": "sum(reward_low * valid) / nullif(sum(valid), 0)",
    "reward_high": "sum(reward_high * valid) / nullif(sum(valid), 0)",
    "stale_low": "min(staleness_min)",
    "stale_mean": "sum(staleness_mean * groups) / nullif(sum(groups), 0)",
    "stale_high": "max(staleness_max)",
    "bound": "max(bound)",
    "p10": "round(avg(tokens_p10))::bigint",
    "p50": "round(avg(tokens_p50))::bigint",
    "p90": "round(avg(tokens_p90))::bigint",
    "longest": "max(tokens_max)::bigint",
    "tokens": "sum(tokens)::bigint",
    "seconds": f"avg({_WHOLE_S})",
    "waited": "avg(waited_s)",
    "compute": "avg(compute_s)",
    "ahead": "avg(early_s)",
    "other": f"greatest(0, avg({_WHOLE_S}) - avg(waited_s) - avg(compute_s))",
}


def overview(view: RunView) -> dict[str, Any]:
    """Return the first page; `static/run.js` draws it."""
    points = _points(view)
    return {
        "run": run_of(view),
        "totals": _totals(view),
        "marks": marks_of(view.catalogue, view.first_ns),
        "points": points,
        "evaluations": _evaluations(view),
        "parts": _means(points, _parts(view)),
        "learning": _learning(view, points),
        "invalid": _invalid(view, points),
        "staleness": dict(
            view.rows(
                """select staleness::varchar, count(*) from groups
                   where outcome = 'trained' group by staleness order by staleness"""
            )
        ),
        "timeline": timeline(view),
        "utilisation": utilisation(view),
        "waited_share": short(
            view.value(f"select sum(waited_s) / nullif(sum({_WHOLE_S}), 0) from steps")
        ),
        "waits": _waits(view),
        "times": {"phases": list(PHASES), "rows": _times(view)},
    }


def run_of(view: RunView) -> dict[str, Any]:
    row = view.catalogue.one("select config, seed, planner, package from runs")
    text, *facts = row or ("{}", None, None, None)
    config = msgspec.json.decode(text)
    rollout, staleness = config.get("rollout", {}), config.get("staleness", {})
    engines = view.rows(
        """select distinct concat(engine, ' ', engine_version, ' on ', device) as engine
           from workers order by engine"""
    )
    return {
        "name": view.run,
        "state": "finished" if view.finished else "open",
        "read": round(view.read, 4),
        "revision": view.revision,
        "seconds": view.seconds(view.last_ns) or 0.0,
        "steps": view.value("select count(*) from steps"),
        "steps_last": config.get("run", {}).get("steps"),
        "version": view.version,
        "task": config.get("task", {}).get("kind"),
        "group_size": rollout.get("group_size"),
        "prompts_per_step": rollout.get("prompts_per_step"),
        "max_staleness": staleness.get("max_staleness"),
        "partial_rollout": staleness.get("partial_rollout", False),
        "objective": config.get("objective", {}).get("kind"),
        **dict(zip(("seed", "planner", "package"), facts, strict=True)),
        "engines": [engine for (engine,) in engines],
    }


def _totals(view: RunView) -> dict[str, Any]:
    rows = view.rows("select outcome, count(*), sum(tokens)::bigint from groups group by outcome")
    outcomes = {outcome: count for outcome, count, _ in rows}
    tokens = sum(sampled for _, _, sampled in rows)
    statuses = dict(view.rows("select status, count(*) from records group by status"))
    counted = statuses.pop("bound", 0)
    run_s = max(1e-9, (view.last_ns - view.first_ns) / 1e9)
    return {
        "groups": sum(outcomes.values()),
        "open": outcomes.get("open", 0),
        "trajectories": counted,
        "not_counting": sum(statuses.values()),
        "tokens": tokens,
        "tokens_per_s": short(tokens / run_s),
        "outcomes": {
            outcome: outcomes[outcome]
            for outcome in OUTCOMES
            if outcome in outcomes and outcome != "open"
        },
    }


def _points(view: RunView) -> Points:
    columns = ", ".join(f"{sql} as {name}" for name, sql in _POINT.items())
    rows = view.rows(f"select {columns} from {_POINTS} group by point order by point")
    return {
        name: [short(row[index]) if isinstance(row[index], float) else row[index] for row in rows]
        for index, name in enumerate(_POINT)
    }


def _places(points: Points) -> dict[int, int]:
    bounds = zip(points["step"], points["last"], strict=True)
    return {
        step: index for index, (first, last) in enumerate(bounds) for step in range(first, last + 1)
    }


def _means(
    points: Points, samples: Iterable[tuple[int, str, float]]
) -> dict[str, list[float | None]]:
    places = _places(points)
    columns: dict[str, list[list[float]]] = {}
    for step, name, value in samples:
        columns.setdefault(name, [[] for _ in points["step"]])[places[step]].append(value)
    return {
        name: [short(fmean(own)) if own else None for own in column]
        for name, column in columns.items()
    }


def _evaluations(view: RunView) -> list[dict[str, Any]]:
    evaluations: dict[str, list[tuple[int, list[float], dict[str, float]]]] = {}
    for (version, name, _, size), prompts in samples_by_prompt(view.catalogue).items():
        rewards = [sample.reward for prompt in prompts for sample in prompt]
        if rewards:
            metrics = metrics_of(prompts, samples=size)
            evaluations.setdefault(name, []).append((version, rewards, metrics))
    return [
        {
            "name": name,
            "version": [version for version, _, _ in rows],
            "reward": [short(fmean(rewards)) for _, rewards, _ in rows],
            "n": [len(rewards) for _, rewards, _ in rows],
            "metrics": {
                metric: [short(own.get(metric)) for *_, own in rows]
                for metric in dict.fromkeys(metric for *_, own in rows for metric in own)
            },
        }
        for name, rows in evaluations.items()
    ]


def _parts(view: RunView) -> Iterator[tuple[int, str, float]]:
    sql = "select step, reward_parts from steps where reward_parts is not null"
    for step, text in view.rows(sql):
        for task, parts in msgspec.json.decode(text).items():
            for name, value in parts.items():
                yield step, f"{task} {name}".strip(), value


def _learning(view: RunView, points: Points) -> list[dict[str, Any]]:
    means = _means(
        points,
        (
            (step, name, value)
            for step, *texts in view.rows("select step, metrics, settings from steps")
            for name, value in learning_of(*map(msgspec.json.decode, texts)).items()
        ),
    )
    return [
        {"name": name, "note": note, "y": means[name]}
        for name, note in LEARNING.items()
        if name in means
    ]


def _invalid(view: RunView, points: Points) -> dict[str, Any]:
    """Return invalid trajectories by fault (per point those of batches), and in total by error
    class."""
    places = _places(points)
    series: dict[str, list[int]] = {fault: [0] * len(points["step"]) for fault in FAULTS}
    errors: Counter[str] = Counter()
    for step, outcome, name, count in view.rows(
        """select g.step, g.outcome, t.error_class, count(*)
           from trajectories t join groups g using (group_id)
           where t.error_class is not null group by all order by all"""
    ):
        errors[name] += count
        if outcome == "trained":
            series[fault_of(name)][places[step]] += count
    return {"series": series, "errors": by_fault(errors)}


def _waits(view: RunView) -> dict[str, Any]:
    causes = for_batches(waits_of(view.catalogue))
    whole_s = sum(causes.values())
    longest = sorted(causes.items(), key=lambda item: -item[1])[:WAITS_MAX]
    return {
        "columns": ["trainer waited for", "seconds", "share", "advice"],
        "rows": [
            [what, short(seconds), f"{seconds / whole_s:.0%}", ADVICE.get(kind, "")]
            for (kind, what), seconds in longest
            if seconds
        ],
    }


def _times(view: RunView) -> list[dict[str, Any]]:
    marks = (
        "g.dispatched_ns",
        "t.scheduled_ns",
        "t.logged_ns",
        "coalesce(g.complete_ns, t.logged_ns)",
        "g.taken_ns",
        "g.ended_ns",
    )
    means = ", ".join(
        f"avg(greatest(0, {later} - {earlier}) / 1e9)" for earlier, later in pairwise(marks)
    )
    buckets = view.rows(
        f"""select case when coalesce(t.tokens, 0) = 0 then -1
                        else ceil(log2(t.tokens))::integer end as bits, count(*), {means}
            from trajectories t join groups g using (group_id)
            where g.purpose = 'train' and g.outcome = 'trained' and t.logged_ns is not null
            group by bits order by bits"""
    )
    rows = []
    for bits, count, *means_s in buckets:
        low, high = bucket_of(0 if bits < 0 else 1 << bits)
        rows.append({"low": low, "high": high, "n": count, "seconds": list(map(short, means_s))})
    return rows
