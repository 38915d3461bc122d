"""Commands from the documentation, run as a reader would."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tests.support.tidy import ROOT

LIMIT_S = 120


def commands(page: str, word: str) -> list[str]:
    found: list[str] = []
    for block in re.findall(r"^ *```console\n(.*?)^ *```$", (ROOT / page).read_text(), re.M | re.S):
        if word in block:  # Blocks in lists are indented.
            found += re.findall(r"^\$ (.*(?:\n(?!\$ ).*)*)", textwrap.dedent(block), re.M)
    assert found, f"{page} has no console block with {word}"
    return found


def run(command: str, folder: Path, replaced: Mapping[str, str], path: str) -> str:
    for old, new in replaced.items():
        command = command.replace(old, new)
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
