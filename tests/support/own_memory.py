"""The peak of a process's own memory: without the pages of files, which are the page cache's."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dora_pipe.bench.peak import own_bytes

EVERY_S = 0.002


@contextmanager
def peak_of_own_memory() -> Iterator[list[int]]:
    """A list whose only number is, behind the block, by how much the process grew at most."""
    over, found = threading.Event(), [0]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # What was freed and is still held would be taken again.
    before = own_bytes("RssAnon")

    def watch() -> None:
        while not over.wait(EVERY_S):
            found[0] = max(found[0], own_bytes("RssAnon") - before)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        over.set()
        watching.join()
