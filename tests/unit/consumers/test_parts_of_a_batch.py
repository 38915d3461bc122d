"""A step whose batch comes in parts: the gradient of the whole, and the same bits however early."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dora_pipe.consumers.learners.port import Settings, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.model import read_tensor
from dora_pipe.core.errors import NonFinite
from dora_pipe.store.safetensors_file import mapped, read_entries
from tests.support.batches import make_batch, with_teacher
from tests.support.objectives import KINDS
from tests.unit.consumers.test_torch_objectives import Policy, settings_for


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"))


def batch_of(seed: int, groups: int, parts: Sequence[int] = ()) -> TrainBatch:
    made = with_teacher(make_batch(seed=seed, step=0, groups=groups, siblings=3, valid=0.8))
    return replace(made, parts=parts)


def in_order(batch: TrainBatch, order: Sequence[int], parts: Sequence[int]) -> TrainBatch:
    return replace(batch, groups=[batch.groups[place] for place in order], parts=parts)


def settings_of(kind: str, **keys: Any) -> dict[str, Any]:
    wide = {"trainer.grad_norm_max": 1e6}  # Nothing is clipped: the gradient stays to be seen.
    group = {"advantage": "group"} if kind == "dora" else {}
    return {**settings_for(kind, minibatches=1, **group, **keys), **wide}


def gradient_of(trainer: TorchLearner, path: Path) -> dict[str, Tensor]:
    """Of the one update there was: AdamW's first moment, up to its factor."""
    trainer.save_optimizer(path)
    with mapped(path) as data:
        entries = [one for one in read_entries(path) if one.name.startswith("exp_avg/")]
        return {one.name: read_tensor(data, one).clone() for one in entries}


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
    whole, parted = policy.trainer(), policy.trainer()
    batch = batch_of(seed, groups=5)
    first = whole.train(batch, settings)
    second = parted.train(in_order(batch, [3, 0, 4, 1, 2], [2, 1]), settings)
    expected, found = (gradient_of(one, tmp_path / "state") for one in (whole, parted))
    assert expected.keys() == found.keys() != set()
    scale = max(float(one.abs().max()) for one in expected.values())
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-5 * scale)
    assert second.figures.keys() == first.figures.keys()
    for name in ("loss", "grad_norm", "tokens", "trajectories", "without_gradient"):
        assert second.figures[name] == pytest.approx(first.figures[name], rel=1e-4, abs=1e-6)
    for row, other in zip(first.contributions, second.contributions, strict=True):
        assert row["trajectory"] == other["trajectory"]
        share = pytest.approx(other["loss_share"] or 0.0, rel=1e-3, abs=1e-6)
        assert (row["loss_share"] or 0.0) == share


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_bits_do_not_depend_on_how_many_parts_were_computed_ahead(
    policy: Policy, ahead: int
) -> None:
    settings = settings_of("grpo", kl=0.1)
    batch = batch_of(3, groups=4, parts=[1, 2])
    told = policy.trainer()
    for part in batch.in_parts()[:ahead]:
        told.train_part(part, settings)
    result, digest = told.train(batch, settings), told.manifest().digest
    again, same = policy.train(batch, settings)
    assert digest == same
    assert result.figures == again.figures
    assert list(result.contributions) == list(again.contributions)


def others(batch: TrainBatch, settings: Settings) -> list[tuple[TrainBatch, Settings]]:
    """Parts ahead that are not those of the batch."""
    first = batch.in_parts()[0]
    warmer = {**settings, "objective.clip_high": 0.3}
    return [
        (replace(batch, groups=batch.groups[1:2], parts=()), settings),
        (replace(first, step=9), settings),
        (first, warmer),
    ]


@pytest.mark.parametrize("place", range(3))
def test_parts_that_are_not_those_of_the_batch_leave_nothing_behind(
    policy: Policy, place: int
) -> None:
    settings, batch = settings_of("grpo"), batch_of(4, groups=3, parts=[1])
    told = policy.trainer()
    told.train_part(*others(batch, settings)[place])
    told.train(batch, settings)
    assert told.manifest().digest == policy.train(batch, settings)[1]


def test_whole_batch_after_a_part_has_the_bits_of_the_whole_batch(policy: Policy) -> None:
    settings, batch = settings_of("grpo"), batch_of(5, groups=3)
    told = policy.trainer()
    told.train_part(replace(batch, groups=batch.groups[:1]), settings)
    told.train(batch, settings)
    assert told.manifest().digest == policy.train(batch, settings)[1]


def test_part_that_is_not_finite_is_dropped_with_those_before_it(policy: Policy) -> None:
    settings, batch = settings_of("grpo"), batch_of(6, groups=3, parts=[1, 1])
    first, second, _ = batch.in_parts()
    wild = replace(second.groups[0].trajectories[0], reward=1e300)
    worse = replace(second.groups[0].trajectories[1], reward=-1e300)
    sick = replace(second.groups[0], trajectories=[wild, worse])
    told = policy.trainer()
    told.train_part(first, settings)
    with pytest.raises(NonFinite):
        told.train_part(replace(second, groups=[sick]), settings)
    told.train(batch, settings)
    assert told.manifest().digest == policy.train(batch, settings)[1]


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
