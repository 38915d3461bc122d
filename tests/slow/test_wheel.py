"""The wheel, in an environment that holds the slim lock and nothing else, is the whole program."""

import re
import zipfile
from pathlib import Path

import pytest

from tests.support.recorded_run import RecordedRun
from tests.support.slim_commands import assert_written, lay_out
from tests.support.tidy import FOLDERS, INSTALLED, NOT_INSTALLED, files
from tests.support.wheel import build, install, run

DATA = re.compile(r"launch/templates/[^/]+\.toml$|observe/web/static/")
"""What is installed beside modules."""

pytestmark = [pytest.mark.slow, pytest.mark.pure]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for this file."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def slim(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment without torch."""
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


@pytest.mark.parametrize("words", ["bench codec", "sim paper"])
def test_benches_of_an_installed_wheel_say_where_they_are(
    slim: Path, tmp_path: Path, words: str
) -> None:
    line = f"{slim / 'dora-pipe'} {words} 2>&1"
    out = run(["sh", "-c", line], tmp_path, code=2)
    assert "error: benches are not installed" in out and "in a checkout" in out


def test_wheel_without_extras_audits_a_run_names_a_damage_and_shows_what_is_there(
    slim: Path, recorded: RecordedRun, tmp_path: Path
) -> None:
    for call in lay_out(recorded, tmp_path):
        out = run([str(slim / "dora-pipe"), *call.words], tmp_path, code=call.code)
        assert call.says in out, call.words
    assert_written(tmp_path)
