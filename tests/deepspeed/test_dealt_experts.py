"""Experts that two ranks share: what lies where, and what holds whichever of them tokens choose."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.routes import Routes
from tests.deepspeed.conftest import Bench, steps
from tests.deepspeed.test_arithmetic import assert_same_steps, three_batches
from tests.support import deepspeed
from tests.support.batches import SETTINGS
from tests.support.models import make_qwen3_moe


@pytest.fixture(autouse=True)
def _two_ranks() -> None:
    deepspeed.need_deepspeed(ranks=2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("dealt")
    yield Bench(root, make_qwen3_moe(root / "model", scale=20.0))


@pytest.mark.parametrize("stage", range(4))
def test_rank_to_which_no_token_comes_does_not_keep_the_others_waiting(
    mixture: Bench, stage: int
) -> None:
    theirs = mixture.torch()
    batch = through(three_batches()[0], experts=[1, 2], layers=theirs._model.routed.layers)
    ours = mixture.deepspeed(zero_stage=stage, routes=True, expert_parallel_size=2)
    assert_same_steps(steps(ours, [batch], SETTINGS), steps(theirs, [batch], SETTINGS))


@pytest.mark.parametrize("stage", [0, 3])
def test_equal_steps_have_equal_bits_and_the_fingerprint_says_how_experts_were_dealt(
    mixture: Bench, stage: int
) -> None:
    ours, digests = mixture.deepspeed(zero_stage=stage, expert_parallel_size=2), set()
    for _ in range(2):
        ours.load(mixture.weights, digest=mixture.policy.digest, optimizer=None)
        steps(ours, three_batches()[:2], SETTINGS)
        digests.add(ours.manifest().digest)
    assert len(digests) == 1
    assert ours.numerics()["expert_parallel_size"] == "2"
    assert "expert_parallel_size" not in mixture.deepspeed(zero_stage=stage).numerics()


def test_dense_model_and_odd_numbers_of_experts_are_refused_in_one_line(
    bench: Bench, mixture: Bench
) -> None:
    from dora_pipe.consumers.learners.deepspeed.dealt_experts import DealtExperts
    from dora_pipe.consumers.learners.torch.network import build

    with pytest.raises(PolicyError, match="0 experts of llama cannot be split over 2 ranks"):
        DealtExperts(build(bench.assets), 2)
    with pytest.raises(PolicyError, match="8 experts of qwen3_moe cannot be split over 3 ranks"):
        DealtExperts(build(mixture.assets), 3)


def through(batch: TrainBatch, *, experts: list[int], layers: int) -> TrainBatch:
    groups = []
    for group in batch.groups:
        created = []
        for trajectory in group.trajectories:
            chosen = np.broadcast_to(
                np.array(experts, "u1"), (trajectory.length, layers, len(experts))
            )
            created.append(replace(trajectory, routed_experts=Routes.of(chosen.copy(), 8)))
        groups.append(replace(group, trajectories=created))
    return replace(batch, groups=groups)
