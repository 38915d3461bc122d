"""Tests of bisection by version and by group."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dora_pipe.analysis.bisect import (
    Comparison,
    Explanation,
    Subject,
    Trial,
    Values,
    explain,
    paired,
    search,
    words,
)
from dora_pipe.analysis.suspects import Suspect, suspects_of

DRAWS = 512


@dataclass(slots=True)
class World:
    worth: Callable[[Subject], float]
    draws: int = DRAWS
    asked: list[str] = field(default_factory=list)

    def measure(self, subject: Subject) -> Values:
        self.asked.append(words(subject))
        numbers, worth = random.Random(7), self.worth(subject)
        return [float(numbers.random() < worth) for _ in range(self.draws)]


def falls_at(version: int, good: float = 0.8, bad: float = 0.5) -> World:
    return World(
        lambda position: bad if isinstance(position, int) and position >= version else good
    )


@pytest.mark.parametrize("version", [81, 97, 100, 119, 120])
@pytest.mark.parametrize("good", [0.8, 0.58], ids=["a large fall", "a small fall"])
def test_the_first_bad_version_is_found_wherever_it_is(version: int, good: float) -> None:
    world = falls_at(version, good=good)
    match = search(world.measure, 80, 120)
    assert (match.step, match.sure) == (version - 1, True)
    assert len({*world.asked}) <= 2 + 6


def test_without_a_fall_no_version_between_is_measured() -> None:
    world = falls_at(1000)
    assert not search(world.measure, 80, 120).sure
    assert {*world.asked} == {"version 80", "version 120"}


def test_a_rising_value_is_no_fall_where_more_is_better() -> None:
    world = falls_at(100, good=0.4, bad=0.9)
    match = search(world.measure, 80, 120, direction=1.0)
    assert not match.sure and match.fell.high < 0
    match = search(world.measure, 80, 120)
    assert (match.step, match.direction) == (99, -1.0)


@pytest.mark.parametrize("most", [1, 16])
def test_a_probe_of_a_few_rows_decides_by_those(most: int) -> None:
    world = World(lambda position: float(isinstance(position, int) and position < 100), draws=most)
    match = search(world.measure, 80, 120)
    assert (match.step, match.measured[0].draws) == (99, most)


def test_draws_without_a_value_are_left_out_of_every_pair() -> None:
    assert paired([1.0, None, 0.0], [0.0, 1.0, None], [1.0, 1.0, 1.0]) == [(1.0, 0.0, 1.0)]


def explained(
    causes: set[str], far: dict[str, float], *, steps: int = 20
) -> tuple[World, Explanation]:
    suspects = [Suspect(name=name, step=9, deviations=value) for name, value in far.items()]
    suspects.sort(key=lambda suspect: -suspect.deviations)
    world = World(
        lambda trial: (
            0.8 if trial == 9 or (isinstance(trial, Trial) and causes <= trial.drop) else 0.5
        )
    )
    return world, explain(Comparison(world.measure, 9, 11), suspects, 10, steps)


FAR = {f"g{number:02}": 3.0 - number / 10 for number in range(16)}


@pytest.mark.parametrize("cause", ["g00", "g03", "g09", "g15"])
def test_the_group_that_caused_it_is_named_within_twenty_steps(cause: str) -> None:
    _, explanation = explained({cause}, FAR)
    assert [entry.name for entry in explanation.cause] == [cause]
    assert explanation.proof is not None and explanation.proof.verdict == "good"
    assert explanation.steps <= 20


def test_a_suspect_that_stands_out_alone_is_tried_alone() -> None:
    _, explanation = explained({"g00"}, {**FAR, "g00": 40.0})
    assert [entry.name for entry in explanation.cause] == ["g00"]
    assert explanation.steps == 2


def test_where_no_group_explains_it_none_is_named() -> None:
    _, explanation = explained({"another"}, FAR)
    assert (
        not explanation.cause
        and explanation.proof is not None
        and explanation.proof.verdict == "bad"
    )


def test_two_groups_together_are_named_by_the_smallest_set_that_was_tried() -> None:
    _, result = explained({"g00", "g01"}, FAR)
    assert {"g00", "g01"} <= {result.name for result in result.cause}


def test_without_steps_no_trial_is_made() -> None:
    _, explanation = explained({"g00"}, FAR, steps=1)
    assert (explanation.steps, explanation.proof, explanation.cause, explanation.over) == (
        0,
        None,
        [],
        True,
    )


def rows(group: str, *rewards: float, share: float = 0.01) -> list[dict[str, Any]]:
    return [
        {
            "trajectory": f"{group}-{index:03}",
            "group": group,
            "reward": reward,
            "advantage": reward,
            "tokens": 50,
            "ratio_max": 1.1,
            "loss_share": share,
        }
        for index, reward in enumerate(rewards)
    ]


def test_a_poisoned_group_ranks_first_with_its_reasons() -> None:
    step = [row for index in range(7) for row in rows(f"g{index}", 0.0, 1.0, 1.0)]
    step += rows("g7", 0.0, -1000.0, -1000.0, share=0.3)
    suspects = suspects_of({4: step}, 16)
    assert (suspects[0].name, suspects[0].step) == ("g7", 4)
    assert "reward -1e+03" in suspects[0].reasons
    assert len(suspects) == 7, "a step keeps one group"
