"""Real processes: roles are forked, started again and stopped in order by their supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from dora_pipe.config.model import Timing
from dora_pipe.launch.fork_server import CUDA_BY_NVML, Ended, ForkServer, Report, Started
from dora_pipe.launch.roles import TRAINER_PRELOAD
from dora_pipe.launch.supervisor import WAITED_OUT, RunFailed, Supervisor, Workers, how
from dora_pipe.producers.engines.registry import engine_kind

WAIT_S = 20.0
TIMING = Timing(restarts_max=2, restart_window_s=60.0, stop_timeout_s=5.0)


def until(done: Callable[[], bool]) -> None:
    """Wait, boundedly, for something another process does."""
    give_up_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Fork = Callable[..., ForkServer]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Makes fork servers, which are closed afterwards."""
    made: list[ForkServer] = []

    def make(role: Callable[[str], int], *, preload: tuple[str, ...] = ()) -> ForkServer:
        made.append(ForkServer(role, preload=preload))
        return made[-1]

    yield make
    for one in made:
        one.close()


def collect(fork_server: ForkServer, count: int, *names: str) -> list[Report]:
    """Reports, so many, after these roles were asked for."""
    for name in names:
        fork_server.spawn(name)
    reports: list[Report] = []

    def enough() -> bool:
        reports.extend(fork_server.reports(0.05))
        return len(reports) >= count

    until(enough)
    return reports


def codes_of(reports: list[Report]) -> dict[str, int]:
    return {one.name: one.code for one in reports if isinstance(one, Ended)}


def wait_for_signal(name: str) -> int:
    """A role that does nothing until a signal ends it."""
    signal.pause()
    return 0


def supervise(
    fork_server: ForkServer,
    *names: str,
    logs: Path,
    watch: Callable[[], None] = lambda: None,
    workers: Workers | None = None,
    timing: Timing = TIMING,
    held_up: bool = False,
) -> Supervisor:
    return Supervisor(
        dict.fromkeys(names, fork_server),
        stop_order=tuple((name,) for name in names),
        timing=timing,
        logs=logs,
        watch=watch,
        workers=workers,
        held_up=lambda: held_up,
    )


def ends_with(folder: Path, codes: dict[str, list[int]]) -> Callable[[str], int]:
    """Each start of a role ends with its next code, the last one again and again; a trainer that is
    to end well waits for the file `over`."""

    def role(name: str) -> int:
        with (folder / name).open("a") as file:
            file.write("x")
        code = codes[name][min(starts(folder, name), len(codes[name])) - 1]
        if code:
            (folder / f"{name}.log").write_text(f"noise\nerror: {name} has no memory\nhint: run\n")
        elif name == "trainer":
            until((folder / "over").exists)
        return code

    return role


def starts(folder: Path, name: str) -> int:
    return len((folder / name).read_text()) if (folder / name).exists() else 0


def test_a_role_is_forked_under_its_name_and_its_exit_code_comes_back(fork: Fork) -> None:
    reports = collect(fork(lambda name: {"good": 0, "bad": 9}[name]), 4, "good", "bad")
    assert {one.name for one in reports if isinstance(one, Started)} == {"good", "bad"}
    assert codes_of(reports) == {"good": 0, "bad": 9}


def test_a_killed_role_is_reported_with_its_signal(fork: Fork) -> None:
    fork_server = fork(wait_for_signal)
    (started,) = collect(fork_server, 1, "w0")
    os.kill(started.pid, signal.SIGKILL)
    assert codes_of(collect(fork_server, 1)) == {"w0": -signal.SIGKILL}
    assert how(-signal.SIGKILL) == "was killed (SIGKILL)"


def test_a_role_finds_the_modules_that_the_fork_server_imported(fork: Fork) -> None:
    name = "wsgiref.validate"
    assert name not in sys.modules
    fork_server = fork(lambda name: 0 if name in sys.modules else 1, preload=(name,))
    assert codes_of(collect(fork_server, 2, name)) == {name: 0}
    assert name not in sys.modules


def test_no_role_outlives_the_supervisor(fork: Fork) -> None:
    fork_server = fork(wait_for_signal)
    (started,) = collect(fork_server, 1, "w0")
    fork_server.close()
    assert not alive(started.pid)


def test_fork_servers_end_one_by_one_although_the_later_was_forked_beside_the_earlier(
    fork: Fork,
) -> None:
    first, second = fork(wait_for_signal), fork(wait_for_signal)
    first.close()
    assert not alive(first.pid)
    (started,) = collect(second, 1, "w0")
    second.close()
    assert not alive(started.pid)


