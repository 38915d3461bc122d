"""Every command of docs/quickstart.md about the run `demo`, typed where a short one has ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensorboard")

from tests.support import docs_commands
from tests.support.tidy import ROOT
from tests.support.user_run import call, furnish

pytestmark = pytest.mark.slow

PAGE = "docs/quickstart.md"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SERVES = "dora-pipe ui demo"
"""The one command that ends when it is told to."""

LIMIT_S = 60

STEPS = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `demo` of a few steps, as `make demo` leaves one of 38."""
    found = furnish(tmp_path_factory.mktemp("tour"))
    words = ("-o", "run.name=demo", "-o", f"run.steps={STEPS}")
    assert call(found, "run", "config.toml", *words) == 0
    return found


@pytest.fixture(scope="module")
def replaced(place: Path) -> dict[str, str]:
    told = docs_commands.run("dora-pipe why demo", place, {}, PATH)
    step, last = re.findall(r"^(\d+) +[\d.]+ s +(g\d{10}-\d{3}) ", told, re.M)[0]
    return {
        "g0000001977-007": last,
        "g0000001976": last.partition("-")[0],
        "show demo 35": f"show demo {step}",
        "--from 32": "--from 1",
    }


def _typed() -> list[str]:
    shown = docs_commands.commands(PAGE, "dora-pipe")
    return [one.partition("\n")[0].partition(" #")[0].strip() for one in shown]


def test_what_the_tour_begins_with_is_there() -> None:
    begin = [one.partition(" #")[0].strip() for one in docs_commands.commands(PAGE, "make demo")]
    assert begin == ["make demo", "docker compose up -d"]
    assert re.search(r"^demo:", (ROOT / "Makefile").read_text(), re.M)
    assert (ROOT / "compose.yaml").is_file()


def test_every_command_of_the_tour_does_what_it_says(place: Path, replaced: dict[str, str]) -> None:
    typed = _typed()
    assert len(typed) > 12
    said = {one: docs_commands.run(one, place, replaced, PATH) for one in typed if one != SERVES}
    words = {
        "dora-pipe show": "finished",
        "dora-pipe top demo --once": "last decisions",
        "dora-pipe show demo 35 --all": "waited",
        "dora-pipe show demo g0000001976": "outcome",
        "dora-pipe show demo g0000001977-007": "contribution",
        "dora-pipe audit demo": "C3: staleness of trained groups",
        "dora-pipe replay demo --from 32": "equal",
    }
    for one, word in words.items():
        assert word in said[one], said[one]
    for written in ("demo.html", "tb/demo", "traces.jsonl", "demo.parquet"):
        assert (place / written).exists(), written


def _partial_rollout() -> None:
    """Ctrl-C ends it, also where these tests run in a shell's background, which is deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_pages_are_served_until_they_are_told_to_end(place: Path) -> None:
    assert SERVES in _typed()
    serving = subprocess.Popen(
        [*SERVES.split(), "--port", "0"],
        cwd=place,
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_partial_rollout,
    )
    try:
        assert serving.stdout is not None
        address = serving.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            assert b"<title>" in answer.read()
    finally:
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=LIMIT_S)
    assert serving.returncode in (0, 130)


def test_an_auditor_that_knows_only_the_page_of_records_finds_nothing(place: Path) -> None:
    program = ROOT / "examples" / "own_auditor"
    done = subprocess.run(
        [sys.executable, "-I", str(program), str(place / "runs" / "demo")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(rf"^steps +{STEPS}$", done.stdout, re.M)
