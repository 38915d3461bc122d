"""The wheel, in an environment that holds the slim lock and nothing else, is the whole program."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.recorded_run import RecordedRun
from tests.support.slim_commands import assert_written, lay_out
from tests.support.tidy import FOLDERS, INSTALLED, NOT_INSTALLED, ROOT, files

BIN = Path(sys.executable).parent
BUILD_LIMIT_S = 300

DATA = re.compile(r"config/basic\.toml$|launch/templates/[^/]+\.toml$|observe/web/static/")
"""What is installed beside modules."""

pytestmark = [pytest.mark.slow, pytest.mark.pure]


def build(folder: Path) -> Path:
    source = folder / "source"
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    python = ["-p", sys.executable]
    run([str(BIN / "uv"), "build", "-q", "--no-build-isolation", *python, str(source)], folder)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    uv, environment = str(BIN / "uv"), folder / "environment"
    run([uv, "venv", "-q", "-p", sys.executable, str(environment)], folder)
    python = ["-p", str(environment / "bin" / "python")]
    slim = str(ROOT / "requirements" / "slim.txt")
    run([uv, "pip", "install", "-q", *python, "--require-hashes", "-r", slim], folder)
    run([uv, "pip", "install", "-q", *python, "--no-deps", str(wheel)], folder)
    return environment / "bin"


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def slim(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("slim"))


def test_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p) for p in files(".py") if p.parts[0] in (*INSTALLED, "__init__.py")}
    data = {"py.typed", *(str(p) for p in files() if DATA.match(str(p)))}
    installed = {name for name in held if ".dist-info/" not in name}
    assert installed == {f"dora_pipe/{path}" for path in modules | data}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    roots = {name.split("/")[0] for name in held}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"dora_pipe"}


def test_environment_without_extras_has_no_torch_and_no_folder_under_its_bare_name(
    slim: Path, tmp_path: Path
) -> None:
    names = (
        "torch",
        *FOLDERS,
        *NOT_INSTALLED,
        "dora_pipe.bench",
        "dora_pipe.tests",
        "dora_pipe.infra",
        "dora_pipe.observe.web",
    )
    code = f"from importlib.util import find_spec as f; print(*[m for m in {names} if f(m)])"
    assert run([str(slim / "python"), "-c", code], tmp_path) == "dora_pipe.observe.web\n"


def test_command_line_runs_without_extras(slim: Path, tmp_path: Path) -> None:
    assert "Usage" in run([str(slim / "dora-pipe"), "--help"], tmp_path)


def test_wheel_without_extras_audits_a_run_names_a_damage_and_shows_what_is_there(
    slim: Path, recorded: RecordedRun, tmp_path: Path
) -> None:
    for call in lay_out(recorded, tmp_path):
        out = run([str(slim / "dora-pipe"), *call.words], tmp_path, code=call.code)
        assert call.says in out, call.words
    assert_written(tmp_path)
