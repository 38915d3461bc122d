"""`bench faults`: kill -9 in round after round, and what was lost, doubled or changed by it."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.faults.brokers import CLUSTER
from dora_pipe.bench.faults.heard import Heard
from dora_pipe.bench.faults.order import (
    BROKER,
    DEAD_KINDS,
    EPISODE_KINDS,
    KINDS,
    ROLE_KINDS,
    WORKERS,
    Kind,
    Order,
    episode_order_of,
    order_of,
)
from dora_pipe.bench.faults.rounds import CONTROL_FACTS, DEAD_S, RoundResult, Session
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, UsageError

TRIES_MAX: Final = 3
"""A moment that never came is drawn again; so many times in all."""

SQLITE: Final = "sqlite"
KAFKA: Final = "kafka"

COLUMNS: Final = (
    "round",
    "seed",
    "role",
    "phase",
    "recovered s",
    "lost",
    "trained twice",
    "audit",
    "weights equal",
)


_ONLY_JSON: Final = ("steps", "acknowledged", "trajectories", "finished", "moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Which rounds are played."""

    seed: int
    kinds: tuple[Kind, ...]
    """What is killed, in turns."""
    only: Kind | None
    brokers: int
    """0 on SQLite."""
    dead_s: float = 0.0
    """How long roles stay dead; 0: they are started again at once."""
    episodes: bool = False
    """Runs of agents, environments and tools, in each of which several are struck."""


def row(played: RoundResult) -> dict[str, Any]:
    """A round as the table shows it, then what only JSON shows."""
    verdict = played.verdict
    said: dict[str, Any] = {} if verdict is None else msgspec.structs.asdict(verdict)
    heard = None if verdict is None else verdict.heard
    return {
        "round": played.order.number,
        "seed": played.order.seed,
        "role": played.order.role,
        "phase": "the moment never came" if played.hit is None else played.hit.phase,
        "recovered_s": played.recovered_s,
        "lost": said.get("lost"),
        "trained_twice": said.get("trained_twice"),
        "audit": None if verdict is None else "broken" if verdict.violations else "clean",
        "weights_equal": None if verdict is None else verdict.weights_equal,
        **{name: said.get(name) for name in _ONLY_JSON},
        "violations": said.get("violations", ()),
        "others": said.get("others", ()),
        "strikes": played.strikes,
        "heard": None if heard is None else msgspec.structs.asdict(heard),
        "trouble": played.trouble,
        "seconds": played.seconds,
        "clean": played.clean,
    }


def sum_up(played: Sequence[RoundResult], folder: Path) -> None:
    """The last lines. Raises InvariantBroken unless every round was clean."""
    clean = sum(one.clean for one in played)
    verdicts = [one.verdict for one in played if one.verdict is not None]
    for line in _recovery(played):
        say(line)
    say(
        f"{clean} of {len(played)} rounds clean; "
        f"{sum(one.acknowledged for one in verdicts)} records acknowledged, "
        f"{sum(one.lost for one in verdicts)} lost, "
        f"{sum(one.trained_twice for one in verdicts)} trained twice; "
        f"{sum(one.trajectories for one in verdicts)} of them trajectories; "
        f"{sum(one.equal for one in verdicts)} steps replayed bit-equal"
    )
    heard = [one.heard for one in verdicts if one.heard is not None]
    if heard:
        say(_heard(sum(one.strikes for one in played), heard))
    if clean == len(played):
        shutil.rmtree(folder)
        return
    bad = next(one for one in played if not one.clean)
    raise InvariantBroken(
        f"round {bad.order.number} is not clean: {sentence_of(bad)}", hint=f"what is left: {folder}"
    )


def _heard(kills: int, heard: Sequence[Heard]) -> str:
    """What became of episodes."""

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in heard)

    again = total("again")
    return (
        f"{kills} kills, {total('lost')} lost of {total('episodes')} episodes; "
        f"agents were started {total('starts')} times and had {total('calls')} answers, "
        f"{again} of them again: {total('other_tokens')} with other tokens; "
        f"{total('sampled_again')} were sampled again; "
        f"{total('untold')} calls of trajectories are not what agents were answered"
    )


