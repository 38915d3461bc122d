"""Orders of kill rounds: role or broker, and moment.

An *aimed* moment is before, inside or after an append of the role, or around the rename of a policy
file. A *random* moment is a number of facts in control plus a delay. Broker moments are random.
Seed and round number determine an order, so a round can be repeated alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec

from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.topics import Topics

RoleKind = Literal["worker", "trainer", "orchestrator"]
ROLE_KINDS: Final[tuple[RoleKind, ...]] = get_args(RoleKind)

BROKER: Final = "broker"
Kind = RoleKind | Literal["broker"]
KINDS: Final[tuple[Kind, ...]] = (*ROLE_KINDS, BROKER)
"""Targets on Kafka, in rotation."""

AppendMoment = Literal["before", "middle", "commit", "after"]
"""Before: nothing is in the log. Middle: rows are inserted, not committed. Commit: the commit is
in progress. After: durable, but unknown to the role. On Kafka, middle: records are acknowledged
without a commit, or a plain writer's first record reached the client."""

FileMoment = Literal["written", "named"]
"""Before or after the rename of a policy file."""

AIMED_PER_FIVE: Final = 3
"""Aimed rounds per five rounds of a role."""

COMMIT_DELAY_S_MAX: Final = 0.002
"""Maximum seconds from the start of a commit to the strike."""

RANDOM_DELAY_S_MAX: Final = 0.25
"""Maximum seconds from a counted fact to a random strike."""

AGAIN_S_MAX: Final = 1.0
"""Maximum seconds from a role's restart to its second strike."""

BROKER_AGAIN_S_MAX: Final = 4.0
"""Same for a broker, which starts in 2 to 3 s."""

DOWN_S_MAX: Final = 1.0
"""Maximum seconds until a broker restarts."""

PARTITIONS: Final = 3
"""Partitions of trajectories and progress."""

_LED: Final = (
    *((name, at) for name in ("trajectories", "progress") for at in range(PARTITIONS)),
    *((name, 0) for name in ("control", "decisions", "metrics")),
)
"""Partitions whose leader may be killed."""

WORKERS: Final = ("w0", "w1")

ROLES: Final = (*WORKERS, "trainer", "orchestrator")
"""Processes with a log of appended records."""

_TOPIC_OF: Final = {"trajectory": "trajectories", "progress": "progress", "status": "metrics"}
_DECISIONS: Final = {"round": b'"ordinal"', "take-batch": b'"kind":"take-batch"'}


class Point(msgspec.Struct, frozen=True, kw_only=True, tag="point"):
    """Aimed moment of a role.

    Example: ``Point(moment="middle", what="step-committed", nth=2)``.
    """

    moment: AppendMoment | FileMoment
    what: str
    """`trajectory`, `progress`, `status`, `round`, `take-batch`, the kind of a control record,
    or `weights` for the policy file."""
    nth: int
    """Number (from 1) among the incarnation's appends with such a record."""
    delay_s: float = 0.0
    """Delay after the start of a `commit`."""

    @property
    def phase(self) -> str:
        return f"{_WORDS[self.moment].format(self.what)}, no. {self.nth}"

    def matches(self, record: Append, topics: Topics) -> bool:
        return record_is(record, self.what, topics)


class Chance(msgspec.Struct, frozen=True, kw_only=True, tag="chance"):
    control: int
    delay_s: float
    again_s: float | None = None
    """Seconds from the restart to a second strike."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Strike of one round.

    Example: ``Order(number=4, seed=17, role="trainer", at=Chance(control=40, delay_s=0.1))``.
    """

    number: int
    seed: int
    """Seed of prompts and tokens."""
    role: str
    """Process: `orchestrator`, `trainer`, `w0`, `w1`, `broker`."""
    at: Point | Chance
    stop: bool = False
    """Stop (SIGSTOP) instead of kill."""
    leads: tuple[str, int] = ("control", 0)
    """Partition whose leader is killed, topic without the run."""
    down_s: float = 0.0
    """Downtime in seconds; 0: a role restarts immediately."""

    @property
    def must_come_back(self) -> bool:
        """Report whether the round only counts if the victim comes back."""
        return not self.stays_dead

    @property
    def stays_dead(self) -> bool:
        return self.role in ROLES and self.down_s > 0


_WORDS: Final[Mapping[str, str]] = {
    "before": "before the append of {}",
    "middle": "in the middle of the append of {}",
    "commit": "in the commit of the append of {}",
    "after": "right after the append of {}",
    "written": "policy file written, not named ({})",
    "named": "policy file named, not committed ({})",
}

_Aim = tuple[AppendMoment | FileMoment, str, int]
"""Moment, record kind, and the largest reliable `nth`."""

