"""A group of siblings, from its dispatch on; only values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dora_pipe.catalogue.attempts import RequestHistory
from dora_pipe.catalogue.batches import arrival
from dora_pipe.schemas.control import GroupScored, TrajectoryLogged
from dora_pipe.schemas.rounds import GroupSpec, ScoreGroup, SiblingFate


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """A group, from its dispatch on."""

    spec: GroupSpec
    reason: str
    round: int
    offset: int
    """Of that round in decisions."""
    dispatched_ns: int
    requests: dict[str, RequestHistory] = field(default_factory=dict)
    """Those that were placed at least once, by trajectory."""
    scoring: ScoreGroup | None = None
    """Who was asked last to score its siblings together, while no answer has come."""
    asked: ScoreGroup | None = None
    """Who was asked last at all."""
    scores: GroupScored | None = None
    """The answer that counts. The rewards of `requests` are those of it then."""
    valid: int = 0
    """Records that count and had a reward of their own."""
    expired: bool = False
    """It was open for too long."""
    left: dict[int, SiblingFate] = field(default_factory=dict)
    """What became of the siblings that it did not wait for."""

    @property
    def closed(self) -> bool:
        """Whether it waits for no sibling although some may be open."""
        return self.expired or (self.spec.spare > 0 and self.valid >= self.spec.size)

    @property
    def whole(self) -> bool:
        """Whether all records are there that it is made of."""
        results = len(self.results)
        return results == self.spec.siblings or (self.closed and results > 0)

    @property
    def results(self) -> list[TrajectoryLogged]:
        """The records that count, by sibling."""
        requests = (self.requests[name] for name in sorted(self.requests))
        return [one.logged for one in requests if one.logged is not None]

    @property
    def rewards(self) -> list[float]:
        """Those of them that are valid."""
        return rewards_of(self.results)

    @property
    def last(self) -> TrajectoryLogged | None:
        """The record that came last."""
        return max(self.results, key=arrival, default=None)


def rewards_of(results: Iterable[TrajectoryLogged]) -> list[float]:
    """The valid rewards of some records."""
    return [one.reward for one in results if one.reward is not None]


def last_of(groups: Iterable[GroupHistory]) -> TrajectoryLogged | None:
    """The record that came last of some groups."""
    found = (one.last for one in groups)
    return max((one for one in found if one is not None), key=arrival, default=None)
