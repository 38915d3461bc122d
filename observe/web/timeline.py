"""Served versions and utilization of workers over time."""

from __future__ import annotations

from typing import Any, Final

from dora_pipe.observe.web.view import RunView, short

PIECES_MAX: Final = 4000
TRAINER_PIECES_MAX: Final = 1000
SLICES_MAX: Final = 256

SLICE_NS: Final = 50_000_000
"""Slice width of a short run; doubles until `SLICES_MAX` is met."""


STOPPED: Final = """(select min(since_ns) from marks where kind = 'resumed'
    and since_ns >= joined_ns)"""
"""Stop of the run after a worker joined; it then serves no version."""


def timeline(view: RunView, from_s: float | None = None, until_s: float | None = None) -> Any:
    """Return a row per worker with its versions in the window: [from, ready, until, version].

    Times are seconds of the run. Too many are merged, with version -1.
    """
    last_s = (view.last_ns - view.first_ns) / 1e9
    low, high = from_s or 0.0, last_s if until_s is None else until_s
    served: dict[str, list[list[float]]] = {}
    for worker, piece in _pieces(view, low, high):
        served.setdefault(worker, []).append(piece)
    workers: dict[str, dict[str, list[Any]]] = {}
    for name, gone_ns, why in view.rows(
        """select worker, gone_ns,
                  if(departure = 'fenced', 'fenced: ', '') || end_reason
           from workers order by worker, incarnation"""
    ):
        row = workers.setdefault(name, {"gone": []})
        if gone_ns is not None:
            row["gone"].append([view.seconds(gone_ns), why])
    per_row = PIECES_MAX // max(1, len(workers))
    narrow_s = (high - low) / max(1, per_row)
    rows = [
        {"worker": name, "pieces": merged(served.get(name, []), per_row, narrow_s), **row}
        for name, row in workers.items()
    ]
    out = {"from": low, "until": high, "rows": rows}
    return out | ({"trainer": trainer} if (trainer := _trainer(view, low, high)) else {})


def _trainer(view: RunView, low: float, high: float) -> list[list[Any]]:
    """Return the trainer's pieces in the window: [from, waited s, until, part, step, groups,
    tokens].

    A batch taken whole has no part number. Too many are merged as in `merged`.
    """
    rows = view.rows(
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
        for begun, waited, until, *rest in rows
    ]
    return merged(pieces, TRAINER_PIECES_MAX, (high - low) / TRAINER_PIECES_MAX)


def merged(pieces: list[list[Any]], most: int, narrow_s: float) -> list[list[Any]]:
    """Merge neighbors narrower than `narrow_s` into version -1, if there are more than `most`."""
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
    return view.first_ns + low * 1e9, view.first_ns + high * 1e9


def _pieces(view: RunView, low: float, high: float) -> list[tuple[str, list[float]]]:
    """Return [from, ready, until, version] of each served version in the window, by worker."""
    rows = view.rows(
        f"""with loads as (
               select incarnation, h.worker, version, ready_ns,
                      least(coalesce(gone_ns, ?), {STOPPED}) as end_ns,
                      ready_ns - (load_ms * 1e6)::bigint as from_ns
               from served_versions h join workers using (incarnation)),
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
        (worker, [*(_inside(view, mark, low, high) for mark in marks), version])
        for worker, version, *marks in rows
    ]


def _inside(view: RunView, at_ns: int, low: float, high: float) -> float:
    return round(min(max((at_ns - view.first_ns) / 1e9, low), high), 3)


UTILISATION: Final = f"""
    with slices as (
        select i as slice, $1 + i * $3 as low_ns, $1 + (i + 1) * $3 as high_ns
        from range($4) r(i)),
    incarnations as (
        select incarnation, greatest(slots, 1) as slots, joined_ns,
               least(coalesce(gone_ns, $2), {STOPPED}) as gone_ns
        from workers),
    held as (
        select incarnation, greatest(scheduled_ns, joined_ns) - $1 as low,
               least(coalesce(ended_ns, gone_ns), gone_ns) - $1 as high
        from attempts join incarnations using (incarnation)),
    busy as (
        select incarnation, slice,
               sum(least(high, (slice + 1) * $3) - greatest(low, slice * $3)) as busy_ns
        from (select *, unnest(range(low // $3, high // $3 + 1)) as slice
              from held where high > low)
        group by all),
    shares as (
        select slice, known_ns, least(1, coalesce(busy_ns, 0) / slots / known_ns) as share
        from (select slice, incarnation, slots,
                     least(gone_ns, high_ns) - greatest(joined_ns, low_ns) as known_ns
              from slices join incarnations on joined_ns < high_ns and gone_ns > low_ns)
        left join busy using (incarnation, slice)),
    told as (
        select (logged_ns - $1) // $3 as slice, sum(tokens)::double as tokens
        from trajectories where logged_ns >= $1 group by all)
    select (slice + 0.5) * $3 / 1e9, sum(share * known_ns) / sum(known_ns), min(share),
           max(share), case when count(share) > 0 or any_value(tokens) > 0
                            then coalesce(any_value(tokens), 0) * 1e9 / $3 end
    from slices left join shares using (slice) left join told using (slice)
    group by slice order by slice"""
"""Excludes earlier records of other runs."""


def utilisation(view: RunView) -> dict[str, Any]:
    """Return per slice: used share of slots (mean, least, most), tokens per second.

    A slot is used from placement until release; waiting requests do not count.
    """
    width_ns = _width_ns(view)
    newest_ns = view.value("select max(logged_ns) from trajectories") or 0
    last_ns = max(view.last_ns, newest_ns + 1 if newest_ns else 0)
    count = -(-(last_ns - view.first_ns) // width_ns)
    rows = view.rows(UTILISATION, view.first_ns, view.last_ns, width_ns, count)
    names = ("at", "mean", "low", "high", "tokens_per_s")
    return {
        name: [round(row[index], 3) if not index else short(row[index]) for row in rows]
        for index, name in enumerate(names)
    }


def _width_ns(view: RunView) -> int:
    width_ns = SLICE_NS
    while (view.last_ns - view.first_ns) // width_ns >= SLICES_MAX:
        width_ns *= 2
    return width_ns
