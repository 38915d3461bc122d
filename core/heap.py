"""What becomes of memory that a process has freed, told to glibc, whose own choice is neither of
these; no other libc has the option. Decides nothing."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

KEPT_BYTES: Final = 128 * 1024 * 1024
"""That stay in a process beyond what it uses, for what is read next."""

_MALLOPT, _MALLOC_TRIM = (
    getattr(ctypes.CDLL(None), name, None) for name in ("mallopt", "malloc_trim")
)
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h."""
_MEGABYTE: Final = 2**20
_MMAP_THRESHOLD_MAX: Final = 32 * _MEGABYTE


@cache
def keep_freed() -> None:
    """Have it stay for the next values of some megabytes: to be given a new page costs several
    times what it costs to fill it. By itself glibc gives back the end of its heap again and
    again."""
    _set(_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
    _set(_TRIM_THRESHOLD, KEPT_BYTES)


@cache
def give_back_freed() -> None:
    """Have it leave the process, from a million bytes on, whatever was said before.

    glibc keeps tensors of less than 32 MiB in a heap once one of their size was freed
    (mallopt(3)), and those of chunks leave gaps there that nothing else fits into.
    """
    _set(_MMAP_THRESHOLD, _MEGABYTE)
    _set(_TRIM_THRESHOLD, _MEGABYTE)
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)  # What was kept until now.


def _set(option: int, value: int) -> None:
    """Unless whoever started the process has said from where on."""
    if _MALLOPT is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _MALLOPT(option, value)
