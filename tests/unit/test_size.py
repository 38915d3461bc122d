"""Tests of limits on code size; before raising one, look for code to remove."""

from __future__ import annotations

import re

from tests.support import size
from tests.support.tidy import ROOT

INSTALLED_LINES_MAX = 92_360
WITH_BENCHES_LINES_MAX = 100_080
TESTS_LINES_MAX = 90_620
SMALL_MODULES_MAX = 12
REPEATED_CLASSES_MAX = 1
LIFE_FILES_MAX, LIFE_LINES_MAX = 57, 18_700
FOLDERS_MAX = 16

ROWS = re.findall(r"^- \[([\w/.]+)\]\(\.\./\1\): `(\w+)`$", size.LIFE.read_text(), re.M)


def test_what_the_life_of_a_trajectory_names_is_in_that_file() -> None:
    removed = [
        (path, name)
        for path, name in ROWS
        if not re.search(rf"^(class|def|    def) {name}\b", (ROOT / path).read_text(), re.M)
    ]
    assert removed == []


def test_the_way_of_a_trajectory_gets_no_longer() -> None:
    way = size.life()
    assert len(ROWS) > 40
    assert len(way) <= LIFE_FILES_MAX
    assert sum(size.size_of(path).lines for path in way) <= LIFE_LINES_MAX


def test_lines_stay_within_their_bounds() -> None:
    sizes = size.by_folder()
    installed = size.total(sizes)
    assert installed.lines <= INSTALLED_LINES_MAX
    assert (installed + size.total(sizes, ["bench"])).lines <= WITH_BENCHES_LINES_MAX
    assert size.total(sizes, ["tests"]).lines <= TESTS_LINES_MAX


def test_modules_are_ideas_and_class_names_say_something() -> None:
    assert len(size.small_modules()) <= SMALL_MODULES_MAX
    assert len(size.repeated_classes()) <= REPEATED_CLASSES_MAX


def test_folders_at_the_top_can_be_counted_at_a_look() -> None:
    tops = {path.parts[0] for path in size.modules() if len(path.parts) > 1}
    assert len(tops - {"docs", "examples", "infra", "tests"}) <= FOLDERS_MAX
