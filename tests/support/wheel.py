"""Builds the wheel as a user would get it and installs it where nothing else is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.tidy import ROOT, files

BIN = Path(sys.executable).parent
BUILD_LIMIT_S = 300


def build(folder: Path) -> Path:
    """The wheel made from the sdist made from the tree; the tree itself stays as it is."""
    source = folder / "source"
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    python = ["-p", sys.executable]
    run([str(BIN / "uv"), "build", "-q", "--no-build-isolation", *python, str(source)], folder)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The `bin` folder of a fresh environment with the slim lock and this wheel, no extras."""
    uv, environment = str(BIN / "uv"), folder / "environment"
    run([uv, "venv", "-q", "-p", sys.executable, str(environment)], folder)
    python = ["-p", str(environment / "bin" / "python")]
    slim = str(ROOT / "requirements" / "slim.txt")
    run([uv, "pip", "install", "-q", *python, "--require-hashes", "-r", slim], folder)
    run([uv, "pip", "install", "-q", *python, "--no-deps", str(wheel)], folder)
    return environment / "bin"


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
    """Output of the command, run in that folder without the tests' own environment.

    Asserts its exit code.
    """
    ours = ("PYTHON", "VIRTUAL_ENV", "COVERAGE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert done.returncode == code, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout
