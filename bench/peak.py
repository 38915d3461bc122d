"""Peak memory of the process, or of torch's allocator on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dora_pipe.core.errors import ResourceError


def fresh_peak(device: str) -> int:
    """Reset the peak; return the bytes in use."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the high-water mark
    return own_bytes("VmRSS")


def peak_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return own_bytes("VmHWM")


def own_bytes(name: Literal["VmRSS", "VmHWM", "RssAnon"]) -> int:
    """Return a memory figure from Linux."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ResourceError(f"the kernel does not report {name}")
