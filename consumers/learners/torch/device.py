"""Compute device: its class, clock and deterministic settings."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dora_pipe.core.errors import ResourceError


def device_class(device: str) -> str:
    """Return the kind of device, e.g. "cuda NVIDIA H100" or "cpu AMD EPYC 9654"."""
    if device.startswith("cuda"):
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"cpu {_processor()}"


def capability(device: str) -> str:
    """Return instruction set and libraries. Raises ResourceError for a cuDNN unlike torch's, which
    would fail later or change bits."""
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}, CUDA {torch.version.cuda}, cuDNN {_cudnn()}"
    return f"{torch.backends.cpu.get_cpu_capability()}, MKL {os.environ.get('MKL_CBWR', '')}"


def _cudnn() -> int | None:
    try:
        version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ResourceError(
            str(error).partition(". ")[0],
            hint="unset LD_LIBRARY_PATH, or create the locked environment with make gpu",
        ) from error
    return version


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def compute_clock(device: str, threads: int) -> Callable[[], float]:
    """Return a clock in seconds of a step's compute time."""
    if device.startswith("cuda"):
        return lambda: _settled(device)
    return time.thread_time if threads == 1 else time.process_time


def _settled(device: str) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Fix threads, deterministic kernels and full float32 products; restore on exit."""
    filling: Any = torch.utils.deterministic  # a module replaced by an object
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        filling.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling new buffers only finds uninitialized reads, and is slow.
    filling.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")  # an environment may lower it on GPUs
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        filling.fill_uninitialized_memory = before[2]
        torch.set_float32_matmul_precision(before[3])
