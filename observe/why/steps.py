"""Every second that the trainer waited for a batch, and whom it is put down to; from the catalogue.

Its view `waits` decides: the trajectory that came last of the batch. Its way is cut
where it changed hands, and each piece of the wait goes to who had it then:

    commit before ... dispatched   `admission`: no group could be admitted, or no slot was free
    dispatched ...... placed       `queue`: no slot was free on a worker of its version
    placed .......... logged       `sampling`, or `lost` for an attempt that ended without a result
    logged .......... taken        `decision`
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.catalogue.database import Catalogue

Kind = Literal["admission", "queue", "lost", "sampling", "decision"]

WAITS: Final = """
    with pieces as (
        select step, list({'kind': kind, 'seconds': seconds, 'version': version,
                           'worker': coalesce(worker, '')}) as pieces
        from waits group by step
    )
    select b.step, coalesce(b.free_ns, b.taken_ns) as free_ns, b.taken_ns, s.committed_ns,
           coalesce(b.last, '') as last, coalesce(g.version, -1) as version,
           coalesce(t.worker, '') as worker, coalesce(t.logged_ns, 0) as logged_ns, pieces
    from batches b left join steps s using (step) left join pieces using (step)
    left join trajectories t on trajectory_id = b.last left join groups g using (group_id)
    where b.attempt = 1 order by b.step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a wait, and who had the trajectory that it waited for."""

    kind: Kind
    seconds: float
    version: int = -1
    worker: str = ""

    def words(self) -> str:
        """As it stands in a sentence after "waited 3 s for"."""
        return piece_words(self.kind, self.worker, (self.version,))


def piece_words(kind: Kind, worker: str, versions: Collection[int]) -> str:
    """Pieces of one kind and worker in words, whichever versions they are of."""
    first, last = min(versions), max(versions)
    of = f"of version {first}" if first == last else f"of versions {first} to {last}"
    match kind:
        case "admission":
            return f"groups {of} to be admitted"
        case "queue":
            return f"a slot {of}"
        case "lost":
            return f"an attempt {of} that was lost on {worker}"
        case "sampling":
            return f"groups {of} on {worker}"
        case "decision":
            return "the orchestrator's decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """What lay between two steps. Times are wall clock ns."""

    step: int
    free_ns: int
    """The trainer was free: the commit before, or its own start."""
    taken_ns: int
    committed_ns: int | None = None
    """None while it is trained, or when it never was."""
    last: str = ""
    """The trajectory that came last of the batch."""
    version: int = -1
    worker: str = ""
    """Who logged it."""
    logged_ns: int = 0
    pieces: tuple[Piece, ...] = ()

    @property
    def waited_s(self) -> float:
        """From when the trainer was free until its batch was there."""
        return max(0, self.taken_ns - self.free_ns) / 1e9

    def text(self) -> str:
        """As one line."""
        if not self.waited_s:
            return f"step {self.step}: its batch was there before the trainer was free"
        line = f"step {self.step}: the trainer waited {self.waited_s:.2f} s for its batch"
        if self.last:
            line += f"; last came {self.last} (version {self.version}) from {self.worker}"
        pieces = [f"{one.seconds:.2f} s for {one.words()}" for one in self.pieces]
        return line + (f": {', '.join(pieces)}" if pieces else "")


def waits_of(catalogue: Catalogue) -> list[StepWait]:
    """What lay before every step whose batch was taken."""
    return [
        StepWait(**row | {"pieces": tuple(Piece(**one) for one in row["pieces"] or ())})
        for row in catalogue.records(WAITS)
    ]
