"""Runner of untrusted programs with limits.

If the kernel allows, each program has namespaces for users, mounts, processes, network and IPC: a
read-only file system, empty /proc, /run and /tmp, loopback only. Its descendants end with it.
Otherwise only the limits on time, memory, files and processes apply. A program can read what its
user can read.

Runs without site-packages: ``python -I -S sandbox.py < ORDER``, with one JSON object each way
(`Order`, and a list of `Ended`). It dies with its parent process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypedDict

if __name__ == "__main__":  # the package is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2] / "core" / "system"))
    linux = import_module("linux")
else:
    from dora_pipe.core.system import linux

INNER_ID: Final = 1000
"""User and group inside; exec as non-root drops the namespace's capabilities."""

HIDDEN: Final = ("/proc", "/run", "/tmp", "/var/tmp", "/dev/shm")
"""Folders emptied inside, unless Python is installed there."""

LOOK_FIRST_S, LOOK_MAX_S = 0.002, 0.03

ROUNDS_MAX: Final = 200

ROOM: Final = 4
"""Size of the temporary file system, as a multiple of the largest file."""

BESIDE: Final = 2

OUTPUT_BYTES_MAX: Final = 8 << 20


class Program(TypedDict):
    """Python arguments of a program, and its input."""

    arguments: list[str]
    stdin: str


class Order(TypedDict):
    """Programs and limits; `stop`: stop after the first failure."""

    runs: list[Program]
    files: dict[str, str]
    isolate: bool
    stop: bool
    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    processes: int


class Ended(TypedDict):
    """Result: `status` is the exit status or -signal, None beyond a limit or without a start."""

    status: int | None
    output: str
    isolated: bool


def enter_namespaces() -> None:
    """Enter new namespaces; the next child is their first process. Raises OSError if the kernel
    or container forbids it."""
    user, group = os.getuid(), os.getgid()
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID
    linux.unshare(flags | linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_ID} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_ID} {group} 1")


def hide_files(directory: str, room_bytes: int) -> None:
    """Make all read-only, `directory` an empty writable memory file system, and `HIDDEN` empty."""
    linux.mount("", "/", linux.MS_REC | linux.MS_PRIVATE, "")
    linux.make_read_only()
    needed = (sys.base_prefix, sys.prefix, sys.executable)
    hidden = [
        path
        for path in HIDDEN
        if Path(path).is_dir()
        and not any(needed_path.startswith(f"{path}/") for needed_path in needed)
    ]
    writable = next((path for path in hidden if directory.startswith(f"{path}/")), directory)
    for path in hidden:
        if path != writable:
            linux.mount(
                "tmpfs", path, linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, "size=4k"
            )
    linux.mount("tmpfs", writable, linux.MS_NOSUID | linux.MS_NODEV, f"size={room_bytes},mode=700")
    Path(directory).mkdir(parents=True, exist_ok=True)


def limit(order: Order, *, isolated: bool) -> None:
    for what, bound in (
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (bound, bound))
    if isolated:  # Without a namespace it counts the user's other processes.
        resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"] + BESIDE,) * 2)


def run(order: Order, program: Program, directory: str, end: float) -> Ended:
    """Run a program until it ends or reaches a limit."""
    given, output = os.memfd_create("input"), os.memfd_create("output")
    os.write(given, program["stdin"].encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    status_pipe, tell = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _between(order, program, directory, parent, (given, output), tell)
        os._exit(127)
    os.close(tell)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)
    try:
        in_time = _wait(child, order["processes"], end)
    finally:
        kill(child)
    words = os.read(status_pipe, 100).decode().split()
    size = min(os.fstat(output).st_size, OUTPUT_BYTES_MAX)
    text = os.pread(output, size, 0).decode(errors="replace")
    for number in (status_pipe, output, given):
        os.close(number)
    status = int(words[1]) if in_time and len(words) == 2 else None
    return {"status": status, "output": text, "isolated": words[:1] == ["alone"]}


def _between(
    order: Order,
    order_program: Program,
    directory: str,
    parent: int,
    pipes: tuple[int, int],
    tell: int,
) -> None:
    linux.die_with(parent)
    os.setpgid(0, 0)
    isolated = order["isolate"]
    if isolated:  # Fully isolated, or the program does not start.
        enter_namespaces()
        hide_files(directory, order["file_bytes"] * ROOM)
    os.write(tell, b"alone " if isolated else b"among ")
    for name, text in order["files"].items():
        (Path(directory) / name).write_text(text, errors="replace")
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    # First process of the namespace: signals do not end it, and its end kills all others.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    program = os.fork()
    if program == 0:
        _become(order, order_program, directory, pipes, isolated=isolated)
    _, status = os.waitpid(program, 0)
    os.write(tell, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(
    order: Order, program: Program, directory: str, pipes: tuple[int, int], *, isolated: bool
) -> None:
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    os.chdir(directory)
    for number, what in enumerate((*pipes, os.open(os.devnull, os.O_WRONLY))):
        os.dup2(what, number)
    limit(order, isolated=isolated)
    environment = {
        "HOME": directory,
        "TMPDIR": directory,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    os.execve(
        sys.executable, [sys.executable, "-s", "-P", "-B", *program["arguments"]], environment
    )


def _wait(child: int, processes: int, end: float) -> bool:
    pause = LOOK_FIRST_S
    most = processes + BESIDE
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end or len(descendants(child, most + 1)) > most:
            return False
        time.sleep(pause)
        pause = min(LOOK_MAX_S, pause * 1.5)
    return True


def descendants(process: int, most: int) -> list[int]:
    processes: list[int] = []
    look = [process]
    while look and len(processes) < most:
        process_id = look.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{process_id}/task").iterdir():
                below = [int(word) for word in (task / "children").read_text().split()]
                processes += below
                look += below
    return processes


def kill(child: int) -> None:
    """Kill the remaining processes of a program, which are reparented to us."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    for _ in range(ROUNDS_MAX):
        for descendant in descendants(os.getpid(), 10_000):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_FIRST_S)


def main() -> None:
    linux.die_with(int(sys.argv[1]))
    directory = sys.argv[2]
    order: Order = json.load(sys.stdin)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    end = time.monotonic() + order["wall_s"]
    ended: list[Any] = []
    for program in order["runs"]:
        ended.append(run(order, program, directory, end))
        if ended[-1]["status"] is None or (order["stop"] and ended[-1]["status"] != 0):
            break
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main()
