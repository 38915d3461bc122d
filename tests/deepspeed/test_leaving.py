"""Every rank leaves its device between steps: all that ZeRO holds there, in every stage."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.consumers.learners.torch.device_states import SMALL_BYTES
from tests.deepspeed.conftest import Bench
from tests.support import deepspeed
from tests.support.batches import SETTINGS, make_batch


@pytest.mark.parametrize("options", deepspeed.ENGINES)
def test_nothing_large_is_left_on_a_rank_and_steps_have_equal_bits(
    bench: Bench, options: dict[str, Any]
) -> None:
    settings = {**SETTINGS, "objective.kl_coef": 0.1}
    trainer, stayed = bench.deepspeed(**options), bench.deepspeed(**options)
    for seed in range(2):
        trainer.train(make_batch(seed=seed), settings)
        stayed.train(make_batch(seed=seed), settings)
        rank = trainer.trainer._rank
        # Of some of its buffers ZeRO keeps the shape, as tensors of the device `meta`.
        there = [entry for entry in rank._resident() if entry.device.type != "meta"]
        held = [entry.untyped_storage() for entry in there]
        large = [storage for storage in held if storage.nbytes() >= SMALL_BYTES]
        assert large
        trainer.leave_device()
        assert {storage.nbytes() for storage in large} == {0}
    assert trainer.manifest() == stayed.manifest()