def _recovery(played: Sequence[RoundResult]) -> list[str]:
    """Times to recover: over all, and for each kind if there are several."""
    times: dict[str, list[float]] = {}
    for one in played:
        if one.recovered_s is not None:
            kind = "worker" if one.order.role in WORKERS else one.order.role
            times.setdefault(kind, []).append(one.recovered_s)
    every = [one for some in times.values() for one in some]
    named = [(f"time to recover, {kind}", times[kind]) for kind in KINDS if kind in times]
    named = [*(named if len(named) > 1 else ()), ("time to recover", every)]
    return [
        f"{words}: median {statistics.median(some):.2f} s, worst {max(some):.2f} s"
        for words, some in named
        if some
    ]


def series_of(
    bus: str,
    brokers: int,
    role: str | None,
    seed: int,
    *,
    stay_dead: bool,
    episodes: bool = False,
) -> Series:
    """What the options mean. Raises UsageError."""
    if bus not in (SQLITE, KAFKA):
        raise UsageError(f"no bus {bus!r}", hint=f"one of {SQLITE}, {KAFKA}")
    if brokers not in (1, CLUSTER) or (brokers > 1 and bus == SQLITE):
        raise UsageError(f"{brokers} brokers on {bus}", hint=f"1 or {CLUSTER}, with --bus {KAFKA}")
    kinds: tuple[Kind, ...] = ROLE_KINDS
    if episodes:
        if bus != SQLITE:
            raise UsageError("--episodes are played on sqlite")
        kinds = DEAD_KINDS if stay_dead else EPISODE_KINDS
    elif bus == KAFKA and not stay_dead:
        kinds = (BROKER,) if brokers == CLUSTER and role is None else KINDS
    only = next((kind for kind in kinds if kind == role), None)
    if role is not None and only is None:
        raise UsageError(f"no role {role!r} on {bus}", hint=f"one of {', '.join(kinds)}")
    return Series(
        seed=seed,
        kinds=kinds,
        only=only,
        brokers=brokers if bus == KAFKA else 0,
        dead_s=DEAD_S if stay_dead else 0.0,
        episodes=episodes,
    )


def play_rounds(session: Session, series: Series, numbers: Iterable[int]) -> Iterator[RoundResult]:
    """Play these rounds and say of each how it was; what a clean one left is removed."""
    session.model()
    for number in numbers:
        played = play_round(session, series, number)
        say(f"round {number}: {sentence_of(played)}")
        yield played
        if played.clean:
            session.forget(played.order)


def play_round(session: Session, series: Series, number: int) -> RoundResult:
    """Play a round; a moment that never came is drawn again."""
    again = 0
    while True:
        order = _order(series, number, again)
        played = session.play(order)
        again += 1
        if played.hit is not None or played.trouble or again == TRIES_MAX:
            return played
        say(f"round {number}: the moment never came; drawn again")
        session.forget(order)


def _order(series: Series, number: int, again: int) -> Order:
    make = episode_order_of if series.episodes else partial(order_of, kinds=series.kinds)
    return make(
        series.seed,
        number,
        control_facts=CONTROL_FACTS,
        only=series.only,
        dead_s=series.dead_s,
        again=again,
    )


def sentence_of(played: RoundResult) -> str:
    """A round in one line."""
    if played.trouble:
        return f"NOT CLEAN, {played.order.role}: {played.trouble}"
    came_back = played.recovered_s is not None or not played.order.must_come_back
    if played.hit is None or not came_back or played.verdict is None:
        return f"NOT CLEAN, {played.order.role} was not struck, or never came back"
    what = "clean" if played.clean else f"NOT CLEAN ({played.verdict})"
    back = "not needed again"
    if played.recovered_s is not None:
        back = f"back after {played.recovered_s:.2f} s"
    who = ", ".join(one.role for one in (played.order, *played.order.then))
    return f"{who} killed, {played.hit.phase}; {back}; {what} ({played.seconds:.1f} s)"
