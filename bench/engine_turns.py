"""Measures what kept prefixes save in tasks of several turns, beside the same engine with nothing
kept; decides nothing.

Groups of siblings begin with an equal prompt; each turn samples some tokens, then an environment
says some. All episodes make a turn, then all the next one, so that each turn has figures of its
own. The two engines take turns, and the best of each counts; every pass has prompts of its own, so
that nothing is left over from the one before. Where that is promised, both must sample the very
same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dora_pipe.bench.engine import MODEL, Spent, check_rows, make_engine, measured
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.port import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    PREFILL_EXACT,
    EngineRequest,
    PromptTokens,
    RequestFinished,
    SamplingParams,
)

PROMPT_TOKENS: Final = 96
SAMPLED_TOKENS: Final = 16
SAID_TOKENS: Final = 16
"""Of an environment, after each turn."""
SIBLINGS: Final = 8
EPISODES_PER_ROW: Final = 2
TURNS_MAX: Final = 64
PASSES: Final = 3
PROMISES: Final = frozenset({COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT})
"""Of engines whose tokens are the same whatever was kept: that it is so is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine in its turns."""

    engine: Any
    others_cpu_s: Callable[[], float] = lambda: 0.0
    """CPU seconds that other processes have spent for it so far."""


Sides = Callable[[int, int, int], AbstractContextManager[Sequence[Side]]]
"""(rows, context_tokens, how many tokens may be kept) -> one that keeps nothing, and one that keeps
prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigure:
    """A turn of all episodes; turn 0 is all turns together.

    `prefilled` and `wall_s` are of the engine that keeps prefixes, `plain_...` of the one that
    keeps nothing. `saved` is the share of prefilled tokens; the ratios are of wall clock and of
    CPU time: above 1, keeping is faster.

    Example: ``TurnFigure(rows=16, turn=2, episodes=32, plain_prefilled=4064, prefilled=512,
    saved=0.874, plain_wall_s=0.31, wall_s=0.12, wall_ratio=2.6, cpu_ratio=2.6)``
    """

    rows: int
    turn: int
    episodes: int
    plain_prefilled: int
    prefilled: int
    saved: float
    plain_wall_s: float
    wall_s: float
    wall_ratio: float
    cpu_ratio: float


@contextmanager
def own_sides(rows: int, context_tokens: int, kept_tokens: int) -> Iterator[Sequence[Side]]:
    """The own engine, twice. Needs torch."""
    yield [
        Side(
            engine=make_engine(rows, context_tokens=context_tokens, declares=PROMISES, kv_keep=keep)
        )
        for keep in (0.0, kept_tokens / rows / context_tokens)
    ]


def bench_turns(
    rows: Sequence[int],
    turns: int,
    *,
    sides: Sides = own_sides,
    episodes_per_row: int = EPISODES_PER_ROW,
    passes: int = PASSES,
) -> list[TurnFigure]:
    """Figures of every turn, then of all, by number of rows. Raises UsageError."""
    check_rows(rows)
    if not 1 <= turns <= TURNS_MAX:
        raise UsageError(f"{turns} turns is not between 1 and {TURNS_MAX}")
    found = []
    for count in rows:
        episodes = max(SIBLINGS, count * episodes_per_row)
        room = PROMPT_TOKENS + turns * (SAMPLED_TOKENS + SAID_TOKENS)
        # Whatever all episodes hold fits: what a smaller room costs is another question.
        with sides(count, room, 2 * episodes * room) as pair:
            found += _figures(pair, count, turns, episodes, passes)
    return found


def _figures(
    sides: Sequence[Side], rows: int, turns: int, count: int, passes: int
) -> list[TurnFigure]:
    exact = all(side.engine.declares >= PROMISES for side in sides)
    spent: list[list[list[Spent]]] = [[[] for _ in range(turns)] for _ in sides]
    prompts: list[list[int]] = [[], []]
    for seed in range(passes + 1):  # the first one warms up
        sampled = []
        for at, side in enumerate(sides):
            episodes, prompts[at] = _episodes(count, seed), []
            for turn in range(turns):
                before, seconds = side.engine.prompt_tokens, Spent()
                others_s = side.others_cpu_s()
                with measured(seconds):
                    _turn(side.engine, episodes, rows)
                seconds.cpu_s += side.others_cpu_s() - others_s
                prompts[at].append(_computed(side.engine.prompt_tokens, before))
                spent[at][turn] += [seconds] if seed else []
            sampled.append([one.token_ids for one in episodes])
        assert not exact or sampled[0] == sampled[1], "kept prefixes have changed what is sampled"
    best = [[_best(each) for each in side] for side in spent]
    parts = [
        _figure(rows, turn + 1, count, [side[turn] for side in prompts], [s[turn] for s in best])
        for turn in range(turns)
    ]
    return [*parts, _figure(rows, 0, count, [*map(sum, prompts)], [*map(_sum, best)])]


def _best(passes: Sequence[Spent]) -> Spent:
    return Spent(min(one.wall_s for one in passes), min(one.cpu_s for one in passes))


def _sum(turns: Sequence[Spent]) -> Spent:
    return Spent(sum(one.wall_s for one in turns), sum(one.cpu_s for one in turns))


def _figure(
    rows: int, turn: int, count: int, prompts: Sequence[int], spent: Sequence[Spent]
) -> TurnFigure:
    """Of [nothing kept, kept]."""
    plain, own = spent
    return TurnFigure(
        rows=rows,
        turn=turn,
        episodes=count,
        plain_prefilled=prompts[0],
        prefilled=prompts[1],
        saved=round(1 - prompts[1] / prompts[0], 3),
        plain_wall_s=round(plain.wall_s, 3),
        wall_s=round(own.wall_s, 3),
        wall_ratio=round(plain.wall_s / own.wall_s, 2),
        cpu_ratio=round(plain.cpu_s / own.cpu_s, 2),
    )


def _computed(now: PromptTokens, before: PromptTokens) -> int:
    return now.computed - before.computed


def _episodes(count: int, seed: int) -> list[EngineRequest]:
    """The first turn of each; siblings have one prompt."""
    chance = np.random.default_rng(seed)
    groups = -(-count // SIBLINGS)
    prompts = chance.integers(0, MODEL.vocabulary, (groups, PROMPT_TOKENS)).tolist()
    return [
        EngineRequest(
            request=f"e{number}",
            token_ids=prompts[number // SIBLINGS],
            sampled=0,
            seed=number,
            params=SamplingParams(max_tokens=SAMPLED_TOKENS),
        )
        for number in range(count)
    ]


def _turn(engine: Any, episodes: list[EngineRequest], rows: int) -> None:
    """A turn of each: sampled, and then answered, in its place."""
    places = {one.request: place for place, one in enumerate(episodes)}
    waiting = list(reversed(episodes))
    while waiting or engine.active:
        while waiting and engine.active < rows:
            engine.add(waiting.pop())
        for event in engine.step():
            if not isinstance(event, RequestFinished):
                place = places[event.request]
                one = episodes[place]
                said = np.random.default_rng([place, len(one.token_ids)])
                answer = said.integers(0, MODEL.vocabulary, SAID_TOKENS).tolist()
                ids = [*one.token_ids, *event.token_ids, *answer]
                episodes[place] = replace(one, token_ids=ids)
