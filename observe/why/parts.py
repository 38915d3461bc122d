"""What the next part of a batch waits for, by the state; it decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dora_pipe.observe.text import counted
from dora_pipe.orchestrator.apply_decision import part_size
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.waits import blockers, in_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPart:
    """The part that the trainer would compute next, while it is not taken."""

    step: int
    part: int
    size: int
    """Groups of it; of the last one all that the batch lacks."""
    taken: int
    """Groups in the parts before it."""
    finished: int
    """Groups that have finished and are in no part."""
    lacks: int
    """So many of the open groups have to finish."""
    until: int | None
    """They have to be due at this step or before; None: whichever finish."""
    versions: dict[int, int]
    """The open groups that count, by version."""

    @property
    def words(self) -> str:
        """Before what is known of the whole batch.

        Example: ``part 3 of step 42: 2 groups of version 41; ``
        """
        return f"part {self.part} of step {self.step}: {self._lacking()}"

    def _lacking(self) -> str:
        if not self.versions or not self.lacks:
            return ""
        first, last = min(self.versions), max(self.versions)
        of = f"version {first}" if first == last else f"versions {first} to {last}"
        due = "" if self.until is None else f", due at step {self.until}"
        due += " or before" if self.until is not None and self.until > self.step else ""
        return f"{counted(self.lacks, 'group')} of {of}{due}; "


def next_part(state: State) -> NextPart | None:
    """None where the batch is not taken in parts, or a step trains, or no step is left."""
    if state.config is None or state.facts is None or state.done or state.training is not None:
        return None
    at = state.standing()
    if at.step >= at.steps or not in_parts(state):
        return None
    found = blockers(state, sum(map(len, state.index.generating.values())))
    taken = len(state.in_parts)
    versions = Counter(group.spec.version for group in found.first)
    return NextPart(
        step=at.step,
        part=len(state.parts),
        size=part_size(state) or at.per_step - taken,
        taken=taken,
        finished=len(state.finished),
        lacks=found.lacks,
        until=found.until,
        versions=dict(sorted(versions.items())),
    )
