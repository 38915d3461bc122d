"""Tests of batches in parts: same gradient, same bits at any time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dora_pipe.consumers.learners.learner import Learner, Settings, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.model import read_tensor
from dora_pipe.core.errors import NonFinite
from dora_pipe.store.safetensors_file import mapped, read_entries
from tests.support.batches import make_batch, with_teacher
from tests.support.models import make_qwen2
from tests.support.objectives import KINDS
from tests.support.tiers import more
from tests.support.torch_policy import Policy
from tests.unit.consumers.test_torch_objectives import settings_for


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_qwen2, micro_batch_tokens=128)


def batch_of(seed: int, groups: int, parts: Sequence[int] = ()) -> TrainBatch:
    teacher = with_teacher(make_batch(seed=seed, step=0, groups=groups, samples=3, valid=0.8))
    return replace(teacher, parts=parts)


def in_order(batch: TrainBatch, order: Sequence[int], parts: Sequence[int]) -> TrainBatch:
    return replace(batch, groups=[batch.groups[location] for location in order], parts=parts)


def settings_of(kind: str, **keys: Any) -> dict[str, Any]:
    wide = {"trainer.max_grad_norm": 1e6}  # no clipping: the gradient stays visible
    group = {"advantage": "group"} if kind == "dora" else {}
    return {**settings_for(kind, minibatches=1, **group, **keys), **wide}


def gradient_of(trainer: Learner, path: Path) -> dict[str, Tensor]:
    trainer.save_optimizer(path)
    with mapped(path) as data:
        entries = [entry for entry in read_entries(path) if entry.name.startswith("exp_avg/")]
        return {entry.name: read_tensor(data, entry).clone() for entry in entries}


PARTED = [
    kind for kind in KINDS if settings_for(kind).get("objective.advantage") != "version-baseline"
]


@pytest.mark.parametrize("kind", PARTED)
@pytest.mark.parametrize("seed", [1, 2])
def test_gradient_of_parts_is_that_of_the_batch(
    policy: Policy, kind: str, seed: int, tmp_path: Path
) -> None:
    loss = ("token-mean", "sequence-mean", "constant")[seed % 3]
    settings = settings_of(
        kind, **({"loss": loss} if "objective.loss" in settings_for(kind) else {})
    )
    trainer, parted = policy.trainer(), policy.trainer()
    batch = batch_of(seed, groups=5)
    first = trainer.train(batch, settings)
    second = parted.train(in_order(batch, [3, 0, 4, 1, 2], [2, 1]), settings)
    expected, result = (gradient_of(entry, tmp_path / "state") for entry in (trainer, parted))
    assert expected.keys() == result.keys() != set()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, entry in expected.items():
        torch.testing.assert_close(result[name], entry, rtol=1e-4, atol=1e-5 * scale)
    assert second.metrics.keys() == first.metrics.keys()
    for name in ("loss", "grad_norm", "tokens", "trajectories", "without_gradient"):
        assert second.metrics[name] == pytest.approx(first.metrics[name], rel=1e-4, abs=1e-6)
    for row, other in zip(first.contributions, second.contributions, strict=True):
        assert row["trajectory"] == other["trajectory"]
        share = pytest.approx(other["loss_share"] or 0.0, rel=1e-3, abs=1e-6)
        assert (row["loss_share"] or 0.0) == share


# As many updates as parts


def updating(kind: str, updates: int, **keys: Any) -> dict[str, Any]:
    return {**settings_of(kind, **keys), "trainer.minibatches": updates}


@pytest.mark.parametrize("kind", PARTED)
def test_parts_that_are_dealt_as_minibatches_are_the_same_updates(
    policy: Policy, kind: str
) -> None:
    settings, batch = updating(kind, 2), batch_of(1, groups=5)
    result, digest = policy.train(batch, settings)
    trainer = policy.trainer()
    parted = in_order(batch, [0, 2, 4, 1, 3], [3])
    trainer.train_part(parted.in_parts()[0], settings)
    again = trainer.train(parted, settings)
    assert trainer.manifest().digest == digest
    assert list(again.contributions) == list(result.contributions)
    assert again.metrics == pytest.approx(result.metrics)
    assert {row["minibatch"] for row in again.contributions} == {0, 1}


@pytest.mark.parametrize("kind", ["grpo", "decoupled-ppo"])
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("sizes", [[1, 2], *more([[1]])])
def test_bits_do_not_depend_on_how_many_parts_were_computed_ahead(
    policy: Policy, kind: str, updates: int, sizes: list[int]
) -> None:
    settings = updating(kind, updates, kl_coef=0.1)
    batch = batch_of(3, groups=6, parts=sizes)
    expected, digest = policy.train(batch, settings)
    for ahead in range(len(batch.in_parts()) + 1):
        trainer = policy.trainer()
        for part in batch.in_parts()[:ahead]:
            trainer.train_part(part, settings)
        result = trainer.train(batch, settings)
        assert trainer.manifest().digest == digest
        assert result.metrics == expected.metrics
        assert list(result.contributions) == list(expected.contributions)
    assert {row["minibatch"] for row in expected.contributions} == set(range(updates))


def nothing(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    pass


def other_settings(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    warmer = {**settings, "trainer.learning_rate": 0.5}
    for part in batch.in_parts()[:2]:
        trainer.train_part(part, warmer)


def other_groups(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    trainer.train_part(batch.in_parts()[0], settings)
    trainer.train_part(batch.in_parts()[2], settings)


def other_step(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    trainer.train_part(replace(batch.in_parts()[0], step=7), settings)
    trainer.train_part(batch.in_parts()[0], settings)


def one_update(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    trainer.train_part(batch.in_parts()[0], {**settings, "trainer.minibatches": 1})


def not_finite(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    first, second, _ = batch.in_parts()
    trainer.train_part(first, settings)
    wild = [
        replace(trajectory, reward=1e300 * (-1) ** index)
        for index, trajectory in enumerate(second.groups[0].trajectories)
    ]
    with pytest.raises(NonFinite):
        trainer.train_part(
            replace(second, groups=[replace(second.groups[0], trajectories=wild)]), settings
        )


def whole(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> None:
    for part in batch.in_parts()[:2]:
        trainer.train_part(part, settings)


AHEAD = [nothing, other_settings, other_groups, other_step, one_update, not_finite, whole]


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("steps_before", [1, *more([0])])
def test_what_was_computed_ahead_and_is_not_of_the_batch_is_taken_back_bit_for_bit(
    policy: Policy, ahead: Any, updates: int, steps_before: int, tmp_path: Path
) -> None:
    settings, batch = updating("decoupled-ppo", updates), batch_of(4, groups=4, parts=[1, 1])
    states: list[tuple[str, bytes]] = []
    for trainer in (policy.trainer(), policy.trainer()):
        for step in range(steps_before):
            trainer.train(batch_of(9 + step, groups=2), settings)
        if states:
            ahead(trainer, batch, settings)
        given = replace(batch, parts=()) if ahead is whole else batch
        trainer.train(given, settings)
        trainer.save_optimizer(tmp_path / "state")
        states.append((trainer.manifest().digest, (tmp_path / "state").read_bytes()))
    assert states[0] == states[1]


def test_what_is_written_between_parts_is_what_the_step_begins_with(
    policy: Policy, tmp_path: Path
) -> None:
    settings, batch = updating("grpo", 3), batch_of(4, groups=4, parts=[1, 1])
    trainer = policy.trainer()
    before = trainer.manifest()
    trainer.save_optimizer(tmp_path / "before")
    trainer.train_part(batch.in_parts()[0], settings)
    assert trainer.manifest() == before
    trainer.train_part(batch.in_parts()[0], settings)
    trainer.save_optimizer(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()


@pytest.mark.parametrize("ahead", [1, 2])
def test_policy_that_is_saved_while_a_part_is_computed_has_the_same_bits(
    policy: Policy, ahead: int, tmp_path: Path
) -> None:
    settings = settings_of("grpo", kl_coef=0.1)
    beside, apart = policy.trainer(), policy.trainer()
    before, batch = batch_of(1, groups=3), replace(batch_of(2, groups=4, parts=[1, 1]), step=1)
    for trainer in (beside, apart):
        trainer.train(before, settings)
    saved = apart.save_weights(tmp_path / "apart")
    apart.save_optimizer(tmp_path / "apart-state")
    with ThreadPoolExecutor(1) as publisher:
        writing = publisher.submit(beside.save_weights, tmp_path / "beside")
        state = publisher.submit(beside.save_optimizer, tmp_path / "beside-state")
        for part in batch.in_parts()[:ahead]:
            beside.train_part(part, settings)
        assert writing.result() == saved
        state.result()
    assert (tmp_path / "beside-state").read_bytes() == (tmp_path / "apart-state").read_bytes()
    for trainer in (beside, apart):
        trainer.train(batch, settings)
    assert beside.manifest() == apart.manifest() != saved


def test_simulated_learner_keeps_the_same_promise() -> None:
    batch = batch_of(7, groups=4, parts=[1, 2])
    digests = set()
    for ahead in range(4):
        learner = SimulatedLearner()
        for part in batch.in_parts()[:ahead]:
            learner.train_part(part, {})
        learner.train(batch, {})
        digests.add(learner.manifest().digest)
    assert len(digests) == 1
    for parts in ([2, 1], [1, 1], []):
        learner = SimulatedLearner()
        learner.train(replace(batch, parts=parts), {})
        digests.add(learner.manifest().digest)
    assert len(digests) == 4
