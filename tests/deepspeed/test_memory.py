"""Tests of memory savings on DeepSpeed ranks: equal gradients and equal bits."""

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.torch.lora import LoraOptions
from tests.deepspeed.conftest import Bench
from tests.support import deepspeed
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_qwen3_moe
from tests.support.own_memory import peak_of_own_memory

STEP = {**SETTINGS, "objective.kl_coef": 0.2, "trainer.minibatches": 1}
BATCH = make_batch(seed=3, groups=3, samples=3)
LORA = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "lm_head"))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
def test_step_with_a_head_in_chunks_is_one_without(
    bench: Bench, zero_stage: int, lora: LoraOptions | None, tmp_path: Path
) -> None:
    plain = bench.deepspeed(zero_stage=zero_stage, lora=lora)
    expected_metrics = plain.train(BATCH, STEP).metrics
    digests = set()
    for _ in range(2):
        options: dict[str, Any] = {"head_chunk_tokens": 7}
        cut = bench.deepspeed(zero_stage=zero_stage, lora=lora, memory=options)
        metrics = cut.train(BATCH, STEP).metrics
        digests.add(cut.save_weights(tmp_path / "weights").digest)
        assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)
        assert cut.numerics()["head_chunk_tokens"] == "7"
    assert len(digests) == 1


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_step_with_gradient_checkpointing_has_equal_bits(
    bench: Bench, zero_stage: int, tmp_path: Path
) -> None:
    digests = set()
    for again in (False, True):
        trainer = bench.deepspeed(
            zero_stage=zero_stage, memory={"gradient_checkpointing": again, "head_chunk_tokens": 7}
        )
        trainer.train(BATCH, STEP)
        digests.add(trainer.save_weights(tmp_path / "weights").digest)
    assert len(digests) == 1


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_step_whose_sequences_share_lines_is_one_without(
    bench: Bench, zero_stage: int, tmp_path: Path
) -> None:
    expected_metrics = dict(bench.deepspeed(zero_stage=zero_stage).train(BATCH, STEP).metrics)
    packed = bench.deepspeed(zero_stage=zero_stage, memory={"packing": True})
    metrics = dict(packed.train(BATCH, STEP).metrics)
    assert metrics.pop("padded_tokens") < expected_metrics.pop("padded_tokens")
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)
    assert packed.numerics()["packing"] == "on"


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_step_with_blocks_in_chunks_is_one_without(
    bench: Bench, zero_stage: int, tmp_path: Path
) -> None:
    expected_metrics = bench.deepspeed(zero_stage=zero_stage).train(BATCH, STEP).metrics
    digests = set()
    for again in (False, True):
        options: dict[str, Any] = {"mlp_chunk_tokens": 7, "gradient_checkpointing": again}
        cut = bench.deepspeed(zero_stage=zero_stage, memory=options)
        metrics = cut.train(BATCH, STEP).metrics
        digests.add(cut.save_weights(tmp_path / "weights").digest)
        assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-9)
        assert cut.numerics()["mlp_chunk_tokens"] == "7"
    assert len(digests) == 1


LARGE: dict[str, Any] = {"num_hidden_layers": 12, "hidden_size": 256, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 2, "expert_parallel_size": 2},
        {"zero_stage": 3},
        {"zero_stage": 3, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_rank_holds_no_more_of_a_network_than_it_keeps_and_a_layer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    deepspeed.need_deepspeed(ranks=2)
    Bench(tmp_path / "a", make_qwen3_moe(tmp_path / "small")).deepspeed(lora=LORA, **options)
    large = Bench(tmp_path / "b", make_qwen3_moe(tmp_path / "model", **LARGE))
    full_bytes = large.weights.stat().st_size
    with peak_of_own_memory() as taken:
        held = large.deepspeed(lora=LORA, **options)
    half = full_bytes / 2 if held.trainer._options.engine.dtype == "float32" else full_bytes / 4
    assert half < taken[0] < half + full_bytes / 4
