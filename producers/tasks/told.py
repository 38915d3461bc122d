"""What episodes that are kept were told, and who tells them; decides which turn is new, who takes
an episode from whom, and when nobody comes for it any more. Pure: `kept` has the connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from dora_pipe.producers.tasks.port import Turn


class EpisodeTaken(Exception):
    """The request that tells it has this episode no more."""


@dataclass(slots=True, kw_only=True, eq=False)
class ToldEpisode:
    """An episode, with all that it was told."""

    key: str
    attempt: int
    told: list[tuple[Turn, Any]] = field(default_factory=list)
    """Each turn and its answer, or what will become it."""
    holder: object | None = None
    """Who tells it; None: it is kept until somebody claims it."""
    generation: int = 0
    """Holders that it has had, and one more when it has ended."""

    def is_known(self, at: int, turn: Turn) -> bool:
        """Whether its turn `at` was told before, and was this one; else it is a step that is new.

        Raises EpisodeTaken where it was another one: nobody can go on with it.
        """
        if at == len(self.told):
            return False
        if self.told[at][0] != turn:
            raise EpisodeTaken(f"it was told another turn {at} before")
        return True

    def hold(self, holder: object) -> None:
        """Whoever told it until now has it no more."""
        self.holder = holder
        self.generation += 1

    def leave(self, holder: object) -> bool:
        """Who has it is gone; whether it is kept now, for who claims it in time."""
        if self.holder is not holder:
            return False
        self.holder = None
        return True

    def is_over(self, generation: int) -> bool:
        """Whether nobody has claimed it since it was left in this generation."""
        return self.holder is None and self.generation == generation


E = TypeVar("E", bound=ToldEpisode)


class ToldEpisodes(Generic[E]):
    """The episodes of a process by their keys. Example: ``ToldEpisodes().take("run@7:g1-0", 2)``"""

    def __init__(self) -> None:
        self._of: dict[str, E] = {}

    def __len__(self) -> int:
        return len(self._of)

    def all(self) -> list[E]:
        """Those that can be found, in the order in which they began."""
        return list(self._of.values())

    def add(self, one: E) -> None:
        """One that has just begun. Where a later attempt has one of this key, it is not found."""
        there = self._of.get(one.key)
        if there is None or there.attempt <= one.attempt:
            self._of[one.key] = one

    def take(self, key: str, attempt: int) -> E | None:
        """The episode for this attempt, unless a later one has it."""
        one = self._of.get(key)
        if one is None or attempt < one.attempt:
            return None
        one.attempt = attempt
        return one

    def end(self, one: E) -> None:
        """Nobody finds it any more, and nobody has it."""
        if self._of.get(one.key) is one:
            del self._of[one.key]
        one.holder = None
        one.generation += 1
