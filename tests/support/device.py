"""Device and dtype of the contract suites, and their tolerances.

DORA_PIPE_DEVICE=cuda (`make test-gpu`) selects GPU trainers and vLLM's GPU build.
DORA_PIPE_DTYPE=bfloat16 sets vLLM's type.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

DEVICE: Final = os.environ.get("DORA_PIPE_DEVICE", "cpu")
DTYPE: Final = os.environ.get("DORA_PIPE_DTYPE", "float32")

ON_GPU: Final = DEVICE == "cuda"

ROUNDING: Final = {
    ("cpu", "float32"): 0.0,
    ("cuda", "float32"): 1e-4,
    ("cpu", "bfloat16"): 0.25,
    ("cuda", "bfloat16"): 0.25,
}[DEVICE, DTYPE]
"""Tolerance in nats between vLLM's log-probs in different batches; 0: bitwise equal. GPU kernels
depend on the row count."""

COARSE: Final = DTYPE == "bfloat16"
"""Whether rounding may change sampled tokens."""

LORA_DTYPE: Final = "bfloat16" if ON_GPU else DTYPE
"""vLLM lacks GPU kernels for float32 adapters."""

MODEL_DISTANCE: Final = {"float32": 1e-4, "bfloat16": 0.5}
"""Tolerance in nats between vLLM and float32 references on two-layer test models, whose logits
are much wider than a trained model's."""

NO_GPU: Final = "no GPU on this machine"


def has_gpu() -> bool:
    """Look for a driver; importing torch would cost seconds per test process."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def need_device() -> None:
    if ON_GPU and not has_gpu():
        pytest.skip(NO_GPU)


def need_gpus(ranks: int) -> None:
    if not ON_GPU:
        return
    import torch

    if ranks > (there := torch.cuda.device_count()):
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, here is {there}")


def need_fine() -> None:
    if COARSE:
        pytest.skip(f"{DTYPE} decides some of these draws")


def need_cpu() -> None:
    if ON_GPU:
        pytest.skip("a GPU has kernels for these heads")


def prepare() -> None:
    if ON_GPU:
        from dora_pipe.consumers.learners.deepspeed import prepare as settle

        settle(DEVICE)
