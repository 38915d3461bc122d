"""What stays of freed memory is new to nobody, and leaves the process when that is wanted."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")

FAULTS = """
import resource
from dora_pipe.core import heap
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytes(range(256)) * 16384 for _ in range(6)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
heap.keep_freed()
faults()
print(faults())
heap.give_back_freed()
print(faults())
"""
"""Six values of 4 MiB, which are 6 144 pages."""


def test_the_next_values_are_given_the_pages_of_the_last_until_they_are_to_leave() -> None:
    said = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True)
    kept, given_back = map(int, said.stdout.split())
    assert kept < 300 and given_back > 6000