AIMED: Final[Mapping[RoleKind, Sequence[_Aim]]] = {
    "worker": (
        ("middle", "trajectory", 5),
        ("after", "trajectory", 5),
        ("middle", "trajectories-logged", 5),
        ("commit", "trajectories-logged", 5),
        ("after", "trajectories-logged", 5),
        ("middle", "progress", 4),
        ("after", "worker-joined", 1),
    ),
    "trainer": (
        ("before", "step-committed", 5),
        ("after", "step-committed", 5),
        ("middle", "step-committed", 5),
        ("named", "weights", 5),
        ("written", "weights", 5),
        ("commit", "step-committed", 5),
        ("after", "role-started", 1),
    ),
    "orchestrator": (
        ("before", "round", 20),
        ("middle", "round", 20),
        ("after", "take-batch", 5),
        ("commit", "round", 20),
        ("middle", "take-batch", 5),
        ("before", "run-started", 1),
        ("after", "role-started", 1),
    ),
}
"""Points in order of rounds. `before round` is between reading and appending."""

INSIDE: Final[Mapping[RoleKind, Sequence[_Aim]]] = {
    "worker": (
        ("middle", "trajectory", 5),
        ("middle", "trajectories-logged", 5),
        ("middle", "progress", 4),
    ),
    "trainer": (
        ("middle", "step-committed", 5),
        ("middle", "status", 8),
        ("middle", "role-started", 1),
    ),
    "orchestrator": (("middle", "round", 20), ("middle", "take-batch", 5), ("middle", "status", 8)),
}
"""Points inside appends for roles that stay dead: acknowledged, not committed."""


def record_is(record: Append, what: str, topics: Topics) -> bool:
    if what in _TOPIC_OF:
        return record.topic == f"{topics.run}.{_TOPIC_OF[what]}"
    if what in _DECISIONS:
        return record.topic == topics.decisions and _DECISIONS[what] in record.value
    return record.topic == topics.control and f'"kind":"{what}"'.encode() in record.value


def order_of(
    seed: int,
    number: int,
    *,
    control_facts: int,
    only: Kind | None = None,
    kinds: Sequence[Kind] = ROLE_KINDS,
    dead_s: float = 0.0,
    again: int = 0,
) -> Order:
    """Return order `number` (from 0) of the series `seed`; `kinds` rotate.

    With `dead_s`, roles are struck inside appends and stay dead that long. `control_facts` is the
    minimum of a run; random moments stay below 4/5 of it. `again` redraws a round whose moment
    never came.
    """
    kind = only or kinds[number % len(kinds)]
    turn = number if only else number // len(kinds)
    chance = random.Random(f"{seed}/{number}/{kind}/{again}")
    if kind == BROKER:
        return _broker_order(number, turn, chance, control_facts)
    role = chance.choice(WORKERS) if kind == "worker" else kind
    position: Point | Chance
    if dead_s:
        position = _aimed(INSIDE[kind], turn, chance)
    elif turn % 5 < AIMED_PER_FIVE:
        position = _aimed(AIMED[kind], turn // 5 * AIMED_PER_FIVE + turn % 5, chance)
    else:
        again_s_max = AGAIN_S_MAX if turn % 5 == AIMED_PER_FIVE else None
        position = _random_moment(chance, control_facts, again_s_max)
    return Order(number=number, seed=chance.randrange(2**31), role=role, at=position, down_s=dead_s)


def _aimed(aims: Sequence[_Aim], turn: int, chance: random.Random) -> Point:
    moment, what, largest = aims[turn % len(aims)]
    delay_s = chance.uniform(0, COMMIT_DELAY_S_MAX) if moment == "commit" else 0.0
    return Point(moment=moment, what=what, nth=chance.randint(1, largest), delay_s=delay_s)


def _broker_order(number: int, turn: int, chance: random.Random, control_facts: int) -> Order:
    again_s_max = BROKER_AGAIN_S_MAX if turn % 5 == AIMED_PER_FIVE else None
    return Order(
        number=number,
        role=BROKER,
        at=_random_moment(chance, control_facts, again_s_max),
        leads=chance.choice(_LED),
        down_s=chance.uniform(0, DOWN_S_MAX),
        seed=chance.randrange(2**31),
    )


def _random_moment(chance: random.Random, control_facts: int, again_s_max: float | None) -> Chance:
    return Chance(
        control=chance.randint(1, control_facts * 4 // 5),
        delay_s=chance.uniform(0, RANDOM_DELAY_S_MAX),
        again_s=None if again_s_max is None else chance.uniform(0, again_s_max),
    )
