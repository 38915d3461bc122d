"""Batches that are taken again from the groups of another run: the source's where nothing is
otherwise, and those that follow from rewards and rules where something is.

Method: steps of the recorded run, by the trainer without torch, in this process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.rescored_file import About, NewReward, RescoredFile
from dora_pipe.audit.taken_again import BatchTaken, taken_again
from dora_pipe.cli.retrain import AGAIN, Setting, wanted_of
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.core.errors import ConfigError, UsageError
from dora_pipe.launch import retrain_plan
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.lineage import policy_after
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun
from tests.support.retrained import (
    NAME,
    audited,
    broken_off,
    commits,
    planned,
    replayed,
    retrained,
    runs_with_again,
)

FIRST, LAST = 5, 7
WITHOUT_ONE_VALUE = ("groups.filter_zero_advantage=true",)


@pytest.fixture(scope="module")
def root(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run, and steps of it in batches taken again, with nothing otherwise."""
    return runs_with_again(tmp_path_factory.mktemp("runs"), recorded, again=True)


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    """A copy of both."""
    return shutil.copytree(root, tmp_path / "runs")


def other_change(root: Path) -> BatchChange:
    """All siblings of a group of step 5 are worth the same, and another group does not count."""
    same, out = commits(root, NAME)[FIRST].groups[:2]
    rewards = {one.trajectory: 1.0 for one in same.trajectories}
    return BatchChange(rewards=rewards, without=frozenset({out.group}))


def names(root: Path, run: str) -> list[list[str]]:
    return [[group.group for group in one.groups] for one in commits(root, run)]


def test_unchanged_rewards_and_rules_give_the_batches_and_the_weights_of_the_source(
    root: Path,
) -> None:
    theirs, ours = commits(root, NAME)[FIRST : LAST + 1], commits(root, AGAIN)
    assert [one.step for one in ours] == [5, 6, 7]
    assert [one.groups for one in ours] == [one.groups for one in theirs]
    assert [one.digest_after for one in ours] == [one.digest_after for one in theirs]
    report = audited(root, AGAIN)
    assert report.holds, [one.line for one in report.violations]
    assert report.again == {
        "groups.filter_zero_advantage": False,
        "groups.min_valid_siblings": 2,
        "groups.per_step": 4,
    }


def test_every_batch_of_an_eventful_run_comes_out_again(root: Path) -> None:
    plan = planned(root, "all", first=0, last=None, again=True)
    theirs = commits(root, NAME)
    assert plan.batches is not None
    assert [one.groups for one in plan.batches.values()] == [one.groups for one in theirs]


def test_other_rewards_and_rules_make_other_batches_that_hold_and_are_replayed(runs: Path) -> None:
    change = other_change(runs)
    retrained(runs, "other", last=6, again=True, change=change, overrides=WITHOUT_ONE_VALUE)
    before, now = names(runs, AGAIN), names(runs, "other")
    left = {before[0][0], before[0][1]}
    taken = [name for batch in now for name in batch]
    assert left.isdisjoint(taken)
    assert now[0][:2] != before[0][:2]
    assert len(set(taken)) == len(taken) == 4 * len(now)
    report = audited(runs, "other")
    assert report.holds, [one.line for one in report.violations]
    assert report.again is not None
    assert report.again["groups.filter_zero_advantage"] is True
    lines = replayed(runs, "other", FIRST, FIRST + len(now))
    assert [line.equal for line in lines] == [True] * len(now)


def test_a_run_that_was_ended_goes_on_with_the_same_batches(runs: Path) -> None:
    how: dict[str, Any] = {"again": True, "change": other_change(runs), "last": FIRST + 1}
    assert not broken_off(runs, "late", 1, **how)
    batches = planned(runs, "whole", **how).batches
    assert batches is not None
    found = retrained(runs, "late", **how)
    assert {one.step: one.groups for one in found} == {
        step: one.groups for step, one in batches.items()
    }
    assert audited(runs, "late").holds


