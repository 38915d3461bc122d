"""Calls of Linux's C library. Needs the standard library only, and is also a program:

python -I -S linux.py PARENT COMMAND...    run a command that is killed when PARENT dies
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1, 2, 4, 0x4000, 0x40000
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
"""Opened before any fork."""


def die_with(parent_pid: int) -> None:
    """Be killed when the parent dies. Linux only; elsewhere children watch a pipe."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the call


def dying(command: Sequence[str]) -> list[str]:
    """Return a command that is killed when this process dies (Linux)."""
    if sys.platform != "linux":
        return [*command]
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    _LIBC.prctl(option, value, 0, 0, 0)


def unshare(flags: int) -> None:
    """Enter new namespaces. Raises OSError."""
    _check(_LIBC.unshare(flags), "unshare")


def mount(kind: str, path: str, flags: int, options: str) -> None:
    """Call mount(2). Raises OSError."""
    result = _LIBC.mount(b"none", path.encode(), kind.encode(), flags, options.encode())
    _check(result, f"mount {path}")


def make_read_only() -> None:
    """Make all mounts read-only. Raises OSError."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID, 0, 0, 0)  # attr_set, clr, ...
    size = ctypes.sizeof(attributes)
    result = _LIBC.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size
    )
    _check(result, "mount_setattr")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
