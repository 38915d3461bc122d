"""Tests that unavailable tests skip with a line, and fail in CI."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tidy import ROOT, files

BROKER_TESTS = "tests/integration/test_reality_kafka_records.py"
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


def test_broker_tests_fail_in_ci_where_java_is_missing(tmp_path: Path) -> None:
    status, output = _pytest(BROKER_TESTS, path=str(tmp_path), ci=True)
    assert status == 1, output
    assert "a real broker needs java and mvn" in output
    assert "skipped" not in output.splitlines()[-1]


def _marks(path: Path) -> set[str]:
    for decision in ast.parse((ROOT / path).read_text()).body:
        if isinstance(decision, ast.Assign) and ast.unparse(decision.targets[0]) == "pytestmark":
            return {
                part.attr for part in ast.walk(decision.value) if isinstance(part, ast.Attribute)
            }
    return set()


def test_every_file_of_the_slow_folder_carries_the_slow_marker() -> None:
    # Parsed, not collected: collecting imports torch, which is slow.
    slow = [path for path in files(".py") if str(path).startswith("tests/slow/test_")]
    assert slow
    assert [path for path in slow if "slow" not in _marks(path)] == []
