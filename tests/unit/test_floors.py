"""Imports go down only; a planted import that goes up, or touches chance, is found."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tidy import ROOT, module_imports

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


def test_imports_go_down_only(tmp_path: Path) -> None:
    linked = tmp_path / "dora_pipe"  # whatever the checkout is called, and wherever it lies
    linked.symlink_to(ROOT, target_is_directory=True)
    status, output = _lint(linked)
    assert status == 0, output
    assert "floors KEPT" in output


def test_package_of_the_modules_on_several_floors_imports_nothing_itself() -> None:
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text())
    assert [*module_imports(tree)] == []
