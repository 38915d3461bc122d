"""The first page's figures, from a book alone; it decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from dora_pipe.history.report import FATES
from dora_pipe.ui.book import Book
from dora_pipe.ui.figures import buckets, quantile, seconds, short
from dora_pipe.ui.rows import PHASES, StepRow
from dora_pipe.ui.timeline import timeline, utilisation

NEWEST: Final = 12
"""Decisions on the first page."""

ROUTINE: Final = frozenset({"end", "plan-period"})
"""Decisions that the first page leaves out: there is one for every group that was not trained."""


def overview(book: Book, *, read: float = 1.0) -> dict[str, Any]:
    """Everything on the first page. `read` is the share of the log that the book holds."""
    return {
        "run": run_of(book, read),
        "totals": _totals(book),
        "reward": _reward(book.steps),
        "evaluation": _evaluation(book),
        "staleness": _staleness(book.steps),
        "timeline": timeline(book),
        "utilisation": utilisation(book),
        "bubble": _bubble(book.steps),
        "times": _times(book),
        "fates": _fates(book),
        "lengths": _lengths(book.steps),
        "decisions": {"counts": dict(sorted(book.counts.items())), "newest": _newest(book)},
    }


def run_of(book: Book, read: float = 1.0) -> dict[str, Any]:
    """What a run is, and how far it is."""
    config, started = book.config, book.started
    groups = config.get("groups", {})
    return {
        "name": book.run,
        "state": "finished" if book.stopped else "open",
        "read": round(read, 4),
        "revision": book.revision,
        "first_ns": str(book.first_ns),
        "seconds": seconds(book.last_ns, book.first_ns) or 0.0,
        "steps": len(book.steps),
        "steps_last": config.get("run", {}).get("steps"),
        "version": book.version,
        "task": config.get("task", {}).get("kind"),
        "group_size": groups.get("size"),
        "per_step": groups.get("per_step"),
        "max_staleness": config.get("staleness", {}).get("max_staleness"),
        "interruptible": config.get("staleness", {}).get("interruptible", False),
        "objective": config.get("objective", {}).get("kind"),
        "seed": None if started is None else started.seed,
        "planner": None if started is None else started.planner,
        "package": None if started is None else started.package,
        "engines": sorted({worker.engine for worker in book.workers.values()}),
    }


def _totals(book: Book) -> dict[str, Any]:
    logged = [worker.trajectories for worker in book.workers.values()]
    tokens = sum(worker.tokens for worker in book.workers.values())
    run_s = max(1e-9, (book.last_ns - book.first_ns) / 1e9)
    return {
        "groups": len(book.groups),
        "open": len(book.groups) - sum(book.group_fates.values()),
        "trajectories": sum(logged),
        "not_counting": book.not_counting,
        "tokens": tokens,
        "tokens_per_s": short(tokens / run_s),
        "workers": len(book.workers),
        "group_fates": {one: book.group_fates[one] for one in FATES if book.group_fates[one]},
    }


def _reward(steps: Sequence[StepRow]) -> dict[str, Any]:
    """Per step: mean of valid rewards; raw, where one without a valid reward counts as 0; and
    between which means the middle half of the groups lies."""
    out: dict[str, list[Any]] = {
        name: [] for name in ("step", "last", "valid", "raw", "low", "high", "invalid", "n")
    }
    for some in buckets(steps):
        means = sorted(mean for one in some for mean in one.means)
        count, total = sum(one.rewards for one in some), sum(one.reward_sum for one in some)
        invalid = sum(one.invalid for one in some)
        out["step"].append(some[0].step)
        out["last"].append(some[-1].step)
        out["valid"].append(short(total / count) if count else None)
        out["raw"].append(short(total / (count + invalid)) if count + invalid else None)
        out["low"].append(short(quantile(means, 0.25)))
        out["high"].append(short(quantile(means, 0.75)))
        out["invalid"].append(invalid)
        out["n"].append(count)
    return out


def _evaluation(book: Book) -> dict[str, Any]:
    found = [(one, sums) for one, sums in sorted(book.evaluations.items()) if sums[0]]
    return {
        "version": [one for one, _ in found],
        "reward": [short(total / count) for _, (count, total) in found],
        "n": [int(count) for _, (count, _) in found],
    }


def _staleness(steps: Sequence[StepRow]) -> dict[str, Any]:
    out: dict[str, list[Any]] = {
        name: [] for name in ("step", "last", "low", "mean", "high", "bound")
    }
    total: Counter[int] = Counter()
    for one in steps:
        total.update(one.staleness)
    for some in buckets(steps):
        values = [value for one in some for value in one.staleness]
        out["step"].append(some[0].step)
        out["last"].append(some[-1].step)
        out["low"].append(min(values, default=None))
        out["mean"].append(short(sum(values) / len(values)) if values else None)
        out["high"].append(max(values, default=None))
        out["bound"].append(max(one.bound for one in some))
    return {**out, "groups": {str(one): count for one, count in sorted(total.items())}}


def _bubble(steps: Sequence[StepRow]) -> dict[str, Any]:
    """Per step, seconds: until its batch was there, computing, and everything else it took."""
    out: dict[str, list[Any]] = {
        name: [] for name in ("step", "last", "waited", "compute", "other")
    }
    for some in buckets(steps):
        count = len(some)
        waited = sum(one.waited_s for one in some) / count
        compute = sum(one.compute_s for one in some) / count
        whole = sum(max(0, one.committed_ns - one.free_ns) for one in some) / 1e9 / count
        out["step"].append(some[0].step)
        out["last"].append(some[-1].step)
        out["waited"].append(short(waited))
        out["compute"].append(short(compute))
        out["other"].append(short(max(0.0, whole - waited - compute)))
    whole_s = sum(max(0, one.committed_ns - one.free_ns) for one in steps) / 1e9
    waited_s = sum(one.waited_s for one in steps)
    return {**out, "share": short(waited_s / whole_s) if whole_s else None}


def _times(book: Book) -> dict[str, Any]:
    rows = [
        {
            "low": low,
            "high": high,
            "n": int(sums[0]),
            "seconds": [short(total / sums[0]) for total in sums[1:]],
        }
        for (low, high), sums in sorted(book.times.items())
        if sums[0]
    ]
    return {"phases": list(PHASES), "rows": rows}


def _fates(book: Book) -> list[dict[str, Any]]:
    """Trajectories of training groups that have ended, by length bucket."""
    found: dict[tuple[int, int], dict[str, int]] = {}
    for (bucket, fate), count in book.fates.items():
        found.setdefault(bucket, {})[fate] = count
    return [
        {
            "low": low,
            "high": high,
            "n": sum(fates.values()),
            "fates": {fate: fates[fate] for fate in FATES if fate in fates},
            "trained_share": short(fates.get("trained", 0) / sum(fates.values())),
        }
        for (low, high), fates in sorted(found.items())
    ]


def _lengths(steps: Sequence[StepRow]) -> dict[str, Any]:
    """Sampled tokens of the trajectories of a batch."""
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    out: dict[str, list[Any]] = {name: [] for name in ("step", "last", *shares)}
    for some in buckets(steps):
        values = some[0].tokens if len(some) == 1 else sorted(t for one in some for t in one.tokens)
        out["step"].append(some[0].step)
        out["last"].append(some[-1].step)
        for name, share in shares.items():
            out[name].append(quantile(values, share))
    return out


def _newest(book: Book) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in reversed(book.decisions):
        if one.kind in ROUTINE:
            continue
        found.append(
            {
                "at": seconds(one.at_ns, book.first_ns),
                "round": one.round,
                "kind": one.kind,
                "subject": one.subject,
                "reason": one.reason,
            }
        )
        if len(found) == NEWEST:
            break
    return found
