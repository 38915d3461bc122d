"""What the demo does in children: their failures are told, and end it with their exit code."""

import subprocess
import sys

from dora_pipe.core.errors import PolicyError

PROGRAM = """
import os
from contextlib import closing
from dora_pipe.launch.children import Children
from dora_pipe.launch.supervisor import RunFailed
from dora_pipe.core.errors import PolicyError

def note():
    os.write(1, f"{os.getpid()} ".encode())

def refuse():
    raise PolicyError("no model directory at nowhere", hint="see model.path")

def fault():
    raise ValueError("a fault of its own")

note()
with closing(Children(dict(note=note, refuse=refuse, fault=fault), preload=())) as children:
    for name in __NAMES__:
        try:
            children.run(name)
        except RunFailed as error:
            raise SystemExit(error.exit_code)
"""


def run(*names: str) -> subprocess.CompletedProcess[str]:
    """A program that lets children do these works, one after the other."""
    program = PROGRAM.replace("__NAMES__", repr(names))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


def test_works_run_one_after_the_other_each_in_a_process_of_its_own() -> None:
    done = run("note", "note")
    assert done.returncode == 0
    assert len(set(done.stdout.split())) == 3


def test_work_that_fails_says_why_and_gives_its_exit_code() -> None:
    done = run("refuse", "note")
    assert done.returncode == PolicyError.exit_code
    assert done.stderr == "error: no model directory at nowhere\nhint: see model.path\n"
    assert len(done.stdout.split()) == 1


def test_work_with_a_fault_of_its_own_leaves_its_traceback() -> None:
    done = run("fault")
    assert done.returncode == 1
    assert done.stderr.startswith("ended by a fault of its own\nTraceback")
    assert done.stderr.endswith("ValueError: a fault of its own\n")
