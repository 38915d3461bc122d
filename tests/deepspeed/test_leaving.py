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
    left, stayed = bench.deepspeed(**options), bench.deepspeed(**options)
    for seed in range(2):
        left.train(make_batch(seed=seed), settings)
        stayed.train(make_batch(seed=seed), settings)
        rank = left.trainer._rank
        # Of some of its buffers ZeRO keeps the shape, as tensors of the device `meta`.
        there = [one for one in rank._resident() if one.device.type != "meta"]
        held = [one.untyped_storage() for one in there]
        large = [one for one in held if one.nbytes() >= SMALL_BYTES]
        assert large
        left.leave_device()
        assert {one.nbytes() for one in large} == {0}
    assert left.manifest() == stayed.manifest()
