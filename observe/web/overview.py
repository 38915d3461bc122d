"""Data of the first page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

import msgspec

from dora_pipe.audit.group_ledger import Bucket, bucket_of
from dora_pipe.audit.report import FATES
from dora_pipe.ledger.evaluations import figures_of, samples_by_prompt
from dora_pipe.observe.run_stats import LEARNING, learning_of
from dora_pipe.observe.waits import for_batches, waits_of
from dora_pipe.observe.web.tables import decision_counts
from dora_pipe.observe.web.timeline import timeline, utilisation
from dora_pipe.observe.web.view import RunView, marks_of, short
from dora_pipe.observe.why import ADVICE
from dora_pipe.schemas.control import FAULTS, by_fault, fault_of

Points = dict[str, list[Any]]

POINTS_MAX: Final = 400
"""Most points of a series; longer runs average neighboring steps."""

WAITS_MAX: Final = 8

NEWEST: Final = 12

ROUTINE: Final = ("end", "plan-period")
"""Decisions hidden on the first page: every group that was not trained has one."""

PHASES: Final = ("queued", "worker", "siblings", "batch", "training")
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
    "waited": "avg(waited_s)",
    "compute": "avg(compute_s)",
    "ahead": "avg(ahead_s)",
    "other": f"greatest(0, avg({_WHOLE_S}) - avg(waited_s) - avg(compute_s))",
}


def overview(view: RunView) -> dict[str, Any]:
    """Return the first page; `static/overview.js` lists the columns of each chart."""
    points = _points(view)
    times, fates = _by_length(view)
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
                   where fate = 'trained' group by staleness order by staleness"""
            )
        ),
        "timeline": timeline(view),
        "utilisation": utilisation(view),
        "waited_share": short(
            view.value(f"select sum(waited_s) / nullif(sum({_WHOLE_S}), 0) from steps")
        ),
        "waits": _waits(view),
        "times": {"phases": list(PHASES), "rows": times},
        "fates": fates,
        "decisions": {"counts": decision_counts(view), "newest": _newest(view)},
    }


def run_of(view: RunView) -> dict[str, Any]:
    """Return identity and progress of a run."""
    found = view.catalogue.one("select config, seed, planner, package from runs")
    text, seed, planner, package = found or ("{}", None, None, None)
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
        "first_ns": str(view.first_ns),
        "seconds": view.seconds(view.last_ns) or 0.0,
        "steps": view.value("select count(*) from steps"),
        "steps_last": config.get("run", {}).get("steps"),
        "version": view.version,
        "task": config.get("task", {}).get("kind"),
        "group_size": rollout.get("group_size"),
        "per_step": rollout.get("prompts_per_step"),
        "max_staleness": staleness.get("max_staleness"),
        "partial_rollout": staleness.get("partial_rollout", False),
        "objective": config.get("objective", {}).get("kind"),
        "seed": seed,
        "planner": planner,
        "package": package,
        "engines": [one for (one,) in engines],
    }


def _totals(view: RunView) -> dict[str, Any]:
    of_fate = view.rows("select fate, count(*), sum(tokens)::bigint from groups group by fate")
    fates = {fate: count for fate, count, _ in of_fate}
    tokens = sum(sampled for _, _, sampled in of_fate)
    standings = dict(view.rows("select standing, count(*) from records group by standing"))
    counted = standings.pop("bound", 0)
    run_s = max(1e-9, (view.last_ns - view.first_ns) / 1e9)
    return {
        "groups": sum(fates.values()),
        "open": fates.get("open", 0),
        "trajectories": counted,
        "not_counting": sum(standings.values()),
        "tokens": tokens,
        "tokens_per_s": short(tokens / run_s),
        "workers": view.value("select count(*) from workers"),
        "group_fates": {one: fates[one] for one in FATES if one in fates and one != "open"},
    }


def _points(view: RunView) -> Points:
    """Return columns over chart points; a point is one or several steps."""
    columns = ", ".join(f"{sql} as {name}" for name, sql in _POINT.items())
    found = view.rows(f"select {columns} from {_POINTS} group by point order by point")
    return {
        name: [short(row[at]) if isinstance(row[at], float) else row[at] for row in found]
        for at, name in enumerate(_POINT)
    }


def _places(points: Points) -> dict[int, int]:
    bounds = zip(points["step"], points["last"], strict=True)
    return {step: at for at, (first, last) in enumerate(bounds) for step in range(first, last + 1)}


def _means(points: Points, told: Iterable[tuple[int, str, float]]) -> dict[str, list[float | None]]:
    """Return a column of means per name from (step, name, value)."""
    places = _places(points)
    found: dict[str, list[list[float]]] = {}
    for step, name, value in told:
        found.setdefault(name, [[] for _ in points["step"]])[places[step]].append(value)
    return {
        name: [short(fmean(own)) if own else None for own in column]
        for name, column in found.items()
    }


