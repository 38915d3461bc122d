"""Imports go down only; a planted import that goes up, or touches chance, is found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tidy import FOLDERS, ROOT

LINT_LIMIT_S = 120


def _lint(folder: Path) -> tuple[int, str]:
    """Exit status and output of import-linter on the tree in this folder."""
    code = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=LINT_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree's source in a folder of its own, links and all."""
    for folder in (*FOLDERS, "dora_pipe"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_go_down_only() -> None:
    status, output = _lint(ROOT)
    assert status == 0, output
    assert "floors KEPT" in output


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("schemas/planted.py", "import dora_pipe.bus", "floors"),
        ("producers/planted.py", "import dora_pipe.cli", "floors"),
        ("producers/planted.py", "import dora_pipe.orchestrator", "floors"),
        ("consumers/planted.py", "from dora_pipe import producers", "floors"),
        ("dora_pipe/bus/planted.py", "import dora_pipe.history", "floors"),
        ("dora_pipe/planted.py", "x = 1", "floors"),
        ("schemas/planted.py", "import random", "pure core"),
        ("schemas/planted.py", "from asyncio import sleep", "pure core"),
        ("orchestrator/planted.py", "import dora_pipe.clock", "pure core"),
        ("orchestrator/planted.py", "import time", "pure core"),
    ],
)
def test_planted_import_is_found(copy: Path, module: str, line: str, contract: str) -> None:
    (copy / module).write_text(f'"""Planted by a test of the floors."""\n\n{line}\n')
    status, output = _lint(copy)
    assert status != 0, output
    broken = [row for row in output.splitlines() if " BROKEN" in row]
    named = any(contract in row for row in broken)
    assert named or (contract == "floors" and "dora_pipe.planted" in output), output
    assert "planted" in output
