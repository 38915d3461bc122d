"""Real processes: roles are started, started again and stopped in order by their supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from dora_pipe.config.model import Timing
from dora_pipe.launch.processes import RoleStart, start_process, start_role
from dora_pipe.launch.supervisor import WAITED_OUT, RunFailed, Supervisor, Workers
from tests.support.cluster import make_config
from tests.support.trainer_driver import run_started

WAIT_S = 60.0
TIMING = Timing(max_restarts=2, stop_timeout_s=5.0)


def until(done: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


Start = Callable[[str], subprocess.Popen[bytes]]

ROLE = """
import json, os, signal, sys, time
from pathlib import Path
folder, codes, waits, name = Path(sys.argv[1]), *map(json.loads, sys.argv[2:4]), sys.argv[4]
with (folder / name).open("a") as file:
    file.write("x")
if not codes:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with (folder / "said").open("a") as file:
        file.write(f"{name} up\\n")
    while not asked:
        time.sleep(0.01)
    with (folder / "said").open("a") as file:
        file.write(f"{name} down\\n")
    sys.exit()
starts = len((folder / name).read_text())
code = codes[name][min(starts, len(codes[name])) - 1]
if code:
    (folder / f"{name}.log").write_text(f"noise\\nerror: {name} has no memory\\nhint: run\\n")
if (wait := waits.get(name)) and wait["code"] == code:
    give_up_s = time.monotonic() + 60.0
    while not (folder / wait["file"]).exists():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
