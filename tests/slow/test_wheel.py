"""The wheel, in an environment that holds the slim lock and nothing else, is the whole program."""

import zipfile
from pathlib import Path

import pytest

from tests.support.recorded_run import RecordedRun, recorded_in
from tests.support.slim_commands import assert_written, lay_out
from tests.support.tidy import FOLDERS, files
from tests.support.wheel import build, install, run

pytestmark = [pytest.mark.slow, pytest.mark.pure]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for this file."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def slim(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment without torch."""
    return install(wheel, tmp_path_factory.mktemp("slim"))


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


def test_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p) for p in files(".py") if p.parts[0] in (*FOLDERS, "dora_pipe")}
    wanted = {m if m.startswith("dora_pipe/") else f"dora_pipe/{m}" for m in modules}
    assert wanted <= held, sorted(wanted - held)
    assert "dora_pipe/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    roots = {name.split("/")[0] for name in held}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"dora_pipe"}


def test_environment_without_extras_has_no_torch(slim: Path, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec as f; print(f('torch'), f('schemas'), f('cli'))"
    assert run([str(slim / "python"), "-c", code], tmp_path) == "None None None\n"


def test_command_line_runs_without_extras(slim: Path, tmp_path: Path) -> None:
    assert "Usage" in run([str(slim / "dora-pipe"), "--help"], tmp_path)


def test_wheel_without_extras_audits_a_run_names_a_damage_and_shows_what_is_there(
    slim: Path, recorded: RecordedRun, tmp_path: Path
) -> None:
    for call in lay_out(recorded, tmp_path):
        out = run([str(slim / "dora-pipe"), *call.words], tmp_path, code=call.code)
        assert call.says in out, call.words
    assert_written(tmp_path)
