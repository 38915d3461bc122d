"""Decides which role or broker is killed in which round of a series, and at which moment.

A moment is *aimed* (a point of the role's own doing: before, in the middle of, or right after an
append, or around the name of a policy file) or *random* (so many facts in control, and a little
later). A broker knows nothing of roles: its moments are random. Everything is drawn from the
series' seed and the round's number, so that one round can be made again alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec

from dora_pipe.bus.port import Append
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_progress

RoleKind = Literal["worker", "trainer", "orchestrator"]
ROLE_KINDS: Final[tuple[RoleKind, ...]] = get_args(RoleKind)

BROKER: Final = "broker"
Kind = RoleKind | Literal["broker"]
KINDS: Final[tuple[Kind, ...]] = (*ROLE_KINDS, BROKER)
"""What is struck on Kafka, in turns."""

AppendMoment = Literal["before", "middle", "commit", "after"]
"""Nothing is in the log yet; its rows are inserted and not committed; the commit is under way;
the append is durable and the role does not know it. On Kafka: the records are acknowledged and
their transaction is not committed, or, for a writer without transactions, the first record was
handed to the client; a little later."""

FileMoment = Literal["written", "named"]
"""A policy file is complete under its temporary name; it has its own name."""

AIMED_PER_FIVE: Final = 3
"""Of five rounds of a role so many are aimed, the others random."""

COMMIT_DELAY_S_MAX: Final = 0.002
"""A commit under way is hit at most so long after it began."""

RANDOM_DELAY_S_MAX: Final = 0.25
"""A random moment is at most so long after the fact that it counts to."""

AGAIN_S_MAX: Final = 1.0
"""A role that is struck twice is struck again at most so long after it was started again."""

BROKER_AGAIN_S_MAX: Final = 4.0
"""The same for a broker, which takes 2 to 3 s to start."""

DOWN_S_MAX: Final = 1.0
"""A broker is started again at most so long after it was killed."""

PARTITIONS: Final = 3
"""Of trajectories and progress in a round."""

_LED: Final = (
    *((name, at) for name in ("trajectories", "progress") for at in range(PARTITIONS)),
    *((name, 0) for name in ("control", "decisions", "metrics")),
)
"""Partitions whose leader may be struck."""

WORKERS: Final = ("w0", "w1")
"""The workers of a round."""

ROLES: Final = (*WORKERS, "trainer", "orchestrator")
"""Processes that have a book of what they appended."""

_TOPIC_OF: Final = {"trajectory": "trajectories", "progress": "progress", "status": "metrics"}
_DECISIONS: Final = {"round": b'"ordinal"', "take-batch": b'"kind":"take-batch"'}


class Point(msgspec.Struct, frozen=True, kw_only=True, tag="point"):
    """An aimed moment of a role's own doing.

    Example: ``Point(moment="middle", what="step-committed", nth=2)``.
    """

    moment: AppendMoment | FileMoment
    what: str
    """`trajectory`, `progress`, `status`, `round`, `take-batch`, the kind of a control record, or
    `weights` for the policy file."""
    nth: int
    """Counted from 1 over the incarnation's appends that hold such a record."""
    tokens: int = 0
    """Of progress records only those count that reach so many sampled tokens."""
    delay_s: float = 0.0
    """For `commit`: how long after it began."""

    @property
    def phase(self) -> str:
        """In words. Example: ``"right after the append of step-committed, no. 2"``."""
        return f"{_WORDS[self.moment].format(self.what)}, no. {self.nth}"

    def matches(self, record: Append, topics: Topics) -> bool:
        """Whether a record is what this point counts."""
        return record_is(record, self.what, topics) and reached(record, self.tokens)


class Chance(msgspec.Struct, frozen=True, kw_only=True, tag="chance"):
    """A random moment: `delay_s` after control holds `control` facts."""

    control: int
    delay_s: float
    again_s: float | None = None
    """The role is struck once more so long after it was started again: while it recovers."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What shall happen in a round.

    Example: ``Order(number=4, seed=17, role="trainer", at=Chance(control=40, delay_s=0.1))``.
    """

    number: int
    seed: int
    """Of the run: prompts and tokens."""
    role: str
    """The process's name: `orchestrator`, `trainer`, `w0`, `w1`, `broker`."""
    at: Point | Chance
    stop: bool = False
    """The role is stopped (SIGSTOP) instead of killed."""
    leads: tuple[str, int] = ("control", 0)
    """For a broker: the partition whose leader is struck, its topic named without the run."""
    down_s: float = 0.0
    """How long what was struck stays down; 0: a role is started again at once."""

    @property
    def must_come_back(self) -> bool:
        """Whether a round proves nothing unless what was struck has come back."""
        return not self.stays_dead

    @property
    def stays_dead(self) -> bool:
        """Whether a role stays dead for so long that it shows what its death costs others."""
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
"""Moment, what, and the largest `nth` that surely comes."""

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
"""In the order in which rounds take them. `before round` is between reading and appending."""

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
    "orchestrator": (
        ("middle", "round", 20),
        ("middle", "take-batch", 5),
        ("middle", "status", 8),
    ),
}
"""Where a role that stays dead is struck: there it leaves open what is acknowledged, not committed.
`status` would be the worst of it, if statuses were in transactions."""


def record_is(record: Append, what: str, topics: Topics) -> bool:
    """Whether a record is of this sort (see `Point.what`)."""
    if what in _TOPIC_OF:
        return record.topic == f"{topics.run}.{_TOPIC_OF[what]}"
    if what in _DECISIONS:
        return record.topic == topics.decisions and _DECISIONS[what] in record.value
    return record.topic == topics.control and f'"kind":"{what}"'.encode() in record.value


def reached(record: Append, tokens: int) -> bool:
    """Whether a progress record covers so many sampled tokens; any record where `tokens` is 0."""
    if tokens == 0:
        return True
    progress = decode_progress(record.value)
    return progress.start + len(progress.token_ids) >= tokens


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
    """The order of round `number` (from 0) of the series `seed`; `kinds` take turns.

    With `dead_s` roles are struck inside their appends, and stay dead for so long.
    `control_facts` is how many a whole run has in control at least; random moments stay below four
    fifths of it. `again` draws anew for a round whose moment never came.
    """
    kind = only or kinds[number % len(kinds)]
    turn = number if only else number // len(kinds)
    chance = random.Random(f"{seed}/{number}/{kind}/{again}")
    if kind == BROKER:
        return _broker_order(number, turn, chance, control_facts)
    role = chance.choice(WORKERS) if kind == "worker" else kind
    at: Point | Chance
    if dead_s:
        at = _aimed(INSIDE[kind], turn, chance)
    elif turn % 5 < AIMED_PER_FIVE:
        at = _aimed(AIMED[kind], turn // 5 * AIMED_PER_FIVE + turn % 5, chance)
    else:
        again_s_max = AGAIN_S_MAX if turn % 5 == AIMED_PER_FIVE else None
        at = _random_moment(chance, control_facts, again_s_max)
    return Order(number=number, seed=chance.randrange(2**31), role=role, at=at, down_s=dead_s)


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
