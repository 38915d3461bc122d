"""Format the spans of a trace as a tree of rows; rows are JSON values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.span import Span, Value

Row = dict[str, Any]

COLUMNS: Final = ("span", "after s", "lasted s", "")


def rows(spans: Sequence[Span], *, origin_ns: int | None = None) -> list[Row]:
    """Return the spans of a trace, children below parents in time order.

    `after_s` counts from `origin_ns` (default: the root's start).
    """
    children: dict[str, list[Span]] = {}
    for one in spans:
        children.setdefault(one.parent_id, []).append(one)
    roots = children.get("", [])
    if origin_ns is None:
        origin_ns = min((one.start_ns for one in roots), default=0)
    found: list[Row] = []
    for root in roots:
        found += _below(root, 0, children, origin_ns)
    return found


def branch(spans: Sequence[Span], trajectory: str) -> list[Span]:
    """Return a group's spans without those of its other trajectories."""
    others = {
        one.span_id
        for one in spans
        if one.stage == "trajectory" and one.attributes[names.TRAJECTORY] != trajectory
    }
    found = []
    for one in spans:  # parents come first
        if one.parent_id in others or one.span_id in others:
            others.add(one.span_id)
        else:
            found.append(one)
    return found


def row(span: Span, level: int, origin_ns: int) -> Row:
    what = "; ".join(filter(None, _words(span)))
    if span.error and span.error not in what:
        what += f"; error: {span.error}" if what else f"error: {span.error}"
    return {
        "level": level,
        "stage": span.stage,
        "after_s": (span.start_ns - origin_ns) / 1e9,
        "lasted_s": span.lasted_s,
        "what": what,
        "trace_id": span.trace_id,
        "span_id": span.span_id,
    }


def draw(
    found: Sequence[Mapping[str, Any]], *, plain: bool = False
) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows as `COLUMNS` with tree lines; `plain` means ASCII."""
    lines = stems([one["level"] for one in found], plain=plain)
    for stem, one in zip(lines, found, strict=True):
        text = f"{stem}{one['stage']}"
        yield text, f"{one['after_s']:.3f}", f"{one['lasted_s']:.3f}", one["what"]


def stems(levels: Sequence[int], *, plain: bool = False) -> Iterator[str]:
    """Yield the tree lines of each row; a row of level 0 has none.

    Example: ``list(stems([0, 1, 1])) == ["", "├─ ", "└─ "]``.
    """
    down, branch_, corner = ("|  ", "|- ", "`- ") if plain else ("│  ", "├─ ", "└─ ")
    for at, level in enumerate(levels):
        above = (down if _goes_on(levels, at, one) else "   " for one in range(1, level))
        own = branch_ if _goes_on(levels, at, level) else corner
        yield "".join((*above, own)) if level else ""


def _goes_on(levels: Sequence[int], at: int, level: int) -> bool:
    return next((one for one in levels[at + 1 :] if one <= level), -1) == level


def _below(
    span: Span, level: int, children: Mapping[str, list[Span]], origin_ns: int
) -> Iterator[Row]:
    yield row(span, level, origin_ns)
    # The sort is stable: equal times keep the order of stages.
    for one in sorted(children.get(span.span_id, []), key=lambda one: one.start_ns):
        yield from _below(one, level + 1, children, origin_ns)


Attributes = Mapping[str, Value]

WAITED: Final = f"waited for %({names.WAITED_FOR})s"
STEP: Final = f"step %({names.STEP})d"
PLACED: Final = f"to %({names.WORKER})s: %({names.REASON})s"
CONTEXT: Final = f"context %({names.CONTEXT})d"
TURN: Final = f"turn %({names.TURN})d, %({names.TOKENS})d tokens"
RECORD: Final = f"trajectories:%({names.PARTITION})s:%({names.OFFSET})d, %({names.SIZE})d bytes"
PART: Final = f"part %({names.PART})d"
BATCH: Final = f"step %({names.STEP})d, attempt %({names.ATTEMPT})d"


def _group(attrs: Attributes) -> Iterator[str]:
    eval_ = attrs[names.PURPOSE] == "eval"
    until = "evaluation" if eval_ else f"deadline step {attrs[names.DEADLINE]}"
    yield f"{attrs[names.GROUP]}, version {attrs[names.VERSION]}, {until}"
    outcome = attrs[names.OUTCOME]
    if outcome == "trained":
        yield f"trained at step {attrs[names.STEP]}, staleness {attrs[names.STALENESS]}"
    elif outcome == "open" and names.STEP in attrs:
        yield f"open: in the batch of step {attrs[names.STEP]}"
    else:
        yield f"{outcome}: {attrs[names.REASON]}" if names.REASON in attrs else str(outcome)


def _attempts(attrs: Attributes) -> Iterator[str]:
    if attrs[names.ATTEMPTS] != 1:
        yield f"{attrs[names.ATTEMPTS]} attempts"


def _generated(attrs: Attributes) -> Iterator[str]:
    tokens = f"{attrs[names.OUTPUT]} tokens" if names.OUTPUT in attrs else "its tokens are unknown"
    yield tokens + (f" from token {attrs[names.RESUMED]} on" if names.RESUMED in attrs else "")
    if names.FIRST_TOKEN in attrs:
        yield f"first token after {attrs[names.FIRST_TOKEN]:.3f} s"
    outcome = attrs[names.OUTCOME]
    if outcome == "migrated":
        yield f"migrated to {attrs.get(names.MIGRATED_TO, 'another worker')}"
    elif outcome != "logged":
        yield str(outcome)


def _chat(attrs: Attributes) -> Iterator[str]:
    by = f" by {attrs[names.CALLER]}" if names.CALLER in attrs else ""
    tokens = f"{attrs[names.OUTPUT]} tokens after {attrs[names.INPUT]}"
    yield f"call {attrs[names.CALL]}{by}, context {attrs[names.CONTEXT]}, {tokens}"


def _size(attrs: Attributes) -> Iterator[str]:
    groups = attrs[names.GROUPS]
    yield f"{groups} group{'' if groups == 1 else 's'}, {attrs[names.COUNT]} trajectories"


_WORDS: Final[Mapping[str, tuple[str | Callable[[Attributes], Iterator[str]], ...]]] = {
    "group": (_group,),
    "dispatched": (f"%({names.REASON})s",),
    "trajectory": (f"%({names.TRAJECTORY})s", f"reward %({names.REWARD})g", _attempts),
    "queued": (WAITED, PLACED),
    "generated": (
        f"%({names.WORKER})s (incarnation %({names.INCARNATION})d), attempt %({names.ATTEMPT})d",
        _generated,
    ),
    "slot": (WAITED,),
    "chat": (_chat,),
    "sampled": (TURN, CONTEXT),
    "environment": (TURN, CONTEXT),
    "tool": (f"%({names.TOOL})s, {TURN}", CONTEXT),
    "reward": (f"%({names.REWARD})g",),
    "published": (RECORD,),
    "group_wait": (WAITED,),
    "selected": (BATCH, PART, f"the batch {WAITED}"),
    "trained": (STEP,),
    "step": (BATCH, _size),
    "batch_wait": (PART, WAITED),
    "part": (PART, _size, f"%({names.OUTPUT})d tokens"),
    "train_step": (f"%({names.COMPUTE}).3f s of it computing",),
}
"""Text by stage; parts whose attribute is missing are omitted."""


def _words(span: Span) -> Iterator[str]:
    for one in _WORDS.get(span.stage, ()):
        if callable(one):
            yield from one(span.attributes)
        else:
            with suppress(KeyError):
                yield one % span.attributes
