"""Tests of memory estimates and proposed keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from dora_pipe.cli.memory import estimate, memory_command
from dora_pipe.config.checks import problems_of
from dora_pipe.consumers.learners.torch import memory as trainer_memory
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.launch import memory
from dora_pipe.launch.memory import parse_gpus, placement_of, trainer_keys, with_keys
from dora_pipe.launch.model_shape import model_shape
from tests.support.model_shapes import NETWORKS, plain, qwen3, run, shape_of

GB = 10**9


def test_large_models_have_the_parameters_of_their_names() -> None:
    assert round(qwen3("4B").parameters / 1e9, 1) == 4.0
    sizes: dict[str, Any] = dict(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )
    mixture = shape_of(Qwen3MoeConfig(**sizes))
    # Qwen3-30B-A3B, arXiv 2505.09388.
    assert round(mixture.parameters / 1e9, 1) == 30.5
    assert mixture.experts > 0.9 * mixture.parameters


@pytest.mark.parametrize(
    ("model", "row", "tokens", "dtype", "checkpointing", "peak_gb"),
    [
        ("0.6B", 2048, 4096, "bfloat16", True, 12.7),
        ("0.6B", 2048, 4096, "bfloat16", False, 20.04),
        ("0.6B", 2048, 4096, "float32", True, 14.29),
        ("0.6B", 32_000, 32_000, "bfloat16", True, 17.13),
        ("1.7B", 2048, 4096, "bfloat16", True, 35.7),
        ("1.7B", 2048, 4096, "float32", True, 35.65),
        ("4B", 2048, 4096, "bfloat16", True, 82.76),
        ("4B", 2048, 4096, "float32", True, 80.62),
    ],
)
def test_estimates_are_within_a_tenth_of_steps_on_an_h200(
    model: str, row: int, tokens: int, dtype: str, checkpointing: bool, peak_gb: float
) -> None:
    keys = run(
        workers__max_model_len=row,
        trainer__micro_batch_tokens=tokens,
        trainer__dtype=dtype,
        trainer__gradient_checkpointing=checkpointing,
    )
    assert memory.trainer_bytes(qwen3(model), keys) / GB == pytest.approx(peak_gb, rel=0.1)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_is_estimated(name: str) -> None:
    actual_estimate = estimate(shape_of(NETWORKS[name]), run(), parse_gpus("2x80"))
    assert actual_estimate.good
    assert any(row.what == "trainer: peak" for row in actual_estimate.rows)


def state(**keys: Any) -> float:
    held = memory.state_parts(qwen3("4B"), run(**keys))
    return sum(held.values()) / qwen3("4B").parameters


def test_bytes_per_parameter_of_the_torch_trainer() -> None:
    assert state() == pytest.approx(18)
    assert state(policies__dtype="float32") == pytest.approx(16)
    assert state(policies__dtype="float32", objective__kl_coef=0.1) == pytest.approx(20)
    assert 14 < state(trainer__optimizer="muon") < 15
    assert 12 < state(trainer__optimizer="adamw8bit") < 13
    assert state(lora__rank=16) < 2.3


@given(ranks=st.integers(2, 512))
def test_later_stages_of_zero_hold_less(ranks: int) -> None:
    def bytes_of(stage: int) -> int:
        changed = run(trainer__kind="deepspeed", trainer__ranks=ranks, trainer__zero_stage=stage)
        parts = memory.state_parts(qwen3("4B"), changed)
        return sum(parts.values()) - parts["gathered weights"]

    sizes = [bytes_of(stage) for stage in (1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)


def test_ranks_that_share_experts_hold_less() -> None:
    def bytes_of(dealt: int) -> int:
        keys: dict[str, Any] = dict(trainer__kind="deepspeed", trainer__ranks=4)
        keys |= dict(trainer__zero_stage=2, trainer__expert_parallel_size=dealt)
        shape = shape_of(NETWORKS["qwen3 mixture"])
        return memory.state_parts(shape, run(**keys))["weights"]

    experts = shape_of(NETWORKS["qwen3 mixture"]).experts
    assert bytes_of(1) - bytes_of(4) == 4 * experts * 3 // 4


def test_limits_are_those_of_the_trainer() -> None:
    assert memory.HEAD_ELEMENTS == trainer_memory.HEAD_ELEMENTS
    assert memory.MLP_ELEMENTS == trainer_memory.MLP_ELEMENTS_MIN_GPU
    assert memory.MLP_ELEMENTS == 2 * trainer_memory.MLP_ELEMENTS_GPU


def test_gpus_of_the_keys_or_one_per_worker_and_the_rest_for_the_trainer() -> None:
    eight = placement_of(run(workers__count=3), 8)
    assert (eight.worker_gpus, eight.per_gpu, eight.trainer_gpus, eight.shared) == (3, 1, 5, False)
    placement = placement_of(run(workers__count=3), 1)
    assert (placement.worker_gpus, placement.per_gpu, placement.trainer_gpus, placement.shared) == (
        1,
        3,
        1,
        True,
    )
    named = placement_of(run(workers__count=5, workers__gpus=[1, 2]), 4)
    assert (named.worker_gpus, named.per_gpu, named.trainer_gpus) == (2, 3, 2)
    with pytest.raises(UsageError, match=r"workers\.gpus: there is no GPU 4 among 4"):
        placement_of(run(workers__gpus=[4]), 4)


@pytest.mark.parametrize("text", ["", "8", "8x", "x80", "0x80", "8x0", "8x80GB", "8 x 80"])
def test_gpus_that_are_no_number_and_size_are_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not COUNTxGB"):
        parse_gpus(text)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"model_type": "unheard-of"}])
def test_a_config_without_a_network_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=r"no config\.json"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plain(NETWORKS["llama"]) | change))
    with pytest.raises(PolicyError, match="cannot build a causal LM"):
        model_shape(tmp_path)


def test_a_model_directory_alone_is_estimated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain(NETWORKS["qwen3 mixture"])))
    memory_command(tmp_path, "2x80")
    printed = capsys.readouterr().out
    for line in ("note: a mixture of experts", "trainer: peak", "set: workers.gpus = [1]"):
        assert line in printed
    longer = ["workers.max_model_len=100000", "trainer.micro_batch_tokens=100000"]
    with pytest.raises(PolicyError, match=r"fewer than workers\.max_model_len = 100000"):
        memory_command(tmp_path, override=longer)


@given(
    gigabytes=st.integers(1, 160),
    count=st.integers(1, 64),
    optimizer=st.sampled_from(["adamw", "muon"]),
)
@settings(max_examples=25, deadline=None)
def test_proposed_keys_are_a_valid_configuration_that_fits(
    gigabytes: int, count: int, optimizer: str
) -> None:
    config, gpus = run(trainer__optimizer=optimizer), parse_gpus(f"{count}x{gigabytes}")
    actual_estimate = estimate(qwen3("4B"), config, gpus)
    changed = with_keys(config, actual_estimate.keys)
    assert not list(problems_of(changed))
    assert actual_estimate.misfits or estimate(qwen3("4B"), changed, gpus).good


def test_keys_of_four_billion_parameters() -> None:
    actual_estimate = estimate(qwen3("4B"), run(), parse_gpus("8x80"))
    assert not actual_estimate.good
    assert not actual_estimate.misfits
    assert actual_estimate.keys["trainer.kind"] == "deepspeed"
    assert actual_estimate.keys["trainer.ranks"] == 6
    assert actual_estimate.keys["workers.gpus"] == [6, 7]


def test_workers_get_gpus_beside_those_of_the_trainer() -> None:
    config = run(trainer__gpus=[2])
    actual_estimate = estimate(shape_of(NETWORKS["llama"]), config, parse_gpus("4x80"))
    assert actual_estimate.keys == {"workers.gpus": [0, 1]}


def test_a_worker_too_large_for_a_gpu_gets_several() -> None:
    actual_estimate = estimate(qwen3("4B"), run(), parse_gpus("8x12"))
    assert actual_estimate.keys["workers.vllm.tensor_parallel_size"] in (2, 4)


def test_activations_leave_the_gpu_where_nothing_else_makes_a_long_context_fit() -> None:
    keys: dict[str, Any] = {"workers__max_model_len": 2**17, "trainer__micro_batch_tokens": 2**17}
    config = run(**keys, lora__rank=16, trainer__dtype="bfloat16")
    result = trainer_keys(qwen3("4B"), config, 40 * GB, 1)
    assert result == {"trainer.gradient_checkpointing": "offload"}


def test_more_ranks_than_gpus_do_not_fit() -> None:
    config = run(trainer__kind="deepspeed", trainer__ranks=8)
    actual_estimate = estimate(shape_of(NETWORKS["llama"]), config, parse_gpus("8x80"))
    assert not actual_estimate.good
    assert actual_estimate.keys == {"workers.gpus": [6, 7], "trainer.ranks": 6}


def test_quantized_files_are_refused() -> None:
    shape = shape_of(NETWORKS["llama"], quantization_config={"quant_method": "fp8"})
    assert not estimate(shape, run(), parse_gpus("1x80")).good
