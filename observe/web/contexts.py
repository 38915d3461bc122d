"""The tree of a trajectory's contexts and its agent's calls; it decides what counts as idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from dora_pipe.observe.web.view import short
from dora_pipe.schemas.contexts import Call, bounds, pieces, place_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import canonical

MS: Final = 1e6

CALL_COLUMNS: Final = (
    *("call", "context", "caller", "api", "asked at ms", "took ms", "idle before ms"),
    *("prompt tokens", "tokens", "finish", "occurrence", "asked for"),
)


def tree_of(found: Trajectory, said: Callable[[str | None], str | None]) -> dict[str, Any] | None:
    """Contexts and calls of a record; None where it has one context and nobody called.

    `contexts`: [parent or null, shared tokens, start, end] of each; `shared`: of each the stretches
    of the record that it begins with. Times of calls are ms after the trajectory was placed.
    `said` gives what an agent said, if it may be shown.
    """
    meta = found.meta
    if not meta.contexts and not meta.calls:
        return None
    parents = [(None, 0), *((one.parent, one.shared) for one in meta.contexts)]
    places = bounds(meta.contexts, found.length)
    return {
        "contexts": [
            [None if parent == -1 else parent, shared, *place]
            for (parent, shared), place in zip(parents, places, strict=True)
        ],
        "shared": [
            pieces(meta.contexts, number, found.length)[:-1] for number in range(len(places))
        ],
        "starts": [one.start for one in meta.calls],
        "calls": {"columns": list(CALL_COLUMNS), "rows": list(_rows(found, said))},
    }


def _rows(found: Trajectory, said: Callable[[str | None], str | None]) -> Iterator[list[Any]]:
    placed, calls = found.meta.times.placed, found.meta.calls
    idle = idle_before(calls, placed)
    for number, one in enumerate(calls):
        context, prompt_tokens = place_of(one, found.meta.contexts)
        yield [
            number,
            context,
            said(one.caller) or None,
            one.api or None,
            short((one.asked_ns - placed) / MS, 6),
            short((one.answered_ns - one.asked_ns) / MS, 6),
            short(idle[number] / MS, 6),
            prompt_tokens,
            one.end - one.start,
            one.finish,
            one.occurrence,
            said(canonical(one.asked).decode() if one.asked else None),
        ]


def idle_before(calls: Sequence[Call], placed_ns: int) -> list[int]:
    """Before each call, ns in which none was open: the agent thought, or did something else."""
    found = [0] * len(calls)
    busy_until = placed_ns
    for number in sorted(range(len(calls)), key=lambda one: calls[one].asked_ns):
        found[number] = max(0, calls[number].asked_ns - busy_until)
        busy_until = max(busy_until, calls[number].answered_ns)
    return found
