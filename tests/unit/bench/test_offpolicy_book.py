"""A study that was stopped goes on where it ended, and never mixes settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dora_pipe.bench.offpolicy import Cell
from dora_pipe.bench.offpolicy_book import CELLS, Book, setting_digest
from dora_pipe.core.errors import ResourceError, UsageError
from tests.support.offpolicy import measured

SETTING = {"trainer.learning_rate": 1e-3, "task.options": {"mu": 1.0}}
S = setting_digest(SETTING)
FIRST = measured("grpo", 0, 0, 0.8, setting=S)
SECOND = measured("tis", 8, 1, 0.7, setting=S, masked=0.25)


def test_what_was_measured_is_there_when_the_study_goes_on(tmp_path: Path) -> None:
    book = Book(tmp_path, SETTING)
    assert book.cells == {}
    book.add(FIRST)
    Book(tmp_path, SETTING).add(SECOND)
    again = Book(tmp_path, SETTING)
    assert again.cells == {FIRST.cell: FIRST, SECOND.cell: SECOND}
    assert list(again.cells) == [
        Cell(objective="grpo", eta=0, seed=0),
        Cell(objective="tis", eta=8, seed=1),
    ]


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_line_that_a_crash_cut_off_was_never_written(tmp_path: Path, cut: int) -> None:
    book = Book(tmp_path, SETTING)
    book.add(FIRST)
    book.add(SECOND)
    path = tmp_path / CELLS
    path.write_bytes(path.read_bytes()[:-cut])
    torn = Book(tmp_path, SETTING)
    assert list(torn.cells) == [FIRST.cell]
    torn.add(SECOND)
    assert list(Book(tmp_path, SETTING).cells) == [FIRST.cell, SECOND.cell]


def test_cells_of_another_setting_are_refused(tmp_path: Path) -> None:
    Book(tmp_path, SETTING).add(FIRST)
    with pytest.raises(UsageError, match="study of another setting"):
        Book(tmp_path, {**SETTING, "trainer.learning_rate": 2e-3})


def test_a_line_from_elsewhere_is_refused(tmp_path: Path) -> None:
    Book(tmp_path, SETTING).add(FIRST)
    with (tmp_path / CELLS).open("ab") as file:
        file.write(msgspec.json.encode(measured("grpo", 1, 0, 0.8, setting="t")) + b"\n")
    with pytest.raises(UsageError, match="line 2 is of another setting"):
        Book(tmp_path, SETTING)


@pytest.mark.parametrize(
    "line", [b"no json", b"{}", b'{"setting":"s"}'], ids=["no json", "empty", "a part"]
)
def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path, line: bytes) -> None:
    (tmp_path / CELLS).write_bytes(line + b"\n")
    with pytest.raises(UsageError, match="line 1"):
        Book(tmp_path, SETTING)
    assert (tmp_path / CELLS).read_bytes() == line + b"\n"


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"setting\.json: No such file"):
        Book(tmp_path / "nowhere", SETTING)
    book = Book(tmp_path, SETTING)
    (tmp_path / CELLS).mkdir()
    with pytest.raises(ResourceError, match="cannot be written: Is a directory"):
        book.add(FIRST)


def test_a_setting_has_the_same_name_however_it_is_ordered() -> None:
    assert setting_digest({"a": 1, "b": [2.5]}) == setting_digest({"b": [2.5], "a": 1})
    assert setting_digest({"a": 1}) != setting_digest({"a": 2})
