"""Context tree of a trajectory and calls of its agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from dora_pipe.ledger.calls import call_rows
from dora_pipe.observe.web.view import short
from dora_pipe.schemas.contexts import bounds, pieces
from dora_pipe.schemas.trajectory import Trajectory

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
    each begins with. Calls are in ms after placement. `said` returns texts that may be shown.
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
