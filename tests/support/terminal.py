"""Runs a command in a pseudo-terminal of a given size, and says what it wrote there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMIT_S = 60.0
READ_BYTES = 65536

ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")
OUT = "import sys; sys.argv[0] = 'dora-pipe'; from dora_pipe.cli.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a terminal was sent, and how the command ended."""

    code: int
    text: str

    @property
    def rows(self) -> list[str]:
        """Lines without escapes and without blanks at their ends."""
        return [line.rstrip() for line in ESCAPE.sub("", self.text).replace("\r", "").split("\n")]


def environment(**more: str) -> dict[str, str]:
    """This process's, without what speaks of another terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}


def in_terminal(
    words: Sequence[object],
    *,
    columns: int,
    rows: int,
    interrupt_at: str = "",
    env: Mapping[str, str] | None = None,
) -> Shown:
    """`dora-pipe` with these words; Ctrl-C is pressed when `interrupt_at` was shown."""
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", OUT, *map(str, words)],
        stdin=there,
        stdout=there,
        stderr=there,
        env=dict(env or environment()),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(there)
    try:
        text = _read(here, interrupt_at)
        return Shown(code=child.wait(LIMIT_S), text=text)
    finally:
        child.kill()
        child.wait()
        os.close(here)


def _read(terminal: int, interrupt_at: str) -> str:
    """Everything up to the end of the command."""
    found, pressed, until = b"", not interrupt_at, time.monotonic() + LIMIT_S
    while True:
        left_s = until - time.monotonic()
        assert left_s > 0, f"not done within {LIMIT_S} s: {found[-2000:]!r}"
        if not select.select([terminal], [], [], left_s)[0]:
            continue
        try:
            piece = os.read(terminal, READ_BYTES)
        except OSError:  # What Linux says when the other end is closed.
            piece = b""
        if not piece:
            return found.decode("utf-8", "replace")
        found += piece
        if not pressed and interrupt_at in ESCAPE.sub("", found.decode("utf-8", "replace")):
            os.write(terminal, b"\x03")
            pressed = True
