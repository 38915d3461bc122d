"""Tests of the fuzzing corpus: every input is rejected in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from random import Random

import pytest

from dora_pipe.core.errors import DoraError
from tests.fuzz import mutations
from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import CORPUS, TARGETS, Target, check
from tests.fuzz.wordings import wording

FOUND = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_input_that_once_was_a_finding_is_refused_in_one_line(path: Path) -> None:
    assert isinstance(check(TARGETS[path.parent.name], path.read_bytes()), DoraError)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_seeds_are_sound(target: Target) -> None:
    seeds = target.seeds()
    assert seeds
    assert [check(target, data) for data in seeds] == [None] * len(seeds)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_mutations_reach_behind_the_first_check(target: Target) -> None:
    chance = Random(5)

    def plain(data: bytes, size_max: int) -> bytes:
        changed = bytearray(data or b"x")
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        return bytes(changed[:size_max])

    seeds = target.seeds()
    refusals = set()
    for _ in range(300):
        data = mutations.mutate(target.shape, chance.choice(seeds), 1 << 16, chance, plain)
        refused = check(target, data)
        refusals.add("" if refused is None else refused.message)
    assert len(refusals) > 5
    assert "" in refusals


@pytest.mark.parametrize(
    ("entry", "other"),
    [
        ("Invalid value 'a' (at $.kind)", "Invalid value 'it's `b` \"c\"' (at $.kind)"),
        ("Invalid value 'no end of it, it was cut", "Invalid value ''"),
        ("unknown field `a` (at $.kind)", "unknown field `b` `c` (at $.kind)"),
        ("metadata of 17 bytes is above 16", "metadata of -0x5 bytes is above 999999"),
    ],
)
def test_refusals_that_differ_in_what_the_input_says_are_one(entry: str, other: str) -> None:
    assert wording(entry) == wording(other)
    assert wording(entry) != wording("Invalid value 'a' (at $.decisions[0].kind)")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not there: make fuzz gets it"
)
@pytest.mark.parametrize("name", ["control", "trajectory", "config"])
def test_some_seconds_of_fuzzing_reach_more_than_the_seeds(name: str, tmp_path: Path) -> None:
    fuzzed = fuzz(TARGETS[name], seconds=5, seed=1, folder=tmp_path)
    assert fuzzed.findings == ()
    assert fuzzed.inputs > 100
    assert fuzzed.branches > fuzzed.branches_first > 50