sys.exit(code)
"""


def ends_with(
    folder: Path, codes: dict[str, list[int]], waits: dict[str, tuple[int, str]] | None = None
) -> Start:
    waits = {"trainer": (0, "over"), **(waits or {})}
    files = {name: {"code": code, "file": file} for name, (code, file) in waits.items()}
    words = [sys.executable, "-ISc", ROLE, str(folder), json.dumps(codes), json.dumps(files)]
    return lambda name: subprocess.Popen([*words, name], start_new_session=True)


def supervise(
    start: Start,
    *names: str,
    logs: Path,
    watch: Callable[[], None] = lambda: None,
    workers: Workers | None = None,
    timing: Timing = TIMING,
    held_up: bool = False,
) -> Supervisor:
    return Supervisor(
        start,
        stop_order={name: (name,) for name in names},
        timing=timing,
        logs=logs,
        watch=watch,
        workers=workers,
        held_up=lambda: held_up,
    )


def starts(folder: Path, name: str) -> int:
    return len((folder / name).read_text()) if (folder / name).exists() else 0


MODULE = "dora_pipe.launch.processes"


def test_a_process_gets_its_message_and_its_output_is_in_the_log(tmp_path: Path) -> None:
    process = start_process("json.tool", b'{"a": 1}', tmp_path / "logs" / "w0.log")
    assert process.wait(WAIT_S) == 0
    assert json.loads((tmp_path / "logs" / "w0.log").read_text()) == {"a": 1}


def test_a_process_that_reads_late_holds_up_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    (tmp_path / "reads_late.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        f"end = time.monotonic() + {WAIT_S}\n"
        f"while not Path({str(go)!r}).exists() and time.monotonic() < end: time.sleep(0.01)\n"
        f"print(len(sys.stdin.read()) if Path({str(go)!r}).exists() else 'blocked')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start_process("reads_late", b"x" * 1_000_000, tmp_path / "w0.log")
    go.touch()
    assert process.wait(WAIT_S) == 0
    assert (tmp_path / "w0.log").read_text() == "1000000\n"


def test_a_role_that_ends_by_its_own_fault_leaves_the_traceback_in_its_log(tmp_path: Path) -> None:
    process = start_process(MODULE, b"no json", tmp_path / "w0.log")
    assert process.wait(WAIT_S) == 1
    log = (tmp_path / "w0.log").read_text()
    assert log.startswith("failed with an internal error\nTraceback"), log


@pytest.mark.parametrize("parent_pid", [1, 0])
def test_a_role_whose_parent_is_gone_does_not_begin(tmp_path: Path, parent_pid: int) -> None:
    start = RoleStart(
        name="w0",
        directory=str(tmp_path),
        config=make_config(),
        first=run_started(),
        parent_pid=parent_pid,
    )
    assert start_role(start).wait(WAIT_S) == 1
    assert (tmp_path / "logs" / "w0.log").read_text() == ""


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param({"role": [1, 1, 0]}, {"role": 3}, id="one that dies is started again"),
        pytest.param({"w0": [WAITED_OUT + 4, 0]}, {"w0": 2}, id="and a worker that waited long"),
        pytest.param({"w0": [9], "trainer": [0]}, {"w0": 1}, id="others have workers elsewhere"),
    ],
)
def test_a_run_ends_well_although_roles_died(
    tmp_path: Path, codes: dict[str, list[int]], expected: dict[str, int]
) -> None:
    (tmp_path / "over").touch()
    workers = Workers(names=("w0",), elsewhere=lambda: 1)
    assert supervise(ends_with(tmp_path, codes), *codes, logs=tmp_path, workers=workers).run()
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
            "no worker is left to serve a version: w1 ended with exit code 7",
            id="no worker is left",
        ),
        pytest.param(
            {"w0": [5], "w1": [0], "trainer": [0]}, ("w0", "w1"), 5, 1, "w0 ended", id="broken log"
        ),
    ],
)
def test_a_role_that_ends_for_good_fails_the_run_with_what_it_said_and_ends_the_others(
    tmp_path: Path,
    codes: dict[str, list[int]],
    workers: Collection[str],
    code: int,
    count: int,
    message: str,
) -> None:
    first = next(iter(codes))
    supervisor = supervise(
        ends_with(tmp_path, codes), *codes, logs=tmp_path, workers=Workers(names=workers)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.supervisor.BACKOFF_MAX_S", 0.01)
    often = [7] * (2 * TIMING.max_restarts + 1)
    role = ends_with(tmp_path, {"role": [*often, 0]})
    assert supervise(role, "role", logs=tmp_path, held_up=True).run()
    assert starts(tmp_path, "role") == len(often) + 1


def test_an_interrupt_stops_the_roles_in_the_given_order(tmp_path: Path) -> None:
    path = tmp_path / "said"

    sent: list[int] = []

    def interrupt_when_up() -> None:
        if not sent and path.exists() and path.read_text().count("up") == 3:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    names = ("w0", "trainer", "orchestrator")
    role = ends_with(tmp_path, {})
    assert not supervise(role, *names, watch=interrupt_when_up, logs=tmp_path).run()
    assert path.read_text().split("\n")[3:6] == ["w0 down", "trainer down", "orchestrator down"]


def test_roles_that_end_for_good_at_once_end_the_run_and_not_the_supervisor(tmp_path: Path) -> None:
    names = ("w0", "w1")
    role = ends_with(tmp_path, {"w0": [9], "w1": [9]}, {"w0": (9, "go"), "w1": (9, "go")})

    def watch() -> None:
        pids = [supervisor.pid(name) for name in names]
        (tmp_path / "go").touch()
        until(lambda: not any(pid is not None and alive(pid) for pid in pids))

    supervisor = supervise(role, "w0", "w1", watch=watch, logs=tmp_path)
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"w0": [7], "w1": [9], "w2": [7, 7, 0], "trainer": [0]}
    # w2 is what is left when w0 is given up
    role, over, heard = ends_with(tmp_path, codes, {"w2": (0, "over")}), tmp_path / "over", [""]

    def watch() -> None:
        heard.append(capsys.readouterr().err)
        if "w0 has no memory; the run continues without it" in "".join(heard):
            over.touch()

    workers = Workers(names=("w0", "w1", "w2"))
    assert supervise(role, *codes, watch=watch, logs=tmp_path, workers=workers).run()
    text = "".join([*heard, capsys.readouterr().err])
    assert starts(tmp_path, "w1") == 1
    assert "w1 ended with exit code 9: w1 has no memory; the run continues without it" in text
    assert "w0 ended with exit code 7: w0 has no memory; restarting it in 0.2 s" in text
    assert "w0 ended with exit code 7: w0 has no memory; the run continues without it" in text


def test_worker_that_never_hosts_is_given_up_however_slowly_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.supervisor.BACKOFF_MAX_S", 0.0)
    monkeypatch.setattr("dora_pipe.launch.supervisor.RESTART_WINDOW_S", 0.001)
    slow = Timing(max_restarts=3, stop_timeout_s=5.0)
    workers = Workers(names=("w0",), served=lambda name: int(starts(tmp_path, name) >= 4))
    role = ends_with(tmp_path, {"w0": [7]})
    supervisor = supervise(role, "w0", logs=tmp_path, workers=workers, timing=slow)
    with pytest.raises(RunFailed, match="no worker is left"):
        supervisor.run()
    assert 4 <= starts(tmp_path, "w0") <= 8
