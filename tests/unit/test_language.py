"""Tests of the rules of plain English and of the tree against its baseline."""

import json

import pytest

from tests.support import language


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("docs/a.md", "# What a call is known by\n", "title"),
        ("docs/a.md", "The version lies in the store.\n", "calque"),
        ("bus/a.py", 'typer.Option(help="Of the computation.")\n', "opener"),
        ("bus/a.py", 'def f() -> None:\n    """Whose names these are."""\n', "opener"),
        ("bus/a.py", 'raise ValueError("nobody reads it")\n', "actor"),
        ("bus/a.py", "x = 1  # the run goes on\n", "calque"),
        ("tests/a.py", "for wanted in ():\n    pass\n", "name"),
    ],
)
def test_a_broken_rule_is_a_hit(path: str, text: str, rule: str) -> None:
    assert [hit.rule for hit in language.hits(path, text)] == [rule]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/a.md", "# Why is a role waiting?\n```\nnobody\n```\nSee `beside`.\n"),
        ("bus/a.py", '"""Return the row; `x` is None at the end."""\n'),
        ("tests/a.py", 'assert line == "the run goes on"\n'),
    ],
)
def test_sound_text_has_no_hit(path: str, text: str) -> None:
    assert list(language.hits(path, text)) == []


def test_subjects_are_an_area_and_an_imperative() -> None:
    bad = ["Runs that end", "bus: what a reader sees", "bus: " + "x" * 70]
    assert language.subject_hits([*bad, "bus: name the lost topic"]) == bad
    assert not language.subject_hits(language.subjects())


def test_the_baseline_is_exact_and_only_falls() -> None:
    baseline = json.loads(language.BASELINE.read_text())
    assert language.differences(baseline, language.counts()) == []
    higher = {"bus": {"name": 3, "title": 1}, "cli": {"name": 1}}
    now = {"bus": {"name": 2}, "cli": {"name": 5}}
    assert len(language.differences(higher, now)) == 3
    assert language.lowered(higher, now) == {"bus": {"name": 2}, "cli": {"name": 1}}
