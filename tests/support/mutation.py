"""``make mutants``: mutation score per folder, with mutmut.

    python -m tests.support.mutation [FOLDER ...] [--sample 300]

mutmut needs the layout of an installed package, so each folder gets a copy in `build/mutants`.
A fixed sample of its mutants runs against fast tests: unit and contract tests of the folder's name,
or else those that import it, integration tests of the audit, and the simulator's first seeds.
mutmut selects the tests that call the changed function and stops at the first failure. Mutants that
no test calls survive.

As a pytest plugin, this module runs the fastest tests first, limits their CPU time and excludes
tests that fail in the copy without a mutant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import pytest

from dora_pipe.core.system import linux
from tests.support.tidy import FOLDERS, ROOT, files

MEASURED: Final = (
    "orchestrator",
    "audit",
    "ledger",
    "consumers/objectives",
    "consumers/trainer",
    "bus",
    "schemas",
)
SIMULATOR: Final = "tests/integration/test_sim_seeds.py::test_seeds_hold"
WHOLE_RUNS: Final = {"audit": "tests/integration/test_(audit|replay)_"}
"""Integration tests of folders whose unit tests reach too little."""

TESTS_CPU_S: Final = 30
"""Tests per mutant: as many as take so long in mutmut's statistics run."""

TEST_CPU_S: Final = 20
"""Limit of a test under a mutant."""

DATA_BYTES: Final = 6 << 30
"""Limit of a process's data, against endless growth."""

ACTIVE: Final = "MUTANT_UNDER_TEST"
"""mutmut's variable: the mutant, or the step of its preparation."""

STATS: Final = Path("mutmut-stats.json")
FAILING: Final = Path("failing.txt")
TIMEOUTS: Final = (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL)
RESULTS: Final = {
    0: "survived",
    5: "untested",
    33: "untested",
    **dict.fromkeys(TIMEOUTS, "timeout"),
}
"""By exit code; others mean killed."""

_call_start = 0.0

ROW: Final = "{:22} {:>7} {:>6} {:>8} {:>8} {:>7} {:>6} {:>7} {:>8}\n"
HEAD: Final = "mutants killed survived untested timeout score minutes excluded"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("folders", nargs="*", default=MEASURED, metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=300)
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.write(ROW.format("folder", *HEAD.split()))
    for folder in options.folders:
        start = time.monotonic()
        copy = ROOT / "build/mutants" / folder.replace("/", "-")
        lay_out(folder, copy)
        names = sample(folder, copy, options.sample)
        if code := run(copy, names):
            sys.stderr.write(f"{folder}: mutmut failed with {code}; see {copy}/mutmut.log\n")
            return 1
        sys.stdout.write(row(folder, copy, names, (time.monotonic() - start) / 60))
        sys.stdout.flush()
    return 0


def lay_out(folder: str, copy: Path) -> None:
    """Copy the repository so that `dora_pipe` is a folder."""
    shutil.rmtree(copy, ignore_errors=True)
    for path in files():
        code = path.parts[0] in FOLDERS or str(path) in ("__init__.py", "py.typed")
        target = copy / ("dora_pipe" if code else ".") / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    (copy / "tests/__init__.py").write_text("")  # it refuses this layout
    settings = {
        "source_paths": ["dora_pipe"],
        "only_mutate": [f"dora_pipe/{folder}/*.py"],
        "also_copy": sorted({path.name for path in copy.iterdir()} - {"dora_pipe"}),
        "pytest_add_cli_args_test_selection": suite(folder),
        "pytest_add_cli_args": [
            *("-p", "tests.support.mutation", "-p", "no:cacheprovider"),
            *("-m", "not slow and not kafka and not gpu"),
        ],
        "process_isolation": "forkserver",
        "track_dependencies": False,
        "use_git_change_detection": False,
        "timeout_multiplier": 2.0,
        "timeout_constant": 30.0,
    }
    (copy / "mutants").mkdir()  # before a process has it in its path
    with (copy / "pyproject.toml").open("a") as file:
        file.write("\n[tool.mutmut]\n")
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def suite(folder: str) -> list[str]:
    """Return tests of the folder's name; modules that import it, if it has no unit tests."""
    modules = [str(path) for path in files(".py") if path.name.startswith("test_")]
    own = [path for path in modules if path.startswith(f"tests/unit/{folder}/")]
    if not own:
        dotted = re.escape(f"dora_pipe.{folder.replace('/', '.')}")
        imports = re.compile(rf"^\s*(from|import) {dotted}\b", re.MULTILINE)
        near = [path for path in modules if path.startswith(("tests/unit/", "tests/contract/"))]
        own = [path for path in near if imports.search((ROOT / path).read_text())]
    more = re.compile(WHOLE_RUNS.get(folder, f"tests/contract/test_{folder}_"))
    return sorted({SIMULATOR, *own, *filter(more.match, modules)})


