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
    for span in spans:
        children.setdefault(span.parent_id, []).append(span)
    roots = children.get("", [])
    if origin_ns is None:
        origin_ns = min((root.start_ns for root in roots), default=0)
    rows: list[Row] = []
    for root in roots:
        rows += _below(root, 0, children, origin_ns)
    return rows


def branch(spans: Sequence[Span], trajectory: str) -> list[Span]:
    """Return a group's spans without those of its other trajectories."""
    excluded = {
        span.span_id
        for span in spans
        if span.stage == "trajectory" and span.attributes[names.TRAJECTORY] != trajectory
    }
    selected = []
    for span in spans:  # parents come first
        if span.parent_id in excluded or span.span_id in excluded:
            excluded.add(span.span_id)
        else:
            selected.append(span)
    return selected


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
    rows: Sequence[Mapping[str, Any]], *, plain: bool = False
) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows as `COLUMNS` with tree lines; `plain` means ASCII."""
    lines = stems([row["level"] for row in rows], plain=plain)
    for stem, cells in zip(lines, rows, strict=True):
        text = f"{stem}{cells['stage']}"
        yield text, f"{cells['after_s']:.3f}", f"{cells['lasted_s']:.3f}", cells["what"]


def stems(levels: Sequence[int], *, plain: bool = False) -> Iterator[str]:
    """Yield the tree lines of each row; a row of level 0 has none.

    Example: ``list(stems([0, 1, 1])) == ["", "├─ ", "└─ "]``.
    """
    down, branch_, corner = ("|  ", "|- ", "`- ") if plain else ("│  ", "├─ ", "└─ ")
    for index, level in enumerate(levels):
        above = (
            down if _has_later_sibling(levels, index, column) else "   "
            for column in range(1, level)
        )
        own = branch_ if _has_later_sibling(levels, index, level) else corner
        yield "".join((*above, own)) if level else ""


def _has_later_sibling(levels: Sequence[int], index: int, level: int) -> bool:
    return (
        next((next_level for next_level in levels[index + 1 :] if next_level <= level), -1) == level
    )


def _below(
    span: Span, level: int, children: Mapping[str, list[Span]], origin_ns: int
) -> Iterator[Row]:
    yield row(span, level, origin_ns)
    # The sort is stable: equal times keep the order of stages.
    for child in sorted(children.get(span.span_id, []), key=lambda child: child.start_ns):
        yield from _below(child, level + 1, children, origin_ns)


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
    for template in _WORDS.get(span.stage, ()):
        if callable(template):
            yield from template(span.attributes)
        else:
            with suppress(KeyError):
                yield template % span.attributes
