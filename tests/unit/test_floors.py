"""Imports go down only; a planted import that goes up, or touches chance, is found."""

import ast
import os
import re
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


PURE = "the pure core touches no clock, no chance, no loop, no bus"
PLANTED = [
    ("schemas/planted.py", "import dora_pipe.bus", "floors"),
    ("producers/planted.py", "import dora_pipe.cli", "floors"),
    ("producers/planted.py", "import dora_pipe.orchestrator", "floors"),
    ("consumers/planted.py", "from dora_pipe import producers", "floors"),
    ("bus/planted.py", "import dora_pipe.audit", "floors"),
    ("core/clock.py", "import dora_pipe.config", "floors"),
    ("core/errors.py", "import dora_pipe.schemas", "floors"),
    ("core/errors.py", "import dora_pipe.core.clock", "floors"),
    ("core/retry.py", "import dora_pipe.core.runtime", "floors of core"),
    ("bus/planted.py", "import dora_pipe.core.retry", "floors"),
    ("store/planted.py", "import dora_pipe.core.runtime", "floors"),
    ("schemas/planted.py", "import random", PURE),
    ("schemas/planted.py", "from asyncio import sleep", PURE),
    ("orchestrator/planted.py", "import dora_pipe.core.clock", PURE),
    ("orchestrator/planted.py", "import time", PURE),
]


def _module(path: str) -> str:
    return ".".join(("dora_pipe", *Path(path).with_suffix("").parts))


def test_planted_imports_are_found_each_by_its_contract(copy: Path) -> None:
    for path, line, _ in PLANTED:
        with (copy / path).open("a") as file:
            file.write(f"\n{line}\n")
    status, output = _lint(copy)
    assert status != 0, output
    sections = _broken(output)
    for path, line, contract in PLANTED:
        words = line.split()
        imported = f"dora_pipe.{words[3]}" if words[1] == "dora_pipe" else words[1]
        said = f"{_module(path)} -> {imported} "
        assert said in sections[contract], output


@pytest.mark.parametrize(
    ("path", "contract"), [("planted.py", "floors"), ("core/planted.py", "floors of core")]
)
def test_module_on_no_floor_is_found(copy: Path, path: str, contract: str) -> None:
    (copy / path).write_text("x = 1\n")
    _, output = _lint(copy)
    assert f"- {_module(path)}\n" in _broken(output)[contract]


def _broken(output: str) -> dict[str, str]:
    """What is said of each contract that does not hold, by its name."""
    _, _, said = output.partition("Broken contracts\n")
    found = re.split(r"^(.+)\n-+\n", said, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_package_of_the_modules_on_several_floors_imports_nothing_itself() -> None:
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text())
    assert [*module_imports(tree)] == []
