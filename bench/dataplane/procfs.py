"""CPU time of other processes, asked of the kernel; decides which one is a broker by its port."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
_STATE, _INODE, _LOCAL = 3, 9, 1
"""Columns of /proc/net/tcp."""

_OWN: Final = (11, 12)
_WAITED_FOR: Final = (13, 14)
"""Columns of /proc/PID/stat behind the name: user and system time, of it and of its children."""

_PROC: Final = Path("/proc")


def listener_of(port: int, proc: Path = _PROC) -> int | None:
    """The process that listens on a TCP port here; None if none does that we may look into."""
    inodes = {
        columns[_INODE]
        for name in ("tcp", "tcp6")
        for columns in _rows(proc / "net" / name)
        if columns[_STATE] == _LISTENS and int(columns[_LOCAL].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir() if wanted else ():
        if folder.name.isdigit() and wanted & _open_files(folder):
            return int(folder.name)
    return None


def cpu_s(pid: int, proc: Path = _PROC) -> float:
    """CPU seconds of a process and its threads so far; 0 when it is gone."""
    return _seconds(pid, proc, _OWN)


def tree_cpu_s(pid: int, proc: Path = _PROC) -> float:
    """CPU seconds of a process and of its children, those that have ended among them."""
    try:
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return 0.0
    living_s = sum(cpu_s(int(child), proc) for child in children)
    return living_s + _seconds(pid, proc, _OWN + _WAITED_FOR)


def _seconds(pid: int, proc: Path, wanted: Sequence[int]) -> float:
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    columns = text.rpartition(")")[2].split()  # its name may hold blanks
    return sum(int(columns[one]) for one in wanted) / os.sysconf("SC_CLK_TCK")


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []


def _open_files(folder: Path) -> set[str]:
    found = set()
    try:
        for one in (folder / "fd").iterdir():
            found.add(str(one.readlink()))
    except OSError:
        return found  # it has ended meanwhile, or is somebody else's
    return found
