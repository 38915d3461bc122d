"""Tests of checks of batch decisions against records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from dora_pipe.consumers.trainer.checks import Arrived, Known, check_batch
from dora_pipe.schemas.control import Offender, TakenGroup, TakenTrajectory
from dora_pipe.schemas.headers import describe
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.schemas.trajectory import Sampler, Trajectory
from tests.support.batches import make_trajectory

GROUP = "g0000000004"
ONE, TWO = f"{GROUP}-000", f"{GROUP}-001"
DIGEST, OTHER = "0" * 64, "1" * 64
SHA = "a" * 64


class Case:
    def __init__(self) -> None:
        self.step = 2
        self.group: dict[str, Any] = {"group": GROUP, "version": 1, "deadline": 3}
        self.taken: dict[str, dict[str, Any]] = {
            name: {
                "trajectory": name,
                "attempt": 0,
                "incarnation": 7,
                "partition": 0,
                "offset": index,
                "sha256": SHA,
            }
            for index, name in enumerate((ONE, TWO))
        }
        self.trajectories = {
            name: make_trajectory(name, version=1, deadline=3) for name in (ONE, TWO)
        }
        self.headers: dict[str, Any] = {}
        self.sha256 = SHA
        self.why = ""
        self.known = Known(
            run="r", next_step=2, digests={1: DIGEST}, trained={}, partial_rollout=False
        )
        self.twice = False

    def offenders(self) -> tuple[Offender, ...]:
        taken = tuple(TakenTrajectory(**fields) for fields in self.taken.values())
        group = TakenGroup(trajectories=taken, **self.group)
        groups = (group, group) if self.twice else (group,)
        decision = TakeBatch(reason="", step=self.step, attempt=1, groups=groups, settings={})
        arrived = {
            name: self._arrived(trajectory) for name, trajectory in self.trajectories.items()
        }
        return check_batch(decision, arrived, self.known)

    def _arrived(self, trajectory: Trajectory) -> Arrived:
        if trajectory.trajectory == TWO and self.why:
            return Arrived(why=self.why)
        changes = self.headers if trajectory.trajectory == TWO else {}
        headers = msgspec.structs.replace(describe(trajectory, sha256=SHA), **changes)
        sha256 = self.sha256 if trajectory.trajectory == TWO else SHA
        return Arrived(headers=headers, sha256=sha256, trajectory=trajectory)

    def change_trajectory(self, **changes: Any) -> "Case":
        self.trajectories[TWO] = replace(self.trajectories[TWO], **changes)
        return self

    def change_meta(self, **changes: Any) -> "Case":
        meta = msgspec.structs.replace(self.trajectories[TWO].meta, **changes)
        return self.change_trajectory(meta=meta)


def test_right_batch_has_no_offender() -> None:
    assert Case().offenders() == ()


def test_batch_at_its_deadline_is_accepted_and_one_step_later_refused() -> None:
    case = Case()
    case.step = 3
    case.known = replace(case.known, next_step=3)
    assert case.offenders() == ()
    case.step = 4
    case.known = replace(case.known, next_step=4)
    (offender,) = case.offenders()
    assert offender.group == GROUP
    assert offender.reason == "C3: its deadline is step 3, this is step 4"


def test_forged_take_batch_with_an_overdue_group_is_refused_by_the_header() -> None:
    case = Case()
    case.step = 4
    case.known = replace(case.known, next_step=4)
    case.group["deadline"] = 9  # the decision is wrong, the headers are right
    offenders = case.offenders()
    assert [offender.trajectory for offender in offenders] == [ONE, TWO]
    assert offenders[0].reason == "C3: its headers say deadline 3, this is step 4"


Change = Callable[[Case], Any]
GROUP_CASES: dict[str, tuple[Change, str]] = {
    "another step": (lambda c: setattr(c, "step", 1), "step 1 is not the next one"),
    "trained before": (
        lambda c: setattr(c, "known", replace(c.known, trained={GROUP: 0})),
        "already trained at step 0",
    ),
    "evaluation": (lambda c: c.group.update(group="e0000000004"), "not a training group"),
    "version from the future": (lambda c: c.group.update(version=3), "C1: version 3"),
    "no trajectory": (lambda c: c.taken.clear(), "has no trajectory"),
}


@pytest.mark.parametrize(("change", "why"), GROUP_CASES.values(), ids=GROUP_CASES.keys())
def test_group_that_cannot_be_trained_is_named_once(change: Change, why: str) -> None:
    case = Case()
    change(case)
    (offender,) = case.offenders()
    assert why in offender.reason
    assert offender.trajectory == ""


CASES: dict[str, tuple[Change, str]] = {
    "unreadable": (lambda c: setattr(c, "why", "unreadable: torn"), "unreadable: torn"),
    "other bytes": (lambda c: setattr(c, "sha256", "b" * 64), "sha256 of its value"),
    "other sha256 in the headers": (lambda c: c.headers.update(sha256="b" * 64), "in its headers"),
    "another run": (lambda c: c.headers.update(run="other"), "run other"),
    "another trajectory": (lambda c: c.headers.update(trajectory=ONE), f"record there is {ONE}"),
    "another group": (lambda c: c.headers.update(group="g0000000005"), "group g0000000005"),
    "another attempt": (lambda c: c.headers.update(attempt=3), "attempt 3, not 0"),
    "fenced incarnation": (lambda c: c.headers.update(incarnation=6), "incarnation 6, not 7"),
    "another version": (lambda c: c.headers.update(version=0), "C1: it is of version 0"),
    "another digest": (lambda c: c.headers.update(digest=OTHER), "C1: version 1 has other weights"),
    "another deadline": (lambda c: c.headers.update(deadline=2), "C3: its headers say deadline 2"),
    "value of another version": (
        lambda c: c.change_trajectory(version=0).headers.update(version=1),
        "its headers and its value differ in version",
    ),
    "value of another deadline": (
        lambda c: c.change_meta(deadline=8).headers.update(deadline=3),
        "its headers and its value differ in deadline",
    ),
    "reward in the headers": (
        lambda c: c.headers.update(reward=0.25),
        "its headers and its value differ in reward",
    ),
    "segments of two versions": (
        lambda c: c.change_trajectory(
            segments=[
                c.trajectories[TWO].segments[0],
                msgspec.structs.replace(c.trajectories[TWO].segments[1], version=0),
            ]
        ),
        "C1: its segments are of versions [0]",
    ),
}


@pytest.mark.parametrize(("change", "why"), CASES.values(), ids=CASES.keys())
def test_trajectory_that_is_not_what_the_batch_says_is_named(change: Change, why: str) -> None:
    case = Case()
    change(case)
    (offender,) = case.offenders()
    assert (offender.group, offender.trajectory) == (GROUP, TWO)
    assert why in offender.reason


def test_trajectory_of_another_group_is_refused_although_its_headers_agree() -> None:
    case = Case()
    stranger = "g0000000005-000"
    case.taken[TWO]["trajectory"] = stranger
    case.trajectories[stranger] = make_trajectory(stranger, version=1, deadline=3)
    (offender,) = case.offenders()
    assert "belongs to group g0000000005" in offender.reason


def test_group_that_the_batch_names_twice_is_refused() -> None:
    case = Case()
    case.twice = True
    assert [offender.reason for offender in case.offenders()] == ["the batch names it twice"]


def test_sample_that_the_batch_names_twice_is_refused() -> None:
    case = Case()
    case.taken[TWO] = dict(case.taken[ONE])
    (offender,) = case.offenders()
    assert (offender.trajectory, offender.reason) == (ONE, "the batch names it twice")


def test_every_offender_is_named_at_once() -> None:
    case = Case()
    case.taken[ONE]["attempt"] = 5
    case.taken[TWO]["incarnation"] = 5
    assert [offender.trajectory for offender in case.offenders()] == [ONE, TWO]


def mixed(*versions: int, weights: tuple[tuple[int, str], ...] = ((2, OTHER),)) -> Case:
    case = Case()
    case.known = replace(case.known, partial_rollout=True, digests={1: DIGEST, 2: OTHER})
    prompt, model = case.trajectories[TWO].segments
    stays = [
        msgspec.structs.replace(
            model, start=model.start + index, end=model.start + index + 1, version=version
        )
        for index, version in enumerate(versions)
    ]
    assert stays[-1].end == model.end
    return case.change_trajectory(segments=[prompt, *stays]).change_meta(
        weights=tuple(Sampler(version=version, digest=digest) for version, digest in weights)
    )


def test_mixed_trajectory_is_accepted_where_the_run_declares_it_and_refused_elsewhere() -> None:
    case = mixed(1, 2, 2)
    assert case.offenders() == ()
    case.known = replace(case.known, partial_rollout=False)
    (offender,) = case.offenders()
    assert (offender.trajectory, offender.reason) == (
        TWO,
        "C1: its segments are of versions [1, 2]",
    )


MIXED_CASES: dict[str, tuple[Case, str]] = {
    "back to an older version": (mixed(1, 2, 1), "C1: version 1 samples after version 2"),
    "older than its group": (
        mixed(0, 1, 1, weights=((0, DIGEST),)),
        "C1: version 0 samples after version 1",
    ),
    "beyond the trainer": (mixed(1, 1, 3, weights=((3, DIGEST),)), "C1: version 3 is later than 2"),
    "other weights": (
        mixed(1, 2, 2, weights=((2, DIGEST),)),
        "C1: version 2 has other weights than its segments name",
    ),
    "no weights": (mixed(1, 2, 2, weights=()), "C1: version 2 has other weights"),
}


@pytest.mark.parametrize(("case", "why"), MIXED_CASES.values(), ids=MIXED_CASES.keys())
def test_mixed_trajectory_that_breaks_what_is_promised_is_named(case: Case, why: str) -> None:
    (offender,) = case.offenders()
    assert (offender.group, offender.trajectory) == (GROUP, TWO)
    assert why in offender.reason