def test_no_role_outlives_a_fork_server_that_is_killed(fork: Fork) -> None:
    fork_server = fork(wait_for_signal)
    (started,) = collect(fork_server, 1, "w0")
    os.kill(fork_server.pid, signal.SIGKILL)
    until(lambda: not alive(started.pid))
    assert not alive(started.pid)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param({"role": [1, 1, 0]}, {"role": 3}, id="one that dies is started again"),
        pytest.param({"w0": [WAITED_OUT + 4, 0]}, {"w0": 2}, id="and a worker that waited long"),
        pytest.param({"w0": [9], "trainer": [0]}, {"w0": 1}, id="others have workers elsewhere"),
    ],
)
def test_a_run_ends_well_although_roles_died(
    tmp_path: Path, fork: Fork, codes: dict[str, list[int]], expected: dict[str, int]
) -> None:
    (tmp_path / "over").touch()
    workers = Workers(names=("w0",), elsewhere=lambda: 1)
    assert supervise(fork(ends_with(tmp_path, codes)), *codes, logs=tmp_path, workers=workers).run()
    assert {name: starts(tmp_path, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("codes", "workers", "code", "count", "message"),
    [
        pytest.param({"role": [7]}, (), 7, 3, "role ended with exit code 7", id="keeps dying"),
        pytest.param({"role": [11], "trainer": [0]}, (), 11, 1, "role ended with", id="fatal"),
        *(
            pytest.param({"role": [WAITED_OUT + code]}, (), code, 1, "role ended", id="waited long")
            for code in (4, 7)
        ),
        pytest.param(
            {"w1": [7], "w0": [9], "trainer": [0]},
            ("w0", "w1"),
            7,
            3,
            "no worker is left that can host a version: w1 ended with exit code 7",
            id="no worker is left",
        ),
        pytest.param(
            {"w0": [5], "w1": [0], "trainer": [0]}, ("w0", "w1"), 5, 1, "w0 ended", id="broken log"
        ),
    ],
)
def test_a_role_that_ends_for_good_fails_the_run_with_what_it_said_and_ends_the_others(
    tmp_path: Path,
    fork: Fork,
    codes: dict[str, list[int]],
    workers: Collection[str],
    code: int,
    count: int,
    message: str,
) -> None:
    """The first role of `codes` is the one that is started so often, and then fails the run."""
    first = next(iter(codes))
    supervisor = supervise(
        fork(ends_with(tmp_path, codes)), *codes, logs=tmp_path, workers=Workers(names=workers)
    )
    with pytest.raises(RunFailed) as failed:
        supervisor.run()
    assert failed.value.exit_code == code
    assert failed.value.message.startswith(message)
    assert failed.value.message.endswith(f": {first} has no memory")
    assert failed.value.hint == f"run; see {tmp_path / first}.log"
    assert starts(tmp_path, first) == count
    assert [supervisor.pid(name) for name in codes] == [None] * len(codes)


def test_starts_do_not_count_while_the_run_is_held_up_from_outside(
    tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.supervisor.BACKOFF_MAX_S", 0.01)
    often = [7] * (2 * TIMING.restarts_max + 1)
    role = ends_with(tmp_path, {"role": [*often, 0]})
    assert supervise(fork(role), "role", logs=tmp_path, held_up=True).run()
    assert starts(tmp_path, "role") == len(often) + 1


def test_an_interrupt_stops_the_roles_in_the_given_order(tmp_path: Path, fork: Fork) -> None:
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

    names = ("w0", "trainer", "orchestrator")
    assert not supervise(fork(role), *names, watch=interrupt_when_up, logs=tmp_path).run()
    assert said.read_text().split("\n")[3:6] == ["w0 down", "trainer down", "orchestrator down"]


def test_roles_that_end_for_good_at_once_end_the_run_and_not_the_supervisor(
    tmp_path: Path, fork: Fork
) -> None:
    go, dead = tmp_path / "go", [tmp_path / name for name in ("w0", "w1")]

    def role(name: str) -> int:
        until(go.exists)
        (tmp_path / name).touch()
        return 9

    def watch() -> None:
        if all(supervisor.pid(name) is not None for name in ("w0", "w1")) and not go.exists():
            go.touch()
            until(lambda: all(path.exists() for path in dead))
            time.sleep(0.5)  # both ends are in the socket before it is read again

    supervisor = supervise(fork(role), "w0", "w1", watch=watch, logs=tmp_path)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(int(WAIT_S))
    try:
        with pytest.raises(RunFailed) as raised:
            supervisor.run()
    finally:
        signal.alarm(0)
    assert raised.value.exit_code == 9


def _too_long(*_: object) -> None:
    raise AssertionError("the supervisor waits for ends that it was told of")


def test_worker_that_is_lost_for_good_costs_its_own_work_alone(
    tmp_path: Path, fork: Fork, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"w0": [7], "w1": [9], "w2": [7, 7, 0], "trainer": [0]}
    ends, over, heard = ends_with(tmp_path, codes), tmp_path / "over", [""]

    def role(name: str) -> int:
        code = ends(name)
        if name == "w2" and not code:
            until(over.exists)  # it is what is left when w0 is given up
        return code

    def watch() -> None:
        heard.append(capsys.readouterr().err)
        if "w0 has no memory; the run goes on without it" in "".join(heard):
            over.touch()

    workers = Workers(names=("w0", "w1", "w2"))
    assert supervise(fork(role), *codes, watch=watch, logs=tmp_path, workers=workers).run()
    said = "".join([*heard, capsys.readouterr().err])
    assert starts(tmp_path, "w1") == 1
    assert "w1 ended with exit code 9: w1 has no memory; the run goes on without it" in said
    assert "w0 ended with exit code 7: w0 has no memory; starting it again in 0.2 s" in said
    assert "w0 ended with exit code 7: w0 has no memory; the run goes on without it" in said


def test_worker_that_never_hosts_is_given_up_however_slowly_it_fails(
    tmp_path: Path, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.supervisor.BACKOFF_MAX_S", 0.0)
    slow = Timing(restarts_max=3, restart_window_s=0.001, stop_timeout_s=5.0)
    workers = Workers(names=("w0",), hosted=lambda name: int(starts(tmp_path, name) >= 4))
    role = ends_with(tmp_path, {"w0": [7]})
    supervisor = supervise(fork(role), "w0", logs=tmp_path, workers=workers, timing=slow)
    with pytest.raises(RunFailed, match="no worker is left"):
        supervisor.run()
    assert 4 <= starts(tmp_path, "w0") <= 8


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


def test_question_for_a_gpu_starts_no_cuda_in_what_roles_are_forked_from(fork: Fork) -> None:
    fork_server = fork(lambda name: int(os.environ[CUDA_BY_NVML[0]] != "1"))
    assert codes_of(collect(fork_server, 2, "a")) == {"a": 0}
