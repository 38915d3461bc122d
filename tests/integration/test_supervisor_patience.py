"""A role that has waited as long as roles do ends its run; a worker of it may be lost as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.launch.fork_server import ForkServer
from dora_pipe.launch.supervisor import WAITED_OUT, RunFailed, Workers
from tests.integration.test_supervisor import supervise


@pytest.mark.parametrize("code", [4, 7])
def test_a_role_that_has_waited_as_long_as_roles_do_is_not_started_again(
    tmp_path: Path, code: int
) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        (tmp_path / f"{name}.log").write_text("error: nobody made room\nhint: make some\n")
        return WAITED_OUT + code

    fork_server = ForkServer(role)
    with pytest.raises(RunFailed, match="nobody made room") as failed:
        supervise(fork_server, "trainer", watch=lambda: None, logs=tmp_path).run()
    fork_server.close()
    assert (tmp_path / "trainer").read_text() == "x"
    assert failed.value.exit_code == code
    assert (failed.value.hint or "").startswith("make some")


def test_a_worker_that_has_waited_so_long_is_started_again(tmp_path: Path) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        return WAITED_OUT + 4 if len((tmp_path / name).read_text()) < 2 else 0

    fork_server = ForkServer(role)
    workers = Workers(names=("w0",))
    assert supervise(fork_server, "w0", watch=lambda: None, logs=tmp_path, workers=workers).run()
    fork_server.close()
    assert (tmp_path / "w0").read_text() == "xx"
