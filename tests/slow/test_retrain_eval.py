"""A retrained run is compared with its source by what it has learnt, and so after a SIGKILL.

Method: a small run for real, by the command as processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.user_run import call, furnish, start, until

pytestmark = [pytest.mark.slow]

WORDS = ("retrain", "tiny", "--name", "same", "--from", "1", "--eval", "12")


def said(place: Path, *words: str) -> str:
    """What a command prints besides."""
    before = (place / "said").stat().st_size
    assert call(place, *words) == 0, (place / "said").read_text()
    return (place / "said").read_text()[before:]


def values(place: Path, run: str) -> list[bytes]:
    """Lines of what the probe has said of a run."""
    return [
        line
        for file in (place / "runs" / run / "bisect").glob("*/values.jsonl")
        for line in file.read_bytes().splitlines()
    ]


def test_a_run_is_evaluated_and_so_it_is_after_a_kill(place: Path) -> None:
    log = (place / "runs/tiny/log.sqlite").read_bytes()
    process = start(place, *WORDS)
    until(lambda: bool(values(place, "same")) or process.poll() is not None)
    assert process.poll() is None, (place / "said").read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "over the source's by" in said(place, *WORDS)
    assert len(values(place, "same")) == 1, "what was said before the kill is not asked again"
    (line,) = [one for one in said(place, *WORDS, "--json").splitlines() if one.startswith("{")]
    same = json.loads(line)["evaluation"]
    assert same["draws"] == 12
    assert (same["gain"]["low"], same["gain"]["high"]) == (0.0, 0.0)
    assert same["value"] == same["source"]
    assert (place / "runs/tiny/log.sqlite").read_bytes() == log


def test_a_probe_that_is_not_there_is_one_line_before_anything_is_trained(place: Path) -> None:
    before = (place / "said").stat().st_size if (place / "said").exists() else 0
    words = ("retrain", "tiny", "--name", "odd", "--eval", "4", "--probe", "eval:none")
    assert call(place, *words) == 2
    text = (place / "said").read_text()[before:]
    assert "no evaluation 'none'" in text and len(text.splitlines()) <= 2
    assert not (place / "runs/odd").exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a finished run."""
    found = furnish(tmp_path_factory.mktemp("eval"))
    assert call(found, "run", "config.toml") == 0, (found / "said").read_text()
    return found
