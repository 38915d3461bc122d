"""bench/results/offpolicy.md says what its cells say, to the digit, and shows their pictures.

After the study has gone on: `dora-pipe bench offpolicy --out bench/results/offpolicy --report`,
and what it prints goes into the page.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dora_pipe.bench.cells import CELLS, SETTING
from dora_pipe.cli.app import app

DOCS = Path(__file__).parents[3] / "bench" / "results"
STUDY = DOCS / "offpolicy"
PICTURES = ("courses.svg", "ends.svg")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the study's cells were reported again, and what that printed."""
    place = tmp_path_factory.mktemp("study")
    for name in (CELLS, SETTING):
        shutil.copy(STUDY / name, place)
    words = ["bench", "offpolicy", "--out", str(place), "--report"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return place, done.stdout


def test_the_page_has_every_line_that_its_cells_print(printed: tuple[Path, str]) -> None:
    page = (DOCS / "offpolicy.md").read_text().splitlines()
    lines = [line.rstrip() for line in printed[1].splitlines()]
    assert len(lines) > 20
    assert [line for line in lines if line not in page] == []


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_page_are_drawn_of_its_cells(
    printed: tuple[Path, str], name: str
) -> None:
    assert (printed[0] / name).read_text() == (STUDY / name).read_text()
    assert f"offpolicy/{name}" in (DOCS / "offpolicy.md").read_text()
