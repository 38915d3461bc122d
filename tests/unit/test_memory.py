"""Estimates are what networks have, autograd saves and a step takes; proposed keys make it fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config

from dora_pipe.cli.memory import estimate, print_estimate
from dora_pipe.config.checks import problems_of
from dora_pipe.consumers.learners.torch import memory
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.launch import memory as estimates
from dora_pipe.launch.memory import (
    Gpus,
    kv_token_bytes,
    parse_gpus,
    placement_of,
    state_parts,
    trainer_bytes,
    with_keys,
)
from dora_pipe.launch.model_shape import model_shape
from dora_pipe.producers.engines.vllm.core import token_kv_values
from dora_pipe.store.model_dir import weights_elements
from tests.support.model_shapes import BILLIONS, NETWORKS, plain, run, shape_of
from tests.support.models import make_llama_gqa, make_qwen2


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_of_a_config_are_those_of_the_network_that_it_describes(name: str) -> None:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        network = make(NETWORKS[name])
    counted = sum(one.numel() for one in network.parameters())
    assert shape_of(NETWORKS[name]).parameters == counted


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2 mixture", "mixtral", "qwen3 mixture"])
@pytest.mark.parametrize("width", [4, 2])
def test_what_layers_save_is_what_autograd_saves(name: str, width: int) -> None:
    tokens, config = 128, NETWORKS[name]
    make: Any = AutoModelForCausalLM.from_config
    dtype = torch.float32 if width == 4 else torch.bfloat16
    network = make(config, dtype=dtype, attn_implementation="sdpa").eval()
    own = {one.untyped_storage().data_ptr() for one in network.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            saved[place] = tensor
        return tensor

    ids = torch.arange(tokens).reshape(1, -1) % config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        hidden = network.base_model(input_ids=ids, use_cache=False)[0]
    assert hidden.requires_grad
    found = sum(one.untyped_storage().nbytes() for one in saved.values()) / tokens
    half: dict[str, Any] = dict(trainer__kind="deepspeed", trainer__dtype="bfloat16")
    keys = run(trainer__device="cpu") if width == 4 else run(**half)
    guess = estimates._layers_saved(shape_of(config), keys) + 64 * 3 * width
    assert guess == pytest.approx(found, rel=0.08)


H200: dict[str, dict[str, Any]] = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, heads=16),
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, heads=16),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, heads=32),
}


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
def test_a_step_on_an_h200_took_what_is_estimated(
    model: str,
    row: int,
    tokens: int,
    dtype: str,
    checkpointing: bool,
    peak_gb: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peaks of bench/results/gpu, measured with chunks as small as those on a CPU."""
    monkeypatch.setattr(estimates, "MLP_ELEMENTS", memory.MLP_ELEMENTS)
    monkeypatch.setattr(estimates, "MLP_ELEMENTS_MIN", memory.MLP_ELEMENTS_MIN)
    sizes = dict(H200[model])
    heads = sizes.pop("heads")
    config = Qwen3Config(
        **sizes,
        vocab_size=151_936,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    keys = run(
        workers__context_tokens=row,
        trainer__micro_batch_tokens=tokens,
        trainer__dtype=dtype,
        trainer__gradient_checkpointing=checkpointing,
    )
    guess = trainer_bytes(shape_of(config, dtype="bfloat16"), keys)
    assert guess / 1e9 == pytest.approx(peak_gb, rel=0.05)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 mixture"])
def test_a_token_in_a_kv_cache_is_what_vllm_is_told(name: str) -> None:
    shape = shape_of(NETWORKS[name])
    assert shape.kv_values == token_kv_values(plain(NETWORKS[name]))
    assert kv_token_bytes(shape, run()) == 4 * shape.kv_values


def state(**keys: Any) -> float:
    """Bytes a parameter of what a trainer of 4 billion holds."""
    held = state_parts(BILLIONS, run(**keys))
    return sum(one.bytes for one in held) / BILLIONS.parameters


def test_torch_trainer_holds_18_bytes_a_parameter_and_16_in_float32() -> None:
    assert state() == 18
    assert state(policies__dtype="float32") == 16
    assert state(policies__dtype="float32", objective__kl=0.1) == 20
    assert 14 < state(trainer__optimizer="muon") < 15  # one moment of a matrix, two of the rest
    # Of all but the embedding, a tenth of the whole, a moment is a byte and a scale for 256.
    table = BILLIONS.vocabulary * BILLIONS.hidden / BILLIONS.parameters
    assert state(trainer__optimizer="adamw8bit") == pytest.approx(
        10 + 8 * table + 2 * 260 / 256 * (1 - table)
    )


@given(ranks=st.integers(1, 512))
def test_further_stages_of_zero_and_more_ranks_never_hold_more(ranks: int) -> None:
    def bytes_of(stage: int, count: int) -> int:
        keys = {"kind": "deepspeed", "ranks": count, "zero_stage": stage}
        changed = with_keys(run(), {f"trainer.{key}": value for key, value in keys.items()})
        parts = state_parts(BILLIONS, changed)
        return sum(one.bytes for one in parts if "gathered" not in one.what + "buckets")

    stages = [bytes_of(stage, ranks) for stage in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)
    assert all(
        bytes_of(stage, ranks + 1) <= bytes_of(stage, ranks) or ranks == 1 for stage in (1, 2)
    )


def test_an_adapter_is_all_that_has_gradients_and_moments() -> None:
    config = run(lora__rank=16, policies__dtype="float32")
    parts = {one.what: one.bytes for one in state_parts(BILLIONS, config)}
    assert parts["base"] == 4 * BILLIONS.parameters
    assert parts["gradients"] == 4 * 16 * sum(BILLIONS.linears.values()) < 0.01 * parts["base"]


def test_gpus_are_those_of_the_keys_or_one_for_each_worker_and_the_rest_the_trainers() -> None:
    eight = placement_of(run(workers__count=3), 8)
    assert (eight.worker_gpus, eight.per_gpu, eight.trainer_gpus, eight.shared) == (3, 1, 5, False)
    one = placement_of(run(workers__count=3), 1)
    assert (one.worker_gpus, one.per_gpu, one.trainer_gpus, one.shared) == (1, 3, 1, True)
    named = placement_of(run(workers__count=5, workers__gpus=[1, 2]), 4)
    assert (named.worker_gpus, named.per_gpu, named.trainer_gpus) == (2, 3, 2)
    with pytest.raises(UsageError, match=r"workers\.gpus: there is no GPU 4 among 4"):
        placement_of(run(workers__gpus=[4]), 4)


@pytest.mark.parametrize("text", ["", "8", "8x", "x80", "0x80", "8x0", "8x80GB", "-1x80", "8 x 80"])
def test_gpus_that_are_no_number_and_size_are_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is no number of GPUs and GB"):
        parse_gpus(text)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_size_is_one_line(key: str) -> None:
    with pytest.raises(PolicyError, match=f"config.json: {key} is missing"):
        model_shape({**plain(NETWORKS["llama"]), key: None})


def test_weights_that_are_there_are_counted_by_their_headers(tmp_path: Path) -> None:
    for name, make in (("qwen2", make_qwen2), ("llama", make_llama_gqa)):
        folder = make(tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        assert weights_elements(folder) == model_shape(config).parameters
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        assert weights_elements(folder) is None


def test_memory_estimates_from_a_config_alone_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain(NETWORKS["qwen3 mixture"])))
    code = (
        "import sys; from pathlib import Path; from dora_pipe.cli.memory import print_estimate;"
        f"good = print_estimate(Path({str(tmp_path)!r}), '2x80', [], as_json=False);"
        "sys.exit(not good or bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "note: a mixture of experts" in done.stdout
    assert "trainer: peak" in done.stdout
    assert "set: workers.gpus = [1]" in done.stdout
    longer = ["workers.context_tokens=100000", "trainer.micro_batch_tokens=100000"]
    with pytest.raises(PolicyError, match="positions are fewer than a context of 100000 tokens"):
        print_estimate(tmp_path, "", longer, as_json=False)


@given(
    gigabytes=st.integers(1, 160),
    count=st.integers(1, 64),
    optimizer=st.sampled_from(["adamw", "muon"]),
)
@settings(max_examples=25, deadline=None)
def test_proposed_keys_are_a_configuration_that_a_run_takes_and_fit(
    gigabytes: int, count: int, optimizer: str
) -> None:
    config, gpus = run(trainer__optimizer=optimizer), Gpus(count, gigabytes * 10**9)
    found = estimate(BILLIONS, config, gpus)
    changed = with_keys(config, found.keys)
    assert not list(problems_of(changed))
    assert found.misfits or estimate(BILLIONS, changed, gpus).good


def test_a_worker_that_no_gpu_holds_is_given_several() -> None:
    found = estimate(BILLIONS, run(), Gpus(8, 6 * 10**9))
    assert not found.good and not found.misfits
    assert found.keys["workers.engine"] == "vllm-server"
    assert found.keys["workers.vllm.tensor_parallel"] in (2, 4)


def test_more_ranks_than_gpus_do_not_fit() -> None:
    config = run(trainer__kind="deepspeed", trainer__ranks=8)
    found = estimate(shape_of(NETWORKS["llama"]), config, Gpus(8, 80 * 10**9))
    assert not found.good
    assert found.keys == {"workers.gpus": [6, 7], "trainer.ranks": 6}


def test_quantized_files_are_refused() -> None:
    shape = shape_of(NETWORKS["llama"], quantization_config={"quant_method": "fp8"})
    assert not estimate(shape, run(), Gpus(1, 80 * 10**9)).good
