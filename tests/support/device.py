"""Where the contract suites compute, and in what type: the same tests on a CPU and on a GPU.

DORA_PIPE_DEVICE=cuda (`make test-gpu`) puts trainers on the GPU and asks for vLLM's build for GPUs;
DORA_PIPE_DTYPE=bfloat16 is vLLM's type, on either. A process has one of each, as DeepSpeed and vLLM
have. How far numbers may then lie apart is said here, once.
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
"""Nats between log-probs that vLLM gives a token in one company and in another; 0: equal bits.
Kernels of a GPU depend on how many rows there are."""

COARSE: Final = DTYPE == "bfloat16"
"""Rounding decides now and then which token is drawn."""

LORA_DTYPE: Final = "bfloat16" if ON_GPU else DTYPE
"""vLLM has no kernels for float32 adapters on a GPU."""

MODEL_DISTANCE: Final = {"float32": 1e-4, "bfloat16": 0.5}
"""Nats between vLLM's log-probs and those of transformers or the trainer, which are float32's, on
the tests' models of two layers, whose logits are many times as wide as a trained model's."""

NO_GPU: Final = "no GPU on this machine"


def has_gpu() -> bool:
    """Whether a driver is here. Asking torch would cost seconds in every worker of a test run."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def need_device() -> None:
    """Skip the running test where it is to run on a GPU and there is none."""
    if ON_GPU and not has_gpu():
        pytest.skip(NO_GPU)


def need_gpus(ranks: int) -> None:
    """Skip the running test of so many ranks where it is to run on fewer GPUs."""
    if not ON_GPU:
        return
    import torch

    if ranks > (there := torch.cuda.device_count()):
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, here is {there}")


def need_fine() -> None:
    """Skip the running test where rounding would decide which tokens it sees."""
    if COARSE:
        pytest.skip(f"{DTYPE} decides some of these draws")


def need_cpu() -> None:
    """Skip the running test of what only vLLM on a CPU does."""
    if ON_GPU:
        pytest.skip("a GPU has kernels for these heads")


def prepare() -> None:
    """Set what CUDA reads when it starts, as whoever makes a run's trainer does."""
    if ON_GPU:
        from dora_pipe.consumers.learners.deepspeed import prepare as settle

        settle(DEVICE)
