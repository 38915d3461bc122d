"""What computes: its class, its clock, and the settings under which it always gives equal bits."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def device_class(device: str) -> str:
    """What kind of device computes, e.g. "cuda NVIDIA H100" or "cpu AMD EPYC 9654"."""
    if device.startswith("cuda"):
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"cpu {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def compute_clock(device: str, threads: int) -> Callable[[], float]:
    """A clock in seconds that counts what a step computes and as little else as can be."""
    if device.startswith("cuda"):
        return time.perf_counter
    return time.thread_time if threads == 1 else time.process_time


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """One fixed number of threads and deterministic kernels, and back to what was before."""
    filling: Any = torch.utils.deterministic  # a module that is an object in disguise
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        filling.fill_uninitialized_memory,
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling every fresh buffer only helps to find reads of uninitialised memory; it is slow.
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        filling.fill_uninitialized_memory = before[2]
