"""Real processes: the zygote forks roles, the supervisor starts them again, stops them in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.cli.roles import TRAINER_PRELOAD, WORKER_PRELOAD
from dora_pipe.cli.supervisor import RunFailed, Supervisor, how
from dora_pipe.cli.zygote import CUDA_BY_NVML, Ended, Report, Started, Zygote
from dora_pipe.config.model import Timing

WAIT_S = 20.0
TIMING = Timing(restarts_max=2, restart_window_s=60.0, stop_timeout_s=5.0)


def until(done: Callable[[], bool]) -> None:
    """Wait, boundedly, for something another process does."""
    give_up_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.01)


def collect(zygote: Zygote, count: int) -> list[Report]:
    reports: list[Report] = []

    def enough() -> bool:
        reports.extend(zygote.reports(0.05))
        return len(reports) >= count

    until(enough)
    return reports


def wait_for_signal(name: str) -> int:
    """A role that does nothing until a signal ends it."""
    signal.pause()
    return 0


def supervise(zygote: Zygote, *names: str, watch: Callable[[], None], logs: Path) -> Supervisor:
    return Supervisor(
        dict.fromkeys(names, zygote),
        stop_order=tuple((name,) for name in names),
        timing=TIMING,
        logs=logs,
        watch=watch,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_role_is_forked_under_its_name_and_its_exit_code_comes_back() -> None:
    zygote = Zygote(lambda name: {"good": 0, "bad": 9}[name])
    zygote.spawn("good")
    zygote.spawn("bad")
    reports = collect(zygote, 4)
    zygote.close()
    assert {one.name for one in reports if isinstance(one, Started)} == {"good", "bad"}
    assert {one.name: one.code for one in reports if isinstance(one, Ended)} == {
        "good": 0,
        "bad": 9,
    }


def test_a_killed_role_is_reported_with_its_signal() -> None:
    zygote = Zygote(wait_for_signal)
    zygote.spawn("w0")
    (started,) = collect(zygote, 1)
    os.kill(started.pid, signal.SIGKILL)
    (ended,) = collect(zygote, 1)
    zygote.close()
    assert isinstance(ended, Ended)
    assert ended.code == -signal.SIGKILL
    assert how(ended.code) == "was killed (SIGKILL)"


def test_a_role_finds_the_modules_that_the_zygote_imported() -> None:
    assert "wsgiref.validate" not in sys.modules
    zygote = Zygote(lambda name: 0 if name in sys.modules else 1, preload=("wsgiref.validate",))
    zygote.spawn("wsgiref.validate")
    codes = [one.code for one in collect(zygote, 2) if isinstance(one, Ended)]
    zygote.close()
    assert codes == [0]
    assert "wsgiref.validate" not in sys.modules


def test_no_role_outlives_the_supervisor() -> None:
    zygote = Zygote(wait_for_signal)
    zygote.spawn("w0")
    (started,) = collect(zygote, 1)
    zygote.close()
    assert not alive(started.pid)


def test_zygotes_end_one_by_one_although_the_later_was_forked_beside_the_earlier() -> None:
    first, second = Zygote(wait_for_signal), Zygote(wait_for_signal)
    first.close()
    assert not alive(first.pid)
    second.spawn("w0")
    (started,) = collect(second, 1)
    second.close()
    assert not alive(started.pid)


def test_no_role_outlives_a_zygote_that_is_killed() -> None:
    zygote = Zygote(wait_for_signal)
    zygote.spawn("w0")
    (started,) = collect(zygote, 1)
    os.kill(zygote.pid, signal.SIGKILL)
    until(lambda: not alive(started.pid))
    zygote.close()
    assert not alive(started.pid)


def test_a_role_that_dies_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        return 1 if len((tmp_path / name).read_text()) < 3 else 0

    zygote = Zygote(role)
    ended = supervise(zygote, "w0", watch=lambda: None, logs=tmp_path).run()
    zygote.close()
    assert ended
    assert (tmp_path / "w0").read_text() == "xxx"


def test_a_role_that_keeps_dying_fails_the_run_with_what_it_said(tmp_path: Path) -> None:
    def role(name: str) -> int:
        (tmp_path / f"{name}.log").write_text("noise\nerror: the disk is on fire\nhint: run\n")
        return 7

    zygote = Zygote(role)
    with pytest.raises(RunFailed, match="the disk is on fire") as failed:
        supervise(zygote, "w0", watch=lambda: None, logs=tmp_path).run()
    zygote.close()
    assert failed.value.exit_code == 7


def test_a_fatal_exit_code_is_not_tried_again_and_ends_the_others(tmp_path: Path) -> None:
    def role(name: str) -> int:
        with (tmp_path / name).open("a") as file:
            file.write("x")
        if name == "trainer":
            return 11
        signal.pause()
        return 0

    zygote = Zygote(role)
    supervisor = supervise(zygote, "trainer", "w0", watch=lambda: None, logs=tmp_path)
    with pytest.raises(RunFailed, match="trainer ended with exit code 11") as failed:
        supervisor.run()
    zygote.close()
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

    zygote = Zygote(role)
    names = ("w0", "trainer", "orchestrator")
    finished = supervise(zygote, *names, watch=interrupt_when_up, logs=tmp_path).run()
    zygote.close()
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

    zygote = Zygote(role)

    def watch() -> None:
        if all(supervisor.pid(name) is not None for name in ("w0", "w1")) and not go.exists():
            go.touch()
            until(lambda: all(path.exists() for path in dead))
            time.sleep(0.5)  # both ends are in the pipe before it is read again

    supervisor = supervise(zygote, "w0", "w1", watch=watch, logs=tmp_path)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(int(WAIT_S))
    try:
        with pytest.raises(RunFailed) as raised:
            supervisor.run()
    finally:
        signal.alarm(0)
        zygote.close()
    assert raised.value.exit_code == 9


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
    names = {*TRAINER_PRELOAD, *WORKER_PRELOAD["torch"]}
    assert subprocess.run([sys.executable, "-c", SPY, *sorted(names)], check=False).returncode == 0


def test_question_for_a_gpu_starts_no_cuda_in_what_roles_are_forked_from() -> None:
    def answer(name: str) -> int:
        return int(os.environ[CUDA_BY_NVML[0]] != "1")

    zygote = Zygote(answer)
    zygote.spawn("a")
    *_, ended = collect(zygote, 2)
    assert isinstance(ended, Ended) and ended.code == 0
    zygote.close()