def _evaluations(view: RunView) -> list[dict[str, Any]]:
    """Return a series per name: versions, mean rewards, numbers of valid rewards, metrics."""
    found: dict[str, dict[str, Any]] = {}
    for (version, name, _, size), prompts in samples_by_prompt(view.catalogue).items():
        rewards = [one.reward for own in prompts for one in own]
        if not rewards:
            continue
        empty = {"name": name, "version": [], "reward": [], "n": [], "figures": {}}
        own = found.setdefault(name, empty)
        own["version"].append(version)
        own["reward"].append(short(sum(rewards) / len(rewards)))
        own["n"].append(len(rewards))
        figures = figures_of(prompts, siblings=size)
        for figure, value in figures.items():
            column = own["figures"].setdefault(figure, [])
            column += [None] * (len(own["version"]) - 1 - len(column))
            column.append(short(value))
    for own in found.values():
        for column in own["figures"].values():
            column += [None] * (len(own["version"]) - len(column))
    return list(found.values())


def _parts(view: RunView) -> Iterator[tuple[int, str, float]]:
    """Yield (step, task and component, mean) of every reward component."""
    sql = "select step, reward_parts from steps where reward_parts is not null"
    for step, text in view.rows(sql):
        for task, parts in msgspec.json.decode(text).items():
            for name, value in parts.items():
                yield step, f"{task} {name}".strip(), value


def _learning(view: RunView, points: Points) -> list[dict[str, Any]]:
    found = _means(
        points,
        (
            (step, name, value)
            for step, *texts in view.rows("select step, figures, settings from steps")
            for name, value in learning_of(*map(msgspec.json.decode, texts)).items()
        ),
    )
    return [
        {"name": name, "note": note, "y": found[name]}
        for name, note in LEARNING.items()
        if name in found
    ]


def _invalid(view: RunView, points: Points) -> dict[str, Any]:
    """Return invalid trajectories by fault (per point those of batches), and in total by error
    class."""
    places = _places(points)
    series: dict[str, list[int]] = {fault: [0] * len(points["step"]) for fault in FAULTS}
    errors: Counter[str] = Counter()
    for step, fate, name, count in view.rows(
        """select g.step, g.fate, t.error_class, count(*)
           from trajectories t join groups g using (group_id)
           where t.error_class is not null group by all order by all"""
    ):
        errors[name] += count
        if fate == "trained":
            series[fault_of(name)][places[step]] += count
    return {"series": series, "errors": by_fault(errors)}


def _waits(view: RunView) -> dict[str, Any]:
    causes = for_batches(waits_of(view.catalogue))
    whole_s = sum(causes.values())
    longest = sorted(causes.items(), key=lambda item: -item[1])[:WAITS_MAX]
    return {
        "columns": ["the trainer waited for", "seconds", "share", "what to do"],
        "rows": [
            [what, short(seconds), f"{seconds / whole_s:.0%}", ADVICE.get(kind, "")]
            for (kind, what), seconds in longest
            if seconds
        ],
    }


def _by_length(view: RunView) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return, by length bucket, mean seconds per phase, and counts by outcome."""
    marks = (
        "g.dispatched_ns",
        "t.placed_ns",
        "t.logged_ns",
        "coalesce(g.complete_ns, t.logged_ns)",
        "g.taken_ns",
        "g.ended_ns",
    )
    sums = ", ".join(
        f"sum(greatest(0, {later} - {earlier}) / 1e9)" for earlier, later in pairwise(marks)
    )
    found = view.rows(
        f"""select case when coalesce(t.tokens, 0) = 0 then -1
                        else ceil(log2(t.tokens))::integer end as bits,
                   g.fate, count(*), count(t.logged_ns), {sums}
            from trajectories t join groups g using (group_id)
            where g.purpose = 'train' and g.fate <> 'open' group by bits, g.fate"""
    )
    times: list[dict[str, Any]] = []
    fates: dict[Bucket, dict[str, int]] = {}
    for bits, fate, count, logged, *sums_s in sorted(found, key=lambda row: row[:2]):
        low, high = bucket_of(0 if bits < 0 else 1 << bits)
        fates.setdefault((low, high), {})[fate] = count
        if fate == "trained" and logged:
            mean_s = [short(one / logged) for one in sums_s]
            times.append({"low": low, "high": high, "n": logged, "seconds": mean_s})
    return times, [_fates(bucket, counts) for bucket, counts in fates.items()]


def _fates(bucket: Bucket, counts: Mapping[str, int]) -> dict[str, Any]:
    low, high = bucket
    count = sum(counts.values())
    return {
        "low": low,
        "high": high,
        "n": count,
        "fates": {fate: counts[fate] for fate in FATES if fate in counts},
        "trained_share": short(counts.get("trained", 0) / count),
    }


def _newest(view: RunView) -> list[dict[str, Any]]:
    marks = ", ".join("?" * len(ROUTINE))
    found = view.rows(
        f"""select at_ns, coalesce(round, -1), kind, subject, reason from events
            where kind not in ({marks}) order by rowid desc limit {NEWEST}""",
        *ROUTINE,
    )
    return [
        {"at": view.seconds(at_ns), "round": number, "kind": kind, "subject": who, "reason": why}
        for at_ns, number, kind, who, why in found
    ]
