"""What roles are forked from, in a process whose libraries have their own ideas of a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_library_that_closes_its_own_pipe_in_every_child_harms_no_role(tmp_path: Path) -> None:
    """As Arrow does once a Flight server was there: a child in which it is gone aborts."""
    code = f"""
import os
from pathlib import Path
from dora_pipe.launch.fork_server import Ended, ForkServer

OURS = 200

def close_in_child():
    try:
        os.close(OURS)
    except OSError:
        os.abort()
    os.dup2(os.pipe()[0], OURS)

def role(name):
    Path({str(tmp_path)!r}, name).write_text("ran")
    return 0

os.dup2(os.pipe()[0], OURS)
os.register_at_fork(after_in_child=close_in_child)
fork_server = ForkServer(role)
fork_server.spawn("w0")
reports = []
while not any(isinstance(one, Ended) for one in reports):
    reports += fork_server.reports(1.0)
print(reports[-1].code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "0", done.stderr
    assert (tmp_path / "w0").read_text() == "ran"
