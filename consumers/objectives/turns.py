"""What each turn of an episode is worth, where its record says what lay between turns; pure.

    value    V0            V1            V2            V3
    record   prompt turn 0 answer turn 1 answer turn 2     A(turn k) = V(k + 1) - V(k)

V0 is the mean reward of the siblings without the episode's own, which are continuations of the
prompt; the last is the reward itself; those between are the record's (`meta.turn_values`). The sum
over the turns is the episode's reward less V0, which is its advantage by leaving it out. Where a
value between two turns is missing, they are one turn here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from dora_pipe.schemas.contexts import counted_places
from dora_pipe.schemas.trajectory import Trajectory


def turn_advantages(
    reward: float, advantage: float, values: Sequence[tuple[int, float]], places: Sequence[int]
) -> list[float]:
    """What each sampled token of an episode is worth by its turn: the value behind the turn less
    the value before it.

    VinePPO (arXiv 2410.01679, section 4): values are Monte Carlo estimates. `values` are (token,
    value) of places between turns, ascending; `places` those of the tokens in the record. Before
    the first stands what its siblings earned, `reward` - `advantage` by `leave_one_out_advantages`;
    behind the last, the reward. Where no place was valued, turns are one stretch; all add up to
    `advantage`.

    Example: ``turn_advantages(0.0, -0.5, [(10, 1.0)], [4, 5, 12]) == [0.5, 0.5, -1.0]``
    """
    edges = [token for token, _ in values]
    known = [reward - advantage, *(value for _, value in values), reward]
    steps = [after - before for before, after in pairwise(known)]
    return [steps[bisect_right(edges, place)] for place in places]


def advantages_by_turn(trajectory: Trajectory, advantage: float | None) -> list[float] | None:
    """One for each token that enters the loss; None of a trajectory without values, or without a
    reward. `advantage` is its own, by `leave_one_out_advantages`."""
    values = [(one.token, one.mean) for one in trajectory.meta.turn_values]
    if advantage is None or trajectory.reward is None or not values:
        return None
    places = counted_places(trajectory).tolist()
    return turn_advantages(trajectory.reward, advantage, values, places)


def for_tokens(given: Sequence[Sequence[float]], lengths: Sequence[int]) -> list[float]:
    """One for each token: of each trajectory all of these numbers, or a single one that all have.

    Example: ``for_tokens([[0.5], [1.0, -1.0]], [2, 2]) == [0.5, 0.5, 1.0, -1.0]``
    """
    pairs = zip(given, lengths, strict=True)
    return [
        value for one, length in pairs for value in (one if len(one) == length else [*one] * length)
    ]
