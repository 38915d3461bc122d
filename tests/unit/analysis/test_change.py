"""Tests of changed steps: dropped rows, rewards, weights, change files."""

from dataclasses import replace
from pathlib import Path

import pytest

from dora_pipe.analysis.change import (
    EMPTY,
    Change,
    RewardLine,
    changed_batch,
    read_rewards,
    write_rewards,
)
from dora_pipe.cli.retrain import change_of
from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.core.errors import UsageError
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_qwen2
from tests.support.torch_policy import Policy

ONE_UPDATE = {**SETTINGS, "trainer.minibatches": 1, "trainer.max_grad_norm": 1e6}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_qwen2, micro_batch_tokens=128)


def batch_of(groups: int = 4, parts: tuple[int, ...] = ()) -> TrainBatch:
    return replace(make_batch(seed=5, groups=groups, samples=3), parts=parts)


def names_of(batch: TrainBatch) -> list[str]:
    return [group.group for group in batch.groups]


def test_a_batch_of_which_nothing_is_said_is_the_very_same_one() -> None:
    batch = batch_of()
    text = batch.groups[0].trajectories[0]
    assert text.reward is not None
    change = Change(
        drop=frozenset({"g0000000999", "g0000000999-001"}),
        rewards={"g0000000999-000": 0.0, text.trajectory: text.reward},
    )
    assert changed_batch(batch, EMPTY) is batch
    assert changed_batch(batch, change) is batch


def test_a_trajectory_that_does_not_count_is_masked_as_an_invalid_one(policy: Policy) -> None:
    batch = batch_of()
    out = batch.groups[1].trajectories[2]
    actual_batch = changed_batch(batch, Change(drop=frozenset({out.trajectory})))
    assert [trajectory.reward is None for trajectory in actual_batch.groups[1].trajectories] == [
        False,
        False,
        True,
    ]
    assert actual_batch.groups[0] is batch.groups[0]
    result = policy.trainer().train(actual_batch, ONE_UPDATE)
    row = {contribution["trajectory"]: contribution for contribution in result.contributions}[
        out.trajectory
    ]
    assert (row["reward"], row["advantage"], row["ratio_mean"]) == (None, None, None)
    assert result.metrics["masked"] == 1.0
    first, second = actual_batch.groups[1].trajectories[:2]
    advantages = {
        contribution["trajectory"]: contribution["advantage"]
        for contribution in result.contributions
    }
    assert advantages[first.trajectory] == -advantages[second.trajectory] != 0.0


def test_a_group_that_does_not_count_goes_whole_and_the_step_is_that_of_the_others(
    policy: Policy,
) -> None:
    batch = batch_of()
    actual_batch = changed_batch(batch, Change(drop=frozenset({batch.groups[2].group})))
    alone = replace(batch, groups=[*batch.groups[:2], batch.groups[3]])
    trainer, other = policy.trainer(), policy.trainer()
    assert (
        trainer.train(actual_batch, SETTINGS).contributions
        == other.train(alone, SETTINGS).contributions
    )
    assert trainer.manifest() == other.manifest()


@pytest.mark.parametrize(
    ("parts", "out", "remaining"),
    [((2, 1), (0,), [1, 1]), ((2, 1), (2,), [2]), ((2, 1), (3, 4), [2]), ((1, 1), (1,), [1])],
)
def test_parts_go_on_without_the_groups_that_do_not_count(
    parts: tuple[int, ...], out: tuple[int, ...], remaining: list[int]
) -> None:
    batch = batch_of(groups=5, parts=parts)
    drop = frozenset(batch.groups[location].group for location in out)
    actual_batch = changed_batch(batch, Change(drop=drop))
    assert names_of(actual_batch) == [name for name in names_of(batch) if name not in drop]
    assert list(actual_batch.parts) == remaining
    assert all(part.groups for part in actual_batch.in_parts())


def test_a_step_keeps_at_least_one_group() -> None:
    batch = batch_of(parts=(2,))
    with pytest.raises(UsageError, match="has no group left"):
        changed_batch(batch, Change(drop=frozenset(names_of(batch))))


def test_another_reward_takes_the_place_of_the_logged_one() -> None:
    batch = batch_of()
    name = batch.groups[0].trajectories[1].trajectory
    actual_batch = changed_batch(batch, Change(rewards={name: 7.5}))
    assert [trajectory.reward == 7.5 for trajectory in actual_batch.groups[0].trajectories] == [
        False,
        True,
        False,
    ]
    assert actual_batch.groups[1:] == batch.groups[1:]


def test_a_reward_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="reward of g0000000001-000"):
        Change(rewards={"g0000000001-000": float("nan")})


def test_a_change_is_read_from_a_file_of_rewards_and_options(tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.jsonl"
    lines = [
        RewardLine(trajectory="g1-000", reward=0.5),
        RewardLine(trajectory="g1-001", reward=None),
    ]
    write_rewards(rewards, lines)
    with rewards.open("a") as file:
        file.write('{"trajectory": "g1-002", "reward": 1, "error": "# none"}\n')
    change = change_of(["trainer.learning_rate=1e-4"], rewards, ["g2"])
    assert change.rewards == {"g1-000": 0.5, "g1-001": None, "g1-002": 1.0}
    assert change.drop == {"g2"}
    assert change.settings == {"trainer.learning_rate": 1e-4}
    rewards.write_text('{"trajectory": "g1-000", "reward": 0.5}\nnonsense\n')
    with pytest.raises(UsageError, match="line 2"):
        read_rewards(rewards)


def test_equal_changes_have_equal_digests() -> None:
    change = Change(rewards={"a": 1.0, "b": None}, drop=frozenset({"g1", "g2"}))
    other = Change(rewards={"b": None, "a": 1.0}, drop=frozenset({"g2", "g1"}))
    assert change.digest == other.digest != EMPTY.digest
