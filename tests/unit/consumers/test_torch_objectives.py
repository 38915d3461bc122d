"""Tests of objectives in the torch trainer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.consumers.learners.settings import changed_settings, step_settings
from dora_pipe.consumers.learners.torch.model import TorchModel
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.core.errors import ConfigError
from tests.support.batches import SETTINGS, make_batch, with_teacher
from tests.support.models import make_qwen2
from tests.support.objectives import KINDS, OF_TRAINER, objective_settings
from tests.support.torch_policy import Policy

RECOMPUTED = ("grpo", "dapo", "dr-grpo", "decoupled-ppo", "tis", "cispo", "gspo")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_qwen2, micro_batch_tokens=128)


def settings_for(kind: str, *, minibatches: int = 2, **keys: Any) -> dict[str, Any]:
    results = {**OF_TRAINER, **objective_settings(kind, **keys), "trainer.minibatches": minibatches}
    results.pop("trainer.micro_batch_tokens")
    return results


def batch_of(seed: int = 1, versions: tuple[int, ...] = (0, 0, 0, 0)) -> TrainBatch:
    batch = make_batch(seed=seed, step=max(versions), groups=len(versions), samples=3, valid=0.9)
    groups = [replace(group, version=v) for group, v in zip(batch.groups, versions, strict=True)]
    return with_teacher(replace(batch, groups=groups))


@pytest.mark.parametrize("kind", KINDS)
def test_step_of_every_kind_moves_the_policy_and_comes_out_the_same_again(
    policy: Policy, kind: str
) -> None:
    recomputes: dict[str, Any] = {"proximal": "recomputed"} if kind in RECOMPUTED else {}
    settings = settings_for(kind, mask="geometric", **recomputes)
    result, digest = policy.train(batch_of(), settings)
    again, same = policy.train(batch_of(), settings)
    assert digest == same != policy.manifest.digest
    assert result.metrics == again.metrics
    assert list(result.contributions) == list(again.contributions)
    assert 0 <= result.metrics["masked_share"] < 1


def test_proximal_policy_is_that_of_the_first_weights_of_the_step(policy: Policy) -> None:
    result, _ = policy.train(batch_of(), settings_for("decoupled-ppo", max_weight=1e6))
    first = [row for row in result.contributions if row["minibatch"] == 0 and row["ratio_mean"]]
    later = [row for row in result.contributions if row["minibatch"] == 1 and row["ratio_mean"]]
    assert first
    assert later
    # The first update starts at the proximal policy; the second has moved away.
    assert {(row["ratio_min"], row["ratio_max"]) for row in first} == {(1.0, 1.0)}
    assert all(row["ratio_min"] < 1.0 or row["ratio_max"] > 1.0 for row in later)
    model = TorchModel(policy.assets, device="cpu")
    model.load(policy.weights)
    by_name = {
        trajectory.trajectory: trajectory
        for group in batch_of().groups
        for trajectory in group.trajectories
    }
    for row in (*first, *later):
        weight = _weight(model, by_name[row["trajectory"]])
        assert row["weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-4)


def _weight(model: TorchModel, trajectory: Any) -> Tensor:
    ids = torch.tensor([list(trajectory.token_ids)])
    with torch.no_grad():
        logits: Tensor = model.network(input_ids=ids).logits[0, :-1]
    table = logits.log_softmax(-1)
    result = table.gather(1, ids[0, 1:, None])[:, 0]
    first = trajectory.meta.prompt_tokens
    behaviour = torch.tensor(list(trajectory.logprobs)[first:])
    return (result[first - 1 :] - behaviour).exp()


def test_version_baseline_is_over_the_whole_batch_and_not_over_its_minibatches(
    policy: Policy,
) -> None:
    batch = batch_of(versions=(0, 1, 0, 1))
    result, _ = policy.train(batch, settings_for("grpo", advantage="version-baseline"))
    groups = [(group.version, [row.reward for row in group.trajectories]) for group in batch.groups]
    expected = [
        advantage
        for of_group in batch_advantages(groups, "version-baseline", True)
        for advantage in of_group
    ]
    assert [row["advantage"] for row in result.contributions] == expected


def test_constant_loss_counts_every_trajectory_as_so_many_tokens(policy: Policy) -> None:
    def norm(tokens: int) -> float:
        settings = settings_for("dr-grpo", minibatches=1, loss_tokens=tokens)
        return policy.train(batch_of(), settings)[0].metrics["grad_norm"]

    assert norm(10) == pytest.approx(2 * norm(20), rel=1e-5)


# Settings of a step.


def test_key_that_the_kind_needs_and_the_log_lacks_is_named() -> None:
    settings = {**OF_TRAINER, **objective_settings("tis")}
    del settings["objective.max_weight"]
    with pytest.raises(ConfigError, match=r"objective\.max_weight"):
        step_settings(settings)


def test_changed_kind_of_a_recorded_step_starts_from_its_own_defaults() -> None:
    settings = changed_settings(SETTINGS, {"objective.kind": "dr-grpo"}, max_tokens=77)
    assert settings["objective.loss_tokens"] == 77
    assert settings["objective.advantage_std"] is False
    assert settings["trainer.learning_rate"] == SETTINGS["trainer.learning_rate"]
    step_settings({**OF_TRAINER, **settings})


def test_changed_key_that_the_kind_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not use it"):
        changed_settings(SETTINGS, {"objective.max_weight": 2.0}, max_tokens=77)
