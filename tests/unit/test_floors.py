"""Imports go down only; a planted import that goes up, or touches chance, is found."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tidy import FOLDERS, ROOT, module_imports

LINT_LIMIT_S = 120


def _lint(folder: Path) -> tuple[int, str]:
    """Exit status and output of import-linter on the package in this folder."""
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    code = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LINT_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree's source in a folder of its own, called as the package is."""
    place = tmp_path / "dora_pipe"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, place)
    return place


def test_imports_go_down_only(tmp_path: Path) -> None:
    linked = tmp_path / "dora_pipe"  # whatever the checkout is called, and wherever it lies
    linked.symlink_to(ROOT, target_is_directory=True)
    status, output = _lint(linked)
    assert status == 0, output
    assert "floors KEPT" in output


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("schemas/planted.py", "import dora_pipe.bus", "floors"),
        ("producers/planted.py", "import dora_pipe.cli", "floors"),
        ("producers/planted.py", "import dora_pipe.orchestrator", "floors"),
        ("consumers/planted.py", "from dora_pipe import producers", "floors"),
        ("bus/planted.py", "import dora_pipe.audit", "floors"),
        ("planted.py", "x = 1", "floors"),
        ("core/planted.py", "x = 1", "floors of core"),
        ("core/clock.py", "import dora_pipe.config", "floors"),
        ("core/errors.py", "import dora_pipe.schemas", "floors"),
        ("core/errors.py", "import dora_pipe.core.clock", "floors"),
        ("core/retry.py", "import dora_pipe.core.runtime", "floors of core"),
        ("bus/planted.py", "import dora_pipe.core.retry", "floors"),
        ("store/planted.py", "import dora_pipe.core.runtime", "floors"),
        ("schemas/planted.py", "import random", "pure core"),
        ("schemas/planted.py", "from asyncio import sleep", "pure core"),
        ("orchestrator/planted.py", "import dora_pipe.core.clock", "pure core"),
        ("orchestrator/planted.py", "import time", "pure core"),
    ],
)
def test_planted_import_is_found(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / module).open("a") as file:
        file.write(f'"""Planted by a test of the floors."""\n\n{line}\n')
    status, output = _lint(copy)
    assert status != 0, output
    broken = {row.partition(" BROKEN")[0] for row in output.splitlines() if " BROKEN" in row}
    assert any(contract in row for row in broken), output
    assert Path(module).stem in output


def test_package_of_the_modules_on_several_floors_imports_nothing_itself() -> None:
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text())
    assert [*module_imports(tree)] == []
