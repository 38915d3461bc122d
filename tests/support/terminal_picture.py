"""SVG picture of a command's output on a terminal of 100 columns.

python -m tests.support.terminal_picture docs/images/show.svg dora-pipe show demo
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def picture(words: list[str]) -> str:
    os.environ.update(COLUMNS=str(COLUMNS), LINES="40", TERM="xterm-256color")
    printed = bytearray()

    def read(terminal: int) -> bytes:
        piece = os.read(terminal, 1 << 16)
        printed.extend(piece)
        return piece

    pty.spawn(words, read)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(f"$ {shlex.join(words)}")
    console.print(Text.from_ansi(printed.decode().replace("\r\n", "\n").rstrip()))
    drawn = console.export_svg(title="dora-pipe", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # fonts of another server


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.argv[2:]))
