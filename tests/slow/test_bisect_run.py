"""`bisect` on a run of real processes: torch trains the steps again, a kill -9 loses nothing, and
an evaluation is sampled here as its workers sampled it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.user_run import WAIT_S, answer, call, furnish, start

pytestmark = pytest.mark.slow

PROBE = """
import time
from pathlib import Path
from safetensors.numpy import load_file

NAME = "model.embed_tokens.weight"

def still(folder):
    time.sleep(0.5)
    first, now = (
        next(one[NAME] for one in map(load_file, Path(place).glob("*.safetensors")) if NAME in one)
        for place in ("model", folder)
    )
    return [-float(abs(a - b).sum()) for a, b in zip(first, now)]
"""
"""The further the weights are from where they began, the worse, for every token."""

WORDS = ("bisect", "tiny", "--good", "0", "--bad", "3", "--probe", "probe:still", "--after", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a finished run of three steps, and a probe of their own."""
    folder = furnish(tmp_path_factory.mktemp("bisected"))
    (folder / "probe.py").write_text(PROBE)
    assert call(folder, "run", "config.toml") == 0, (folder / "said").read_text()
    yield folder


def found(place: Path, *words: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    done = answer(place, *words, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def lines(place: Path) -> list[bytes]:
    files = [*(place / "runs" / "tiny" / "bisect").glob("*/values.jsonl")]
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


def test_a_kill_in_the_middle_goes_on_and_comes_to_the_same(place: Path) -> None:
    log = (place / "runs" / "tiny" / "log.sqlite").read_bytes()
    process = start(place, *WORDS)
    until = time.monotonic() + WAIT_S
    while len(lines(place)) < 3 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait(WAIT_S)
    before = lines(place)
    assert len(before) >= 3, (place / "said").read_text()[-500:]
    again = found(place, *WORDS)
    assert lines(place)[: len(before)] == before
    folder = place / again["folder"]
    folder.rename(folder.with_name("first"))
    whole = found(place, *WORDS)
    assert whole["explanation"]["trials"], "steps were trained again"
    for one in (again, whole):
        del one["explanation"]["steps_as_they_were"]
    assert again == whole
    assert (place / "runs" / "tiny" / "log.sqlite").read_bytes() == log


def test_an_evaluation_has_here_the_rewards_that_it_had_in_the_run(place: Path) -> None:
    said = found(place, "bisect", "tiny", "--good", "0", "--bad", "3", "--draws", "4")
    query = (
        "select version, avg(reward) as reward from groups where fate = 'evaluated'"
        " group by version order by version"
    )
    shown = answer(place, "sql", "tiny", query, "--json")
    assert shown.returncode == 0, shown.stderr
    recorded = [json.loads(line) for line in shown.stdout.splitlines()]
    values = [
        json.loads(line)
        for line in (place / said["folder"] / "values.jsonl").read_text().split("\n")[:2]
    ]
    assert [one["of"] for one in values] == ["version 0", "version 3"]
    for one, logged in zip(values, recorded, strict=True):
        assert sum(one["values"]) / len(one["values"]) == pytest.approx(logged["reward"])


def test_a_probe_that_raises_is_one_line_with_what_it_was_asked_of(place: Path) -> None:
    (place / "broken.py").write_text("def probe(folder):\n    raise KeyError('no such row')\n")
    words = ("bisect", "tiny", "--good", "0", "--bad", "3", "--probe", "broken:probe")
    said = place / "said"
    size = said.stat().st_size
    assert call(place, *words) == 10
    told = said.read_bytes()[size:].decode()
    assert "--probe broken:probe, version 0: KeyError: 'no such row'" in told
    assert call(place, *words[:-1], "broken:nothing") == 2
    assert call(place, *words[:-1], "eval:none") == 2