def sample(folder: str, copy: Path, size: int) -> list[str]:
    from mutmut.mutation import file_mutation  # type: ignore[import-not-found, unused-ignore]
    from mutmut.utils import format_utils  # type: ignore[import-not-found, unused-ignore]

    names: list[str] = []
    with contextlib.chdir(copy):  # mutmut reads pyproject.toml there
        for path in sorted(Path("dora_pipe", folder).rglob("*.py")):
            mutated = file_mutation.mutate_file_contents(str(path), path.read_text())
            names += [format_utils.get_mutant_name(path, name) for name in mutated.mutant_names]
    return random.Random(0).sample(names, min(size, len(names)))


def run(copy: Path, names: Sequence[str]) -> int:
    """Run mutmut, then kill leftover processes of its tests."""
    jobs = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "mutmut", "run", f"--max-children={jobs}", *names]
    variables = {**os.environ, "PYTHONPATH": str(copy / "mutants")}
    limit = (DATA_BYTES, DATA_BYTES)
    try:
        with (copy / "mutmut.log").open("w") as log:
            return subprocess.run(
                command,
                cwd=copy,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit),
                check=False,
            ).returncode
    finally:
        while children := Path("/proc/thread-self/children").read_text().split():
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def row(folder: str, copy: Path, names: Sequence[str], minutes: float) -> str:
    """Format one line of the table, and write the survivors' names to `survivors.txt`."""
    codes: dict[str, int] = {}
    for path in (copy / "mutants/dora_pipe" / folder).rglob("*.meta"):
        codes |= json.loads(path.read_text())["exit_code_by_key"]
    results = {name: RESULTS.get(codes[name], "killed") for name in sorted(names)}
    alive = [name for name, result in results.items() if result in ("survived", "untested")]
    (copy / "survivors.txt").write_text("".join(f"{results[name]} {name}\n" for name in alive))
    counts = Counter(results.values())
    score = (len(names) - len(alive)) / len(names)
    failing = copy / "mutants" / FAILING
    excluded = len(failing.read_text().splitlines()) if failing.exists() else 0
    kinds = [counts[kind] for kind in ("killed", "survived", "untested", "timeout")]
    return ROW.format(folder, len(names), *kinds, f"{score:.1%}", f"{minutes:.1f}", excluded)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    failing = set(FAILING.read_text().splitlines()) if FAILING.exists() else set()
    items[:] = [item for item in items if item.nodeid not in failing]
    if not STATS.exists():
        return
    durations: dict[str, float] = json.loads(STATS.read_text())["duration_by_test"]
    items.sort(key=lambda item: durations[item.nodeid])
    if _mutant_is_active():
        sums = accumulate(durations[item.nodeid] for item in items)
        items[:] = [item for item, total in zip(items, sums, strict=True) if total <= TESTS_CPU_S]


def pytest_runtest_logstart() -> None:
    if _mutant_is_active():
        signal.setitimer(signal.ITIMER_PROF, TEST_CPU_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    global _call_start
    _call_start = time.process_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "call":
        call.duration = time.process_time() - _call_start  # mutmut reads it
    report = yield
    if report.failed and os.environ.get(ACTIVE) == "stats":
        with FAILING.open("a") as file:
            file.write(f"{item.nodeid}\n")
        report.outcome = "passed"
    return report


def _mutant_is_active() -> bool:
    return "." in os.environ.get(ACTIVE, "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
