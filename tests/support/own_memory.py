"""Peak of a process's private memory, without pages of the page cache."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dora_pipe.bench.peak import own_bytes

EVERY_S = 0.002


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """Yield a list with the peak growth, set at the end of the block."""
    over, result = threading.Event(), [0]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Otherwise freed but retained memory would be reused.
    before = own_bytes("RssAnon")

    def watch() -> None:
        while not over.wait(EVERY_S):
            result[0] = max(result[0], own_bytes("RssAnon") - before)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield result
    finally:
        over.set()
        watching.join()
