"""Tests of the import layers with planted violations."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.support.tidy import ROOT, module_imports

LINT_LIMIT_S = 120


def _lint(folder: Path) -> tuple[int, str]:
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
    linked = tmp_path / "dora_pipe"  # independent of the checkout's name and location
    linked.symlink_to(ROOT, target_is_directory=True)
    status, output = _lint(linked)
    assert status == 0, output
    assert "floors KEPT" in output


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("dora_pipe", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports["dora_pipe.audit.ledger"]) > 1
    TopologicalSorter(imports).prepare()  # its CycleError names the circle


def test_package_of_the_modules_on_several_floors_imports_nothing_itself() -> None:
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text())
    assert [*module_imports(tree)] == []
