"""Workers over time: which version each hosted, and how full it was; it decides how fine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from dora_pipe.observe.web.view import RunView, short

PIECES_MAX: Final = 4000
"""Hostings on one time line, of all workers together."""

TRAINER_PIECES_MAX: Final = 1000
"""Parts and steps on the trainer's line."""

COMMITS_MAX: Final = 200
"""Commits that are marked below a time line, evenly spaced."""

SLICES_MAX: Final = 256
"""Slices of a run in which slots in use are averaged."""

MOMENTS: Final = 16
"""Of a slice: beginnings and ends of attempts are taken to the last one before them."""

SLICE_NS: Final = 50_000_000
"""Width of a slice of a short run; it doubles until they are few enough."""


STOPPED: Final = """(select min(since_ns) from marks where kind = 'resumed'
    and since_ns >= joined_ns)"""
"""When the run was stopped after a worker had joined: no worker outlasts that."""


def timeline(view: RunView, from_s: float | None = None, until_s: float | None = None) -> Any:
    """A row per worker's name, with its hostings in the window: [from, ready, until, version].

    Seconds of the run. Where there are too many, those that are shorter than what can be seen are
    taken together as one with version -1.
    """
    last_s = (view.last_ns - view.first_ns) / 1e9
    low, high = from_s or 0.0, last_s if until_s is None else until_s
    hosted: dict[str, list[list[float]]] = {}
    for worker, piece in _pieces(view, low, high):
        hosted.setdefault(worker, []).append(piece)
    workers: dict[str, dict[str, list[Any]]] = {}
    for name, joined_ns, gone_ns, why in view.rows(
        """select worker, joined_ns, gone_ns,
                  case departure when 'fenced' then concat('fenced: ', why) else why end
           from workers order by worker, incarnation"""
    ):
        row = workers.setdefault(name, {"joined": [], "gone": []})
        row["joined"].append(view.seconds(joined_ns))
        if gone_ns is not None:
            row["gone"].append([view.seconds(gone_ns), why])
    per_row = PIECES_MAX // max(1, len(workers))
    narrow_s = (high - low) / max(1, per_row)
    rows = [
        {"worker": name, "pieces": merged(hosted.get(name, []), per_row, narrow_s), **row}
        for name, row in workers.items()
    ]
    commits = [
        [step, view.seconds(at_ns)]
        for step, at_ns in view.rows(
            "select step, committed_ns from steps where committed_ns between ? and ? order by step",
            *_window(view, low, high),
        )
    ]
    every = -(-len(commits) // COMMITS_MAX) or 1
    out = {"from": low, "until": high, "rows": rows, "commits": commits[::every]}
    return out | ({"trainer": found} if (found := _trainer(view, low, high)) else {})


def _trainer(view: RunView, low: float, high: float) -> list[list[Any]]:
    """What the trainer computed in the window, where batches are taken in parts:
    [from, waited s, until, part, step, groups, tokens].

    What was not computed ahead of a batch is one piece, with the number of its last part; a batch
    that came at once has no number. Of too many, as `merged` says.
    """
    found = view.rows(
        """with ahead as (
               select step, max(part) as part, max(begun_ns) as begun_ns, sum(waited_s) as waited_s,
                      max(begun_ns + (seconds * 1e9)::bigint) as ended_ns,
                      sum(groups)::bigint as groups, sum(tokens)::bigint as tokens
               from parts group by step, case when seconds is null then -1 else part end
               union all
               select step, null, greatest(coalesce(free_ns, taken_ns), taken_ns), waited_s, null,
                      groups, tokens
               from steps where step not in (select step from parts) and exists (from parts))
           select begun_ns, a.waited_s, coalesce(ended_ns, committed_ns) as until_ns, part, step,
                  a.groups, a.tokens
           from ahead a join steps using (step)
           where until_ns >= ? and begun_ns <= ? order by begun_ns, part""",
        *_window(view, low, high),
    )
    pieces = [
        [_inside(view, begun, low, high), short(waited), _inside(view, until, low, high), *rest]
        for begun, waited, until, *rest in found
    ]
    return merged(pieces, TRAINER_PIECES_MAX, (high - low) / TRAINER_PIECES_MAX)


def merged(pieces: list[list[Any]], most: int, narrow_s: float) -> list[list[Any]]:
    """The same pieces; of too many, neighbours narrower together than a width become version -1.

    At most twice `most`, where the width is the window's share of one of them.
    """
    if len(pieces) <= most:
        return pieces
    out: list[list[Any]] = []
    for piece in pieces:
        if out and piece[2] - out[-1][0] < narrow_s:
            out[-1][2], out[-1][3] = piece[2], -1
        else:
            out.append(list(piece))
    return out


def _window(view: RunView, low: float, high: float) -> tuple[float, float]:
    """Seconds of the run as ns since 1970."""
    return view.first_ns + low * 1e9, view.first_ns + high * 1e9


def _pieces(view: RunView, low: float, high: float) -> list[tuple[str, list[float]]]:
    """[from, ready, until, version] of every hosting that reaches into the window, by worker."""
    found = view.rows(
        f"""with loads as (
               select incarnation, h.worker, version, ready_ns,
                      least(coalesce(gone_ns, ?), {STOPPED}) as end_ns,
                      ready_ns - (load_ms * 1e6)::bigint as from_ns
               from hostings h join workers using (incarnation)),
           spans as (
               select *, lead(from_ns, 1, end_ns)
                         over (partition by incarnation order by ready_ns) as until_ns
               from loads)
           select worker, version, from_ns, ready_ns, until_ns from spans
           where version >= 0 and until_ns > from_ns and until_ns >= ? and from_ns <= ?
           order by worker, incarnation, ready_ns""",
        view.last_ns,
        *_window(view, low, high),
    )
    return [
        (worker, [*(_inside(view, at, low, high) for at in marks), version])
        for worker, version, *marks in found
    ]


def _inside(view: RunView, at_ns: int, low: float, high: float) -> float:
    return round(min(max((at_ns - view.first_ns) / 1e9, low), high), 3)


def utilisation(view: RunView) -> dict[str, Any]:
    """Per slice of the run: share of slots in use of all workers, of the least and the most used
    one, and sampled tokens per second.

    In use is a slot from the placement of a request until its worker lets go of it; requests that
    a worker holds ahead of its slots count for none.
    """
    width_ns = _width_ns(view)
    workers = view.rows(
        f"select incarnation, joined_ns, least(coalesce(gone_ns, ?), {STOPPED}) from workers",
        view.last_ns,
    )
    tokens = dict(
        view.rows(
            """select (logged_ns - ?) // ? as slice, sum(tokens)::bigint from trajectories
               where logged_ns >= ? group by slice""",
            view.first_ns,
            width_ns,
            view.first_ns,  # what was logged before is another run's
        )
    )
    count = max(-(-(view.last_ns - view.first_ns) // width_ns), max(tokens, default=-1) + 1)
    used = _used(view, width_ns, count)
    out: dict[str, list[Any]] = {name: [] for name in ("at", "mean", "low", "high", "tokens_per_s")}
    for place in range(count):
        start_ns = view.first_ns + place * width_ns
        there = {
            epoch: min(gone_ns, start_ns + width_ns) - max(joined_ns, start_ns)
            for epoch, joined_ns, gone_ns in workers
        }
        pairs = [(used[epoch][place], ns / 1e9) for epoch, ns in there.items() if ns > 0]
        shares = [min(1.0, max(0.0, full / known)) for full, known in pairs]
        whole = sum(known for _, known in pairs)
        busy = sum(share * known for share, (_, known) in zip(shares, pairs, strict=True))
        out["at"].append(round((place + 0.5) * width_ns / 1e9, 3))
        out["mean"].append(short(busy / whole) if whole else None)
        out["low"].append(short(min(shares, default=None)))
        out["high"].append(short(max(shares, default=None)))
        speed = short(tokens.get(place, 0) * 1e9 / width_ns)
        out["tokens_per_s"].append(speed if whole or speed else None)
    return out


def _width_ns(view: RunView) -> int:
    width_ns = SLICE_NS
    while (view.last_ns - view.first_ns) // width_ns >= SLICES_MAX:
        width_ns *= 2
    return width_ns


def _used(view: RunView, width_ns: int, count: int) -> dict[int, list[float]]:
    """Seconds of full slots per slice, by incarnation.

    How full a worker is changes where attempts begin and end; a slice has what it began with, and
    of every change within it the change times the rest of the slice.
    """
    found = view.rows(
        f"""with spans as (
               select a.incarnation, greatest(slots, 1) as slots,
                      greatest(a.placed_ns, joined_ns) as low_ns,
                      least(coalesce(a.ended_ns, gone_ns, $1), coalesce(gone_ns, $1), {STOPPED})
                          as high_ns
               from attempts a join workers using (incarnation)),
           ends as (
               select incarnation, slots, low_ns as end_ns, 1 as more from spans
               where high_ns > low_ns
               union all
               select incarnation, slots, high_ns, -1 from spans where high_ns > low_ns),
           moments as (
               select incarnation, any_value(slots) as slots, sum(more)::integer as more,
                      (end_ns - $2) // $4 * $4 as moment_ns
               from ends group by incarnation, moment_ns),
           levels as (
               select incarnation, moment_ns, least(1, sum(more) over until_then / slots) as share
               from moments
               window until_then as (partition by incarnation order by moment_ns)),
           changes as (
               select incarnation, moment_ns,
                      share - lag(share, 1, 0)
                              over (partition by incarnation order by moment_ns) as more
               from levels)
           select incarnation, moment_ns // $3 as slice, sum(more),
                  sum(more * ($3 - moment_ns % $3)) / 1e9
           from changes group by incarnation, slice order by incarnation, slice""",
        view.last_ns,
        view.first_ns,
        width_ns,
        width_ns // MOMENTS,
    )
    changes: dict[int, dict[int, tuple[float, float]]] = {}
    for epoch, place, more, within_s in found:
        changes.setdefault(epoch, {})[place] = more, within_s
    used: dict[int, list[float]] = defaultdict(lambda: [0.0] * count)
    for epoch, own in changes.items():
        share = 0.0
        for place in range(count):
            more, within_s = own.get(place, (0.0, 0.0))
            used[epoch][place] = share * width_ns / 1e9 + within_s
            share += more
    return used
