"""Every process of a run is called by its role, as `ps` shows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest

from dora_pipe.core.console import name_process, own_name
from dora_pipe.launch.fork_server import Ended, ForkedHelpers, ForkServer
from dora_pipe.launch.roles import settle


def shown(pid: int) -> str:
    """What `ps` prints of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").decode()


def in_a_child(work: Callable[[], None]) -> int:
    """Exit code of a fork that does it: this process keeps its name."""
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
        settle(name, "demo")
        assert shown(os.getpid()) == called

    assert in_a_child(check) == 0


def test_what_forks_roles_is_called_after_the_run_and_a_role_is_not_called_so(
    tmp_path: Path,
) -> None:
    def role(_: str) -> int:
        (tmp_path / "role").write_text(shown(os.getpid()))
        return 0

    def check() -> None:
        name_process("run", "demo")
        assert own_name() == "run demo"
        with closing(ForkServer(role)) as fork_server:
            fork_server.spawn("w0")
            while not any(isinstance(one, Ended) for one in fork_server.reports(5.0)):
                pass
            assert shown(fork_server.pid) == "dora-pipe fork server of run demo"

    assert in_a_child(check) == 0
    assert (tmp_path / "role").read_text() == "dora-pipe fork server of run demo"


def _say_name(_: bytes, out: IO[bytes]) -> None:
    out.write(shown(os.getpid()).encode())


def test_helpers_of_an_audit_have_names() -> None:
    with ForkedHelpers(_say_name) as forks:
        with os.fdopen(forks.start(b"x"), "rb") as pipe:
            assert pipe.read() == b"dora-pipe helper"
        assert shown(forks.pid) == "dora-pipe fork server of helpers"


def test_a_name_cannot_steer_the_terminal_that_shows_it() -> None:
    def check() -> None:
        name_process("worker", "\x1b[2J")
        assert shown(os.getpid()) == "dora-pipe worker \\x1b[2J"

    assert in_a_child(check) == 0
