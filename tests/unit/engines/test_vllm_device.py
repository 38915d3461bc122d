"""Tests of vLLM's GPU options, without a GPU or vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import lora as vllm_lora
from dora_pipe.producers.engines.vllm.core import GPU_FREE_MIN
from dora_pipe.producers.engines.vllm.weights import on_device
from tests.support.models import make_qwen2

GIB = 2**30


def test_weights_go_to_a_gpu_whole_and_in_order_by_one_copy_each_out_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    tensors = {name: torch.ones(size) for size, name in enumerate("cab", start=1)}
    going = on_device(tensors, torch.device("meta"))
    for sent, (name, tensor) in enumerate(tensors.items(), start=1):
        result, there = next(going)
        assert (result, there.device.type, there.shape) == (name, "meta", tensor.shape)
        assert there.dtype == torch.float32, "it is rounded over there"
        assert len(pinned) == sent, "the next one waits until it is asked for"
    assert pinned == [tensor.data_ptr() for tensor in tensors.values()]


def test_weights_stay_where_they_are_for_a_cpu() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(1)}
    moved = dict(on_device(tensors, torch.device("cpu")))
    assert list(moved) == list(tensors)
    assert all(moved[name] is tensor for name, tensor in tensors.items())


def test_engines_and_trainer_may_share_a_gpu_of_which_each_takes_what_its_slots_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_qwen2(tmp_path / "model")
    replies = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(vllm_core, "device_name", lambda device=device: device)
        monkeypatch.setattr(vllm_core, "gpus_seen", lambda: 1)
        replies[device] = vllm_core.arguments(
            model, Vllm(kv_cache_gb=2.0), sleep=False, slots=4, context_tokens=64
        )
    assert replies["cuda"]["gpu_memory_utilization"] == GPU_FREE_MIN
    assert replies["cuda"]["kv_cache_memory_bytes"] == 2 * GIB
    assert "gpu_memory_utilization" not in replies["cpu"]


def test_a_server_of_more_parts_than_gpus_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_qwen2(tmp_path / "model")
    monkeypatch.setattr(vllm_core, "device_name", lambda: "cuda")
    monkeypatch.setattr(vllm_core, "gpus_seen", lambda: 1)
    for parts in (Vllm(tensor_parallel_size=2), Vllm(pipeline_parallel_size=2)):
        with pytest.raises(ConfigError, match="need 2 GPUs, and a worker sees 1 here") as caught:
            vllm_core.arguments(model, parts, sleep=False, slots=4, context_tokens=64)
        assert "workers.gpus" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("rank", "device", "dtype"),
    [(4, "cpu", "float32"), (4, "cuda", "bfloat16"), (0, "cuda", "float32")],
)
def test_adapters_are_taken_where_vllm_has_kernels_for_them(
    rank: int, device: str, dtype: str
) -> None:
    vllm_lora.check_kernels(rank, device, dtype)


def test_float32_adapters_on_a_gpu_are_refused_with_the_key_to_set() -> None:
    with pytest.raises(ConfigError, match="no kernels for adapters in float32") as caught:
        vllm_lora.check_kernels(4, "cuda", "float32")
    assert "workers.vllm.dtype=bfloat16" in str(caught.value.hint)
