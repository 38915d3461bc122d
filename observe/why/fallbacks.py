"""Who had a version from another file than it should, and why; it decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import asdict

from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.tables import FallbackRow

SAID_MAX: Final = 3
"""The newest are lines of an answer; the others are counted."""

KEPT_MAX: Final = 1000
"""So many an answer has, the newest."""

QUERY: Final = f"""
    select worker, incarnation, version, at_ns, why, taken, bytes
    from fallbacks order by at_ns desc limit {KEPT_MAX}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackTaken:
    """A file that was lost or damaged on the way of a worker, or of the trainer, to a version, and
    what it took instead."""

    worker: str
    incarnation: int
    version: int
    at_ns: int
    """When the worker was ready, or the trainer's next step committed; wall clock."""
    why: str
    """What was wrong with which file: its name, which has a digest, and its place."""
    taken: str
    bytes: int
    """Fetched in its place; 0 where all of it was on the machine."""

    @property
    def line(self) -> str:
        form = "as a whole file" if self.taken.startswith("weights/") else "as patches"
        cost = f"{self.bytes:,} bytes" if self.bytes else "nothing was fetched"
        return (
            f"{self.worker} took version {self.version} {form} ({self.taken}, {cost}): {self.why}"
        )


def fallback_taken(row: FallbackRow) -> FallbackTaken:
    """A row of the catalogue's account."""
    return FallbackTaken(**asdict(row))


def fallbacks_of(catalogue: Catalogue) -> tuple[FallbackTaken, ...]:
    """Those of a whole run, the oldest first."""
    return tuple(FallbackTaken(**row) for row in reversed(list(catalogue.records(QUERY))))


def lines_of(found: Sequence[FallbackTaken]) -> Iterator[str]:
    """The newest as lines, and how many there were before them."""
    yield from (one.line for one in found[-SAID_MAX:])
    if len(found) > SAID_MAX:
        yield f"and {len(found) - SAID_MAX:,} times before (--json has them)"
