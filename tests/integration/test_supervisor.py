"""Real processes: roles are forked, started again and stopped in order by their supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.config.model import Timing
from dora_pipe.launch import supervisor as supervisor_module
from dora_pipe.launch.fork_server import CUDA_BY_NVML, Ended, ForkServer, Report, Started
from dora_pipe.launch.roles import TRAINER_PRELOAD
from dora_pipe.launch.supervisor import RunFailed, Supervisor, Workers, how
from dora_pipe.producers.engines.registry import engine_kind

WAIT_S = 20.0
TIMING = Timing(restarts_max=2, restart_window_s=60.0, stop_timeout_s=5.0)


def until(done: Callable[[], bool]) -> None:
    """Wait, boundedly, for something another process does."""
    give_up_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.01)


def collect(fork_server: ForkServer, count: int) -> list[Report]:
    reports: list[Report] = []

    def enough() -> bool:
        reports.extend(fork_server.reports(0.05))
        return len(reports) >= count

    until(enough)
    return reports


def wait_for_signal(name: str) -> int:
    """A role that does nothing until a signal ends it."""
    signal.pause()
    return 0


def supervise(
    fork_server: ForkServer,
    *names: str,
    watch: Callable[[], None],
    logs: Path,
    workers: Workers | None = None,
) -> Supervisor:
    return Supervisor(
        dict.fromkeys(names, fork_server),
        stop_order=tuple((name,) for name in names),
        timing=TIMING,
        logs=logs,
        watch=watch,
        workers=workers,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_role_is_forked_under_its_name_and_its_exit_code_comes_back() -> None:
    fork_server = ForkServer(lambda name: {"good": 0, "bad": 9}[name])
    fork_server.spawn("good")
    fork_server.spawn("bad")
    reports = collect(fork_server, 4)
    fork_server.close()
    assert {one.name for one in reports if isinstance(one, Started)} == {"good", "bad"}
    assert {one.name: one.code for one in reports if isinstance(one, Ended)} == {
        "good": 0,
        "bad": 9,
    }


def test_a_killed_role_is_reported_with_its_signal() -> None:
    fork_server = ForkServer(wait_for_signal)
    fork_server.spawn("w0")
    (started,) = collect(fork_server, 1)
    os.kill(started.pid, signal.SIGKILL)
    (ended,) = collect(fork_server, 1)
    fork_server.close()
    assert isinstance(ended, Ended)
    assert ended.code == -signal.SIGKILL
    assert how(ended.code) == "was killed (SIGKILL)"


def test_a_role_finds_the_modules_that_the_fork_server_imported() -> None:
    assert "wsgiref.validate" not in sys.modules
    fork_server = ForkServer(
        lambda name: 0 if name in sys.modules else 1, preload=("wsgiref.validate",)
    )
    fork_server.spawn("wsgiref.validate")
    codes = [one.code for one in collect(fork_server, 2) if isinstance(one, Ended)]
    fork_server.close()
    assert codes == [0]
    assert "wsgiref.validate" not in sys.modules


def test_no_role_outlives_the_supervisor() -> None:
    fork_server = ForkServer(wait_for_signal)
    fork_server.spawn("w0")
    (started,) = collect(fork_server, 1)
    fork_server.close()
    assert not alive(started.pid)


def test_fork_servers_end_one_by_one_although_the_later_was_forked_beside_the_earlier() -> None:
    first, second = ForkServer(wait_for_signal), ForkServer(wait_for_signal)
    first.close()
    assert not alive(first.pid)
    second.spawn("w0")
    (started,) = collect(second, 1)
    second.close()
    assert not alive(started.pid)


def test_no_role_outlives_a_fork_server_that_is_killed() -> None:
    fork_server = ForkServer(wait_for_signal)
    fork_server.spawn("w0")
    (started,) = collect(fork_server, 1)
    os.kill(fork_server.pid, signal.SIGKILL)
    until(lambda: not alive(started.pid))
    fork_server.close()
    assert not alive(started.pid)


def test_a_role_that_dies_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        return 1 if len((tmp_path / name).read_text()) < 3 else 0

    fork_server = ForkServer(role)
    ended = supervise(fork_server, "w0", watch=lambda: None, logs=tmp_path).run()
    fork_server.close()
    assert ended
    assert (tmp_path / "w0").read_text() == "xxx"


def test_a_role_that_keeps_dying_fails_the_run_with_what_it_said(tmp_path: Path) -> None:
    def role(name: str) -> int:
        (tmp_path / f"{name}.log").write_text("noise\nerror: the disk is on fire\nhint: run\n")
        return 7

    fork_server = ForkServer(role)
    with pytest.raises(RunFailed, match="the disk is on fire") as failed:
        supervise(fork_server, "w0", watch=lambda: None, logs=tmp_path).run()
    fork_server.close()
    assert failed.value.exit_code == 7
    assert failed.value.hint == f"run; see {tmp_path / 'w0.log'}"


def test_starts_do_not_count_while_the_run_is_held_up_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_MAX_S", 0.01)

    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        return 7 if len((tmp_path / name).read_text()) < 2 * TIMING.restarts_max + 2 else 0

    fork_server = ForkServer(role)
    held_up = Supervisor(
        {"w0": fork_server},
        stop_order=(("w0",),),
        timing=TIMING,
        logs=tmp_path,
        watch=lambda: None,
        held_up=lambda: True,
    )
    assert held_up.run()
    fork_server.close()


def test_a_fatal_exit_code_is_not_tried_again_and_ends_the_others(tmp_path: Path) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        if name == "trainer":
            return 11
        signal.pause()
        return 0

    fork_server = ForkServer(role)
    supervisor = supervise(fork_server, "trainer", "w0", watch=lambda: None, logs=tmp_path)
    with pytest.raises(RunFailed, match="trainer ended with exit code 11") as failed:
        supervisor.run()
    fork_server.close()
    assert failed.value.exit_code == 11
    assert (tmp_path / "trainer").read_text() == "x"
    assert supervisor.pid("w0") is None


def test_an_interrupt_stops_the_roles_in_the_given_order(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def role(name: str) -> int:
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        with said.open("a") as file:
            file.write(f"{name} up\n")
        while not asked:
            time.sleep(0.01)
        with said.open("a") as file:
            file.write(f"{name} down\n")
        return 0

    sent: list[int] = []

    def interrupt_when_up() -> None:
        if not sent and said.exists() and said.read_text().count("up") == 3:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    fork_server = ForkServer(role)
    names = ("w0", "trainer", "orchestrator")
    finished = supervise(fork_server, *names, watch=interrupt_when_up, logs=tmp_path).run()
    fork_server.close()
    assert not finished
    assert said.read_text().split("\n")[3:6] == ["w0 down", "trainer down", "orchestrator down"]


def test_roles_that_end_for_good_at_once_end_the_run_and_not_the_supervisor(
    tmp_path: Path,
) -> None:
    go, dead = tmp_path / "go", [tmp_path / name for name in ("w0", "w1")]

    def role(name: str) -> int:
        until(go.exists)
        (tmp_path / name).touch()
        return 9

    fork_server = ForkServer(role)

    def watch() -> None:
        if all(supervisor.pid(name) is not None for name in ("w0", "w1")) and not go.exists():
            go.touch()
            until(lambda: all(path.exists() for path in dead))
            time.sleep(0.5)  # both ends are in the pipe before it is read again

    supervisor = supervise(fork_server, "w0", "w1", watch=watch, logs=tmp_path)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(int(WAIT_S))
    try:
        with pytest.raises(RunFailed) as raised:
            supervisor.run()
    finally:
        signal.alarm(0)
        fork_server.close()
    assert raised.value.exit_code == 9


def worker_that_ends_with(folder: Path, codes: dict[str, list[int]]) -> Callable[[str], int]:
    """Each start of a role ends with its next code; the last one stays."""

    def role(name: str) -> int:
        with (folder / name).open("a") as file:
            file.write("x")
        starts = len((folder / name).read_text())
        code = codes[name][min(starts, len(codes[name])) - 1]
        if code:
            (folder / f"{name}.log").write_text(f"error: {name} has no memory\n")
        elif name == "trainer":
            until((folder / "over").exists)
        return code

    return role


def test_worker_that_is_lost_for_good_costs_its_own_work_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"w0": [7], "w1": [9], "w2": [7, 7, 0], "trainer": [0]}
    fork_server = ForkServer(worker_that_ends_with(tmp_path, codes))

    def watch() -> None:
        ends = [tmp_path / name for name in ("w0", "w2")]
        if all(end.exists() and len(end.read_text()) == 3 for end in ends):
            (tmp_path / "over").touch()

    names = ("w0", "w1", "w2")
    supervisor = supervise(
        fork_server, *names, "trainer", watch=watch, logs=tmp_path, workers=Workers(names=names)
    )
    assert supervisor.run()
    fork_server.close()
    said = capsys.readouterr().err
    assert (tmp_path / "w1").read_text() == "x"
    assert "w1 ended with exit code 9: w1 has no memory; the run goes on without it" in said
    assert "w0 ended with exit code 7: w0 has no memory; starting it again in 0.2 s" in said
    assert "w0 ended with exit code 7: w0 has no memory; the run goes on without it" in said


def test_last_worker_that_is_lost_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    codes = {"w0": [9], "w1": [7], "trainer": [0]}
    fork_server = ForkServer(worker_that_ends_with(tmp_path, codes))
    workers = Workers(names=("w0", "w1"))
    supervisor = supervise(
        fork_server, "w0", "w1", "trainer", watch=lambda: None, logs=tmp_path, workers=workers
    )
    (tmp_path / "over").touch()
    with pytest.raises(RunFailed) as failed:
        supervisor.run()
    fork_server.close()
    assert failed.value.exit_code == 7
    assert failed.value.message == (
        "no worker is left that can host a version: w1 ended with exit code 7: w1 has no memory"
    )


def test_run_goes_on_while_somebody_else_has_workers(tmp_path: Path) -> None:
    fork_server = ForkServer(worker_that_ends_with(tmp_path, {"w0": [9], "trainer": [0]}))
    workers = Workers(names=("w0",), elsewhere=lambda: 1)
    (tmp_path / "over").touch()
    supervisor = supervise(
        fork_server, "w0", "trainer", watch=lambda: None, logs=tmp_path, workers=workers
    )
    assert supervisor.run()
    fork_server.close()


def test_worker_that_finds_the_log_broken_ends_the_run_at_once(tmp_path: Path) -> None:
    fork_server = ForkServer(
        worker_that_ends_with(tmp_path, {"w0": [5], "w1": [0], "trainer": [0]})
    )
    workers = Workers(names=("w0", "w1"), elsewhere=lambda: 1)
    supervisor = supervise(
        fork_server, "w0", "w1", "trainer", watch=lambda: None, logs=tmp_path, workers=workers
    )
    (tmp_path / "over").touch()
    with pytest.raises(RunFailed, match="w0 ended with exit code 5"):
        supervisor.run()
    fork_server.close()


def test_worker_that_never_hosts_is_given_up_however_slowly_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.supervisor.BACKOFF_MAX_S", 0.0)
    slow = Timing(restarts_max=3, restart_window_s=0.001, stop_timeout_s=5.0)
    hosted = {"w0": 0}
    fork_server = ForkServer(worker_that_ends_with(tmp_path, {"w0": [7]}))

    def watch() -> None:
        if (tmp_path / "w0").exists() and len((tmp_path / "w0").read_text()) == 4:
            hosted["w0"] = 1

    supervisor = Supervisor(
        {"w0": fork_server},
        stop_order=(("w0",),),
        timing=slow,
        logs=tmp_path,
        watch=watch,
        workers=Workers(names=("w0",), hosted=hosted.__getitem__),
    )
    with pytest.raises(RunFailed, match="no worker is left"):
        supervisor.run()
    fork_server.close()
    assert 4 <= len((tmp_path / "w0").read_text()) <= 8


def _too_long(*_: object) -> None:
    raise AssertionError("the supervisor waits for ends that it was told of")


SPY = """
import importlib, sys
import torch
asked = []
torch._C._cuda_getDeviceCount = torch._C._cuda_init = lambda: asked.append(1) or 0
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(len(asked) + torch.cuda.is_initialized())
"""
"""Imports what roles are forked from; the exit code is how often that asked CUDA for something."""


def test_what_roles_are_forked_from_starts_no_cuda() -> None:
    names = {*TRAINER_PRELOAD, *engine_kind("torch").preload}
    assert subprocess.run([sys.executable, "-c", SPY, *sorted(names)], check=False).returncode == 0


def test_question_for_a_gpu_starts_no_cuda_in_what_roles_are_forked_from() -> None:
    def answer(name: str) -> int:
        return int(os.environ[CUDA_BY_NVML[0]] != "1")

    fork_server = ForkServer(answer)
    fork_server.spawn("a")
    *_, ended = collect(fork_server, 2)
    assert isinstance(ended, Ended) and ended.code == 0
    fork_server.close()
