"""Tests of trajectories with several contexts: steps on ranks equal the torch trainer's."""

from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import HARD, assert_same_steps
from tests.support.batches import SETTINGS, with_teacher
from tests.support.contexts import branched_batch

DISTANCE_MAX = 5e-4
"""Of a weight after up to three updates at a rate of 1e-3: in many small parts sums have quite
another order, and AdamW divides small gradients by their own size."""

WHOLE = {
    **SETTINGS,
    "objective.kind": "gspo",
    "objective.clip_low": 0.2,
    "objective.loss": "sequence-mean",
}


MASKED = {
    **HARD,
    "objective.mask": "geometric",
    "objective.mask_low": 0.5,
    "objective.mask_high": 5.0,
}


@pytest.mark.parametrize("settings", [SETTINGS, WHOLE, MASKED], ids=["token", "whole", "hard"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("tokens", [40, 120])
def test_steps_on_contexts_are_those_of_the_torch_trainer(
    bench: Bench, zero_stage: int, tokens: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    ours = bench.deepspeed(zero_stage=zero_stage, micro_batch_tokens=tokens)
    theirs = bench.torch(micro_batch_tokens=4096)
    batch = with_teacher(branched_batch(seed=0))
    assert_same_steps([ours.train(batch, settings)], [theirs.train(batch, settings)])
    expected = bench.tensors(theirs, tmp_path / "theirs")
    for name, tensor in bench.tensors(ours, tmp_path / "ours").items():
        assert float((tensor - expected[name]).abs().max()) < DISTANCE_MAX, name
