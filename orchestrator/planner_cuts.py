"""Decides where a plan is cut, to go on in the next round; by the name of the planner that made it.

Where a plan is cut decides what it contains, and whether the fold takes its trigger for answered.
So a run that another planner began goes on under that one's bound, and its plans can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.schemas.rounds import AnyDecision, Place, TakeBatch

PLANNER: Final = "consolidate-3"
"""Name and version; `run started` carries it. Whoever changes what a plan contains changes it."""

PLANNER_2: Final = "consolidate-2"
"""Decides the same and cuts its plans at `DECISIONS_MAX_2`, a batch counting as one decision."""

PLANNERS: Final = frozenset({PLANNER, PLANNER_2})
"""Those whose plans can be made again; a run that one of them began goes on under it."""

DECISIONS_MAX: Final = 500
"""A plan of this size (`size_of`) stops and goes on in the next round: no round takes too long.

What belongs together is not cut: a group's cancels and end, an admitted group's placements, the
groups of a batch and those of one evaluation may lead beyond it.
"""

DECISIONS_MAX_2: Final = 1000


def size_of(decisions: Sequence[AnyDecision], planner: str = PLANNER) -> int:
    """What a plan costs to make and to write, in decisions about one request: a placement counts
    once for each of its requests, a batch once for each of its groups."""
    size = 0
    for one in decisions:
        if isinstance(one, Place):
            size += len(one.siblings)
        elif isinstance(one, TakeBatch) and planner == PLANNER:
            size += len(one.groups)
        else:
            size += 1
    return size


def size_max(planner: str) -> int:
    """Where a planner cuts its plans."""
    return DECISIONS_MAX if planner == PLANNER else DECISIONS_MAX_2


def is_cut(decisions: Sequence[AnyDecision], planner: str) -> bool:
    """Whether a plan may go on in the next round."""
    return len(decisions) > 0 and size_of(decisions, planner) >= size_max(planner)