def test_a_batch_that_does_not_follow_from_the_groups_is_found(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_way_round(*args: object, **how: object) -> list[BatchTaken]:
        found = list(taken_again(*args, **how))  # type: ignore[arg-type]
        return [BatchTaken(step=one.step, groups=one.groups[::-1]) for one in found]

    monkeypatch.setattr(retrain_plan, "taken_again", other_way_round)
    retrained(runs, "forged", last=FIRST, again=True)
    lines = [one.line for one in audited(runs, "forged").violations]
    assert "batches step 5: its batch has other groups than follow from the source's" in lines[0]


def test_it_ends_where_no_whole_batch_is_left(root: Path, runs: Path) -> None:
    many = ("groups.per_step=6",)
    plan = planned(runs, "many", first=5, last=None, again=True, overrides=many)
    assert plan.ends_early
    assert plan.batches is not None
    assert plan.retrained.last == plan.config.run.steps - 1 == max(plan.batches) < 13
    assert not planned(runs, "few", again=True, overrides=("groups.per_step=1",)).ends_early
    with pytest.raises(UsageError, match="no batch of 500 groups can be taken again for step 5"):
        planned(root, "none", again=True, overrides=("groups.per_step=500",))
    assert not (root / "none").exists()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"again": False}, "exists, with other batches"),
        ({"overrides": WITHOUT_ONE_VALUE}, "exists, with other rules for groups"),
        ({"change": BatchChange(weights={"g9999999999-000": 0.5})}, "in none of the steps"),
    ],
)
def test_another_command_under_its_name_is_refused(
    root: Path, how: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        planned(root, AGAIN, **{"again": True, **how})  # type: ignore[arg-type]


def test_rules_of_groups_are_refused_where_batches_are_kept(root: Path) -> None:
    with pytest.raises(ConfigError, match="per_step is no setting of a training step") as refused:
        planned(root, "new", overrides=("groups.per_step=2",))
    assert "--batches again" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"groups\.size is no setting of a training step"):
        planned(root, "new", again=True, overrides=("groups.size=3",))


def test_rescored_rewards_are_those_of_every_group_that_a_step_may_take(runs: Path) -> None:
    with opened(NAME, runs) as run:
        started, _ = policy_after(run.bus, run.topics, 0)
        wanted = wanted_of(run, Setting(name="new", batches=AGAIN), FIRST, LAST)
    assert wanted.again is not None
    rows = [name for group in wanted.again.groups for name in group.rewards]
    file = RescoredFile(runs / NAME / "rescored" / "ab12cd34ef56")
    file.begin(
        About(run=NAME, started_ns=started.at_ns, reward="r", reward_digest="ab", package="0")
    )
    setting = Setting(name="new", batches=AGAIN, rescored="ab12")
    with file.append(file.rewards) as lines:
        for at, name in enumerate(rows[1:]):
            lines.write(line_of(NewReward(trajectory=name, reward=float(at))))
    with opened(NAME, runs) as run, pytest.raises(UsageError, match=f"{rows[0]} has no score in"):
        wanted_of(run, setting, FIRST, LAST)
    with file.append(file.rewards) as lines:
        lines.write(line_of(NewReward(trajectory=rows[0], reward=9.5)))
    with opened(NAME, runs) as run:
        change = wanted_of(run, setting, FIRST, LAST).change
    assert change.rewards.keys() == set(rows)


def test_the_command_says_what_is_wrong_with_its_kind_of_batches(root: Path, call: Call) -> None:
    words = ("retrain", NAME, "--name", "new", "--runs", root)
    code, _, err = call(*words, "--batches", "anew")
    assert (code, "--batches is 'anew'" in err) == (2, True)
    code, out, _ = call("audit", AGAIN, "--runs", root)
    assert code == 0
    assert "taken again by groups.filter_zero_advantage = False" in out
