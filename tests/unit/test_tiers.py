"""A test that cannot run here says so in one line, and in CI it fails instead."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_runtest_setup
from tests.support import device, slow_tier
from tests.support.device import NO_GPU, has_gpu
from tests.support.gpu import ROUNDS
from tests.support.slow_tier import ALONE, AUTOGROUP, LAST, PAIRED, PURE, exit_code, stand_back
from tests.support.tidy import ROOT, files

BROKER_TESTS = "tests/integration/test_kafka_broker.py"
LIMIT_S = 300


def _pytest(*arguments: str, path: str, ci: bool, **more: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "CI"))}
    environment |= {"PATH": path, "NO_COLOR": "1"} | ({"CI": "true"} if ci else {}) | more
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def test_broker_tests_are_skipped_with_one_line_where_java_is_missing(tmp_path: Path) -> None:
    status, output = _pytest(BROKER_TESTS, path=str(tmp_path), ci=False)
    assert status == 0, output
    assert "a real broker needs java and mvn" in output
    assert "skipped" in output.splitlines()[-1]
    assert "failed" not in output.splitlines()[-1]


def test_broker_tests_fail_in_ci_where_java_is_missing(tmp_path: Path) -> None:
    status, output = _pytest(BROKER_TESTS, path=str(tmp_path), ci=True)
    assert status == 1, output
    assert "a real broker needs java and mvn" in output
    assert "skipped" not in output.splitlines()[-1]


def test_a_test_that_is_to_run_on_a_gpu_is_skipped_where_there_is_none(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ON_GPU", True)
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    with pytest.raises(pytest.skip.Exception, match=NO_GPU):
        pytest_runtest_setup(request.node)


@pytest.mark.slow
def test_rounds_of_a_gpu_are_skipped_with_one_line_where_there_is_none(tmp_path: Path) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    folders = {path.partition("/test_")[0] for one in ROUNDS for path in one.tests}
    assert folders == {"tests/contract", "tests/deepspeed", "tests/slow", "tests/unit/consumers"}
    tests = sorted({path for one in ROUNDS for path in one.tests})
    environment = {"DORA_PIPE_DEVICE": "cuda", "DORA_PIPE_DTYPE": "bfloat16"}
    status, output = _pytest("-rs", *tests, path=str(tmp_path), ci=False, **environment)
    assert status == 0, output
    *_, reason, count = output.splitlines()
    assert reason.startswith("SKIPPED") and reason.endswith(NO_GPU)
    assert count.split()[1] == "skipped" and int(count.split()[0]) > 300
    assert count.count(",") == 0, "nothing passed, nothing failed"


def _marks(path: Path) -> set[str]:
    """The names in a file's own `pytestmark`."""
    for one in ast.parse((ROOT / path).read_text()).body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark":
            return {part.attr for part in ast.walk(one.value) if isinstance(part, ast.Attribute)}
    return set()


def test_every_file_of_the_slow_folder_carries_the_slow_marker() -> None:
    # Read, not collected: collecting imports torch, which takes longer than many a file of tests.
    slow = [path for path in files(".py") if str(path).startswith("tests/slow/test_")]
    assert slow
    assert [path for path in slow if "slow" not in _marks(path)] == []


def _decorated(mark: str) -> list[tuple[Path, str, set[str]]]:
    """Tests with this mark on themselves: file, name, and all names in their decorators."""
    found = []
    for path in files(".py"):
        source = (ROOT / path).read_text() if path.name.startswith("test_") else ""
        for one in ast.parse(source).body if f"pytest.mark.{mark}" in source else ():
            if isinstance(one, ast.FunctionDef):
                nodes = [part for each in one.decorator_list for part in ast.walk(each)]
                names = {part.attr for part in nodes if isinstance(part, ast.Attribute)}
                if mark in names:
                    found.append((path, one.name, names | _marks(path)))
    return found


def test_a_pure_test_is_slow_and_needs_no_broker() -> None:
    pure = _decorated("pure")
    assert len(pure) >= 10
    for path, name, marks in pure:
        assert "slow" in marks and "kafka" not in marks, f"{path}::{name}"


def test_a_test_that_runs_alone_is_slow_not_pure_and_says_why() -> None:
    alone: list[str] = []
    for path in files(".py"):
        source = (ROOT / path).read_text() if path.name.startswith("test_") else ""
        if path == Path("tests/unit/test_tiers.py") or "pytest.mark.alone" not in source:
            continue
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.alone":
                (why,) = call.args
                assert isinstance(why, ast.Constant) and len(str(why.value)) > 20, path
                alone.append(str(path))
        assert source.count("pytest.mark.alone") == alone.count(str(path)), f"{path}: it says why"
        assert "alone" not in _marks(path) or "slow" in _marks(path), path
    assert alone
    for path, name, marks in _decorated("alone"):
        assert "slow" in marks and "pure" not in marks, f"{path}::{name}"


def test_the_parts_of_the_slow_tier_together_are_the_slow_tier() -> None:
    marks = (PURE[-1], PAIRED[-1], ALONE[-1])
    assert marks == ("slow and pure", "slow and not pure and not alone", "slow and alone")
    recipes = (ROOT / "Makefile").read_text()
    assert "$(BIN)/python -m tests.support.slow_tier $(ARGS)\n" in recipes


def test_the_slow_tier_shows_all_of_its_parts_and_one_may_be_empty(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "import sys; print(sys.argv[1:]); sys.exit(5 if 'slow and pure' in sys.argv else 0)"
    monkeypatch.setattr(slow_tier, "PYTEST", (sys.executable, "-c", told))
    # With the last priority it would wait for a machine that has nothing else to do.
    monkeypatch.setattr(slow_tier, "stand_back", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert slow_tier.main(["tests/some.py"]) == 0
    first, second, third = capfd.readouterr().out.splitlines()
    assert first == str([*PAIRED, "tests/some.py"])
    assert second == str([*ALONE, "tests/some.py"]), "behind the others"
    assert third == str([*PURE, "tests/some.py"])


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        *(((0, 0, 0), 0), ((5, 0, 0), 0), ((0, 5, 5), 0), ((5, 5, 5), 5)),
        *(((1, 0, 0), 1), ((0, 0, 1), 1), ((5, 2, 5), 2)),
    ],
)
def test_one_part_that_fails_fails_the_slow_tier(codes: tuple[int, ...], expected: int) -> None:
    assert exit_code(codes) == expected


def test_who_stands_back_has_the_last_priority_in_and_between_sessions() -> None:
    own = "import os; print(os.nice(0)); print(open('/proc/self/autogroup').read())"
    done = subprocess.run(
        [sys.executable, "-c", own if AUTOGROUP.exists() else own.partition(";")[0]],
        preexec_fn=stand_back,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[0] == str(LAST)
    assert not AUTOGROUP.exists() or done.stdout.split()[-1] == str(LAST)
