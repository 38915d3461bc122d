"""Batches in parts on ranks: the gradient of the whole, and the same bits however early."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.core.errors import NonFinite
from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import HARD, assert_same_steps
from tests.support.batches import SETTINGS, make_batch, poisoned, with_teacher
from tests.support.deepspeed import ENGINES, LoggedTrainer
from tests.unit.consumers.test_parts_of_a_batch import gradient_of

PLAIN: Settings = {**SETTINGS, "trainer.minibatches": 1}

WITH_BFLOAT16 = [*ENGINES, {"zero_stage": 2, "dtype": "bfloat16"}]


def parted(seed: int, parts: Sequence[int], **more: Any) -> TrainBatch:
    batch = make_batch(seed=seed, step=0, groups=4, samples=3, **{"valid": 0.8, **more})
    return replace(with_teacher(batch), parts=parts)


def told(bench: Bench, batch: TrainBatch, settings: Settings, *, ahead: int) -> LoggedTrainer:
    trainer = bench.deepspeed()
    for part in batch.in_parts()[:ahead]:
        trainer.train_part(part, settings)
    trainer.train(batch, settings)
    return trainer


def test_gradient_of_parts_is_clipped_once_it_is_divided(bench: Bench, tmp_path: Path) -> None:
    settings, batch = {**PLAIN, "trainer.max_grad_norm": 1e-3}, parted(5, [1, 2])
    for stage in range(4):
        ours, theirs = bench.deepspeed(zero_stage=stage), bench.torch()
        result = ours.train(batch, settings)
        expected = theirs.train(replace(batch, parts=()), settings)
        assert_same_steps([result], [expected])
        gradient = gradient_of(theirs, tmp_path / "theirs")
        for name, entry in gradient_of(ours, tmp_path / "ours").items():
            assert float((entry - gradient[name]).abs().max()) < 1e-7, name


@pytest.mark.parametrize("settings", [PLAIN, {**HARD, "trainer.minibatches": 1}], ids=["p", "h"])
def test_bits_do_not_depend_on_how_many_parts_were_computed_ahead(
    bench: Bench, settings: Settings
) -> None:
    batch = parted(3, [1, 2])
    results = [told(bench, batch, settings, ahead=ahead) for ahead in range(4)]
    assert len({result.manifest().digest for result in results}) == 1


def test_part_without_a_gradient_adds_nothing_and_a_batch_of_such_changes_nothing(
    bench: Bench,
) -> None:
    empty = parted(1, [1, 2], valid=0.0)
    trainer = bench.deepspeed()
    for part in empty.in_parts():
        trainer.train_part(part, PLAIN)
    assert trainer.train(empty, PLAIN).metrics["updates"] == 0
    assert trainer.manifest() == bench.policy


@pytest.mark.parametrize("stage", range(4))
def test_gradient_of_other_parts_is_forgotten_before_a_batch_and_when_weights_are_loaded(
    bench: Bench, stage: int, tmp_path: Path
) -> None:
    batch, other = parted(4, [1]), parted(6, [2])
    fresh = bench.deepspeed(zero_stage=stage)
    before = bench.deepspeed(zero_stage=stage)
    digests = []
    for trainer in (fresh, before):
        trainer.train(make_batch(seed=9), PLAIN)
    for part in other.in_parts():
        before.train_part(part, PLAIN)
    for trainer in (fresh, before):
        trainer.train(replace(batch, step=1), PLAIN)
        digests.append(trainer.manifest().digest)
        trainer.save_optimizer(tmp_path / str(len(digests)))
    before.train_part(other.in_parts()[0], PLAIN)
    for trainer in (fresh, before):
        trainer.train(make_batch(seed=2, step=2), PLAIN)
        digests.append(trainer.manifest().digest)
    before.train_part(other.in_parts()[0], PLAIN)
    for trainer in (fresh, before):
        trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)
        trainer.train(batch, PLAIN)
        digests.append(trainer.manifest().digest)
    assert digests[0::2] == digests[1::2]
    assert len(set(digests)) == 3
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_step_in_parts_that_is_not_finite_leaves_ranks_that_can_load_again(bench: Bench) -> None:
    batch = parted(7, [1, 2])
    trainer = bench.deepspeed()
    for part in poisoned(parted(7, [1, 2])).in_parts():
        trainer.train_part(part, PLAIN)
    with pytest.raises(NonFinite):
        trainer.train(poisoned(parted(7, [1, 2])), PLAIN)
    trainer.train_part(poisoned(parted(7, [1, 2])).in_parts()[0], PLAIN)
    trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)
    trainer.train(batch, PLAIN)
    assert trainer.manifest() == told(bench, batch, PLAIN, ahead=0).manifest()


# As many updates as parts


@pytest.mark.parametrize("engine", WITH_BFLOAT16, ids=str)
def test_parts_that_are_dealt_as_minibatches_are_the_same_updates_however_early(
    bench: Bench, engine: dict[str, Any]
) -> None:
    settings = {**HARD, "trainer.minibatches": 2}
    batch = parted(3, [])
    in_parts = replace(
        batch, groups=[batch.groups[position] for position in (0, 2, 1, 3)], parts=[2]
    )
    full = bench.deepspeed(**engine)
    full.train(make_batch(seed=9), PLAIN)
    result = full.train(replace(batch, step=1), settings)
    results = {full.manifest().digest}
    for ahead in range(2):
        trainer = bench.deepspeed(**engine)
        trainer.train(make_batch(seed=9), PLAIN)
        given = replace(in_parts, step=1)
        for part in given.in_parts()[:ahead]:
            trainer.train_part(part, settings)
        again = trainer.train(given, settings)
        results.add(trainer.manifest().digest)
        assert list(again.contributions) == list(result.contributions)
    assert len(results) == 1


@pytest.mark.parametrize("engine", WITH_BFLOAT16, ids=str)
def test_updates_ahead_that_are_not_those_of_the_batch_are_taken_back_bit_for_bit(
    bench: Bench, engine: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**HARD, "trainer.minibatches": 3}
    batch, other = parted(4, [1, 1]), replace(parted(6, [1, 1]), step=5)
    states: list[tuple[str, bytes]] = []
    for trainer in (bench.deepspeed(**engine), bench.deepspeed(**engine)):
        trainer.train(make_batch(seed=9), PLAIN)
        before = trainer.manifest()
        for part in other.in_parts()[:2] if states else []:
            trainer.train_part(part, settings)
        assert trainer.manifest() == before
        for part in other.in_parts()[:2] if states else []:
            trainer.train_part(part, settings)
        trainer.train(batch, settings)
        trainer.save_optimizer(tmp_path / "state")
        states.append((trainer.manifest().digest, (tmp_path / "state").read_bytes()))
    assert states[0] == states[1]
