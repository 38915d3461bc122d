"""The search for the rows without which a value recovers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dora_pipe.audit.bisect import Limits, Reference, Subject, Trial, Version
from dora_pipe.audit.culprits import Explanation, Suspect, explain, halves
from tests.unit.audit.bisected import World

Recovers = Callable[[frozenset[str]], bool]


def suspect(name: str, deviations: float = 3.0, step: int = 9) -> Suspect:
    return Suspect(name=name, step=step, deviations=deviations)


EVEN = [suspect(f"g{number:02}") for number in range(16)]


def contains(name: str, without: frozenset[str]) -> bool:
    return name in without


def world_of(recovers: Recovers) -> World:
    def worth(subject: Subject) -> float:
        if isinstance(subject, Trial):
            return 0.8 if recovers(subject.without) else 0.5
        return 0.8 if subject == Version(9) else 0.5

    return World(worth)


def explained(
    recovers: Recovers,
    suspects: list[Suspect] = EVEN,
    *,
    steps: int = 20,
    last: int = 10,
    siblings: dict[str, list[Suspect]] | None = None,
) -> Explanation:
    plan = explain(
        suspects,
        Reference(good=Version(9), bad=Version(last + 1)),
        last=last,
        limits=Limits(draws=64, draws_max=256, steps=steps),
        direction=1.0,
        siblings=dict(siblings or {}),
    )
    return world_of(recovers).run(plan)


def test_one_of_sixteen_is_named_by_halves_within_twenty_steps_of_two_a_trial() -> None:
    for culprit in (EVEN[0], EVEN[6], EVEN[15]):
        found = explained(partial(contains, culprit.name))
        assert [one.name for one in found.cause] == [culprit.name]
        assert found.smallest
        assert found.steps == 2 * len(found.trials) <= 20
        assert found.proof is not None
        assert found.proof.gain.low > 0


def test_one_that_stands_out_is_tried_alone_first() -> None:
    suspects = [*EVEN, suspect("g99", 25.0)]
    found = explained(lambda without: "g99" in without, suspects)
    assert [one.name for one in found.cause] == ["g99"]
    assert len(found.trials) == 1


def test_one_that_stands_out_and_did_nothing_is_not_named() -> None:
    suspects = [*EVEN, suspect("g99", 25.0)]
    found = explained(lambda without: "g03" in without, suspects)
    assert [one.name for one in found.cause] == ["g03"]


def test_nothing_is_named_where_nothing_recovers() -> None:
    found = explained(lambda without: False)
    assert not found.cause
    assert len(found.trials) == 1
    assert found.proof is found.trials[0]
    assert found.proof.verdict == "bad"


def test_two_that_did_it_together_are_named_together() -> None:
    pair = {"g02", "g11"}
    found = explained(lambda without: pair <= without, steps=200)
    assert {one.name for one in found.cause} == pair
    assert found.smallest


def test_steps_that_do_not_suffice_leave_a_set_that_does_and_say_so() -> None:
    found = explained(lambda without: "g13" in without, steps=6)
    assert "g13" in {one.name for one in found.cause}
    assert len(found.cause) > 1
    assert not found.smallest
    assert found.steps <= 6


def test_no_trial_is_made_where_none_fits() -> None:
    found = explained(lambda without: True, steps=1)
    assert (found.steps, found.trials, found.cause, found.proof) == (0, (), (), None)


def test_a_trial_begins_at_the_first_step_of_its_suspects() -> None:
    suspects = [suspect("g1", 20.0, step=10), suspect("g2", 3.0, step=8)]
    found = explained(lambda without: "g2" in without, suspects)
    firsts = [one.subject.first for one in found.trials if isinstance(one.subject, Trial)]
    assert firsts == [10, 8, 8]
    assert found.steps == 1 + 3 + 3


def test_a_trajectory_that_suffices_alone_is_named_beside_its_group() -> None:
    siblings = {"g99": [suspect("g99-000", 30.0), suspect("g99-001", 1.0)]}
    found = explained(
        lambda without: bool({"g99", "g99-000"} & without),
        [*EVEN, suspect("g99", 25.0)],
        siblings=siblings,
    )
    assert found.inside is not None
    assert found.inside.name == "g99-000"
    alike = {"g99": [suspect("g99-000"), suspect("g99-001"), suspect("g99-002")]}
    assert (
        explained(lambda without: "g99" in without, [suspect("g99")], siblings=alike).inside is None
    )


def test_halves_have_equal_weight_and_never_nothing() -> None:
    names = [[one.name for one in half] for half in halves(EVEN[:4])]
    assert names == [["g00", "g01"], ["g02", "g03"]]
    assert [len(half) for half in halves([suspect("a", 30.0), *EVEN[:3]])] == [1, 3]
    assert [len(half) for half in halves(EVEN[:1])] == [1]


def test_a_step_without_suspects_explains_nothing() -> None:
    found = explained(lambda without: True, [])
    assert (found.cause, found.proof, found.steps) == ((), None, 0)
