"""The search for the version at which a probe's value fell."""

from __future__ import annotations

import pytest

from dora_pipe.audit.bisect import Limits, Subject, Trial, Version, compared, paired, search
from tests.unit.audit.bisected import World

LIMITS = Limits(draws=32, draws_max=512)


def falls_at(version: int, good: float = 0.8, bad: float = 0.5) -> World:
    def worth(subject: Subject) -> float:
        assert isinstance(subject, Version)
        return bad if subject.version >= version else good

    return World(worth)


@pytest.mark.parametrize("version", [81, 97, 100, 119, 120])
def test_the_first_bad_version_is_found_wherever_it_is(version: int) -> None:
    world = falls_at(version)
    found = world.run(search(80, 120, LIMITS))
    assert (found.last_good, found.first_bad) == (version - 1, version)
    assert found.sure
    assert not found.undecided
    assert len(world.subjects) <= 2 + 6


def test_where_nothing_fell_no_version_between_is_asked() -> None:
    world = falls_at(1000)
    found = world.run(search(80, 120, LIMITS))
    assert not found.sure
    assert world.subjects == ["version 80", "version 120"]
    assert max(ask.draws for ask in world.asked) == LIMITS.draws_max


def test_a_value_that_rises_did_not_fall_where_more_is_better() -> None:
    found = falls_at(100, good=0.4, bad=0.9).run(search(80, 120, LIMITS, direction=1.0))
    assert not found.sure
    assert found.fell.high < 0


def test_where_nobody_knows_what_is_better_the_good_version_says_so() -> None:
    found = falls_at(100, good=0.4, bad=0.9).run(search(80, 120, LIMITS))
    assert (found.first_bad, found.direction) == (100, -1.0)
    assert found.fell.low > 0


def test_a_small_fall_is_asked_for_more_often_than_a_large_one() -> None:
    large, small = falls_at(90), falls_at(90, good=0.8, bad=0.74)
    assert large.run(search(80, 100, LIMITS)).first_bad == 90
    assert small.run(search(80, 100, LIMITS)).first_bad == 90
    most = [max(ask.draws for ask in world.asked) for world in (large, small)]
    assert most[0] < most[1] <= LIMITS.draws_max


def test_versions_halfway_are_named_as_those_that_cannot_be_told() -> None:
    worths = {80: 0.8, 83: 0.65, 84: 0.65, 85: 0.5, 86: 0.5, 87: 0.5, 88: 0.5}
    world = World(lambda subject: worths.get(getattr(subject, "version", 0), 0.8))
    found = world.run(search(80, 88, LIMITS))
    assert (found.last_good, found.first_bad) == (82, 85)
    assert found.undecided == [83, 84]
    assert {one.verdict for one in found.tested} == {"good", "bad", "open"}


def test_a_kept_version_near_the_middle_is_asked_before_one_that_must_be_made() -> None:
    world = falls_at(118)
    world.run(search(80, 120, LIMITS, kept={96, 116}))
    assert world.subjects[2] == "version 96"


def test_a_probe_that_has_a_few_rows_once_is_not_asked_for_more() -> None:
    world = falls_at(100)
    world.most = 16
    found = world.run(search(80, 120, LIMITS))
    assert max(ask.draws for ask in world.asked) == LIMITS.draws
    assert found.good.draws == 16


def test_a_probe_of_one_number_decides_by_that() -> None:
    world = World(lambda subject: 1.0 if getattr(subject, "version", 0) < 100 else 0.0, most=1)
    found = world.run(search(80, 120, LIMITS))
    assert found.first_bad == 100


def test_draws_without_a_value_are_left_out_of_every_pair() -> None:
    assert paired([1.0, None, 0.0], [0.0, 1.0, None], [1.0, 1.0, 1.0]) == [(1.0, 0.0, 1.0)]
    found = compared(Version(3), [1.0, None, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], direction=1.0)
    assert (found.verdict, found.draws, found.before) == ("good", 2, 0.0)


def test_what_is_remembered_of_a_trial_names_its_steps_and_rows() -> None:
    trial = Trial(first=3, last=5, without=frozenset({"g2", "g1"}))
    assert (trial.words, trial.steps) == ("steps 3 to 5 without g1, g2", 3)
    assert Trial(first=3, last=5).words == "steps 3 to 5 as they were"
