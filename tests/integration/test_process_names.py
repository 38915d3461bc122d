"""Every process of a run is called by its role, as `ps` shows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.core.system.console import name_process
from dora_pipe.launch.roles import prepare_role


def shown(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").decode()


def in_a_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("w0", "dora-pipe worker w0 demo"),
        ("trainer", "dora-pipe trainer demo"),
        ("orchestrator", "dora-pipe orchestrator demo"),
    ],
)
def test_a_role_is_called_by_its_name_and_its_run(name: str, called: str) -> None:
    def check() -> None:
        prepare_role(name, "demo")
        assert shown(os.getpid()) == called

    assert in_a_child(check) == 0


def test_a_name_cannot_steer_the_terminal_that_shows_it() -> None:
    def check() -> None:
        name_process("worker", "\x1b[2J")
        assert shown(os.getpid()) == "dora-pipe worker \\x1b[2J"

    assert in_a_child(check) == 0
