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


def tree_of(found: Trajectory, said: Callable[[str | None], str | None]) -> dict[str, Any] | None:
    """Return contexts and calls of a record; None for one context without calls.

    `contexts`: [parent or null, shared tokens, start, end]; `shared`: stretches of the record that
    each begins with. Calls are in ms after placement. `said` returns texts that may be shown.
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
    scheduled_ns = found.meta.times.scheduled
    for one in call_rows(found):
        yield [
            one.call,
            one.context,
            said(one.caller),
            one.api or None,
            short((one.asked_ns - scheduled_ns) / MS, 6),
            short((one.answered_ns - one.asked_ns) / MS, 6),
            short(one.idle_ns / MS, 6),
            one.prompt_tokens,
            one.tokens,
            one.finish,
            one.occurrence,
            said(one.ignored_settings),
        ]
