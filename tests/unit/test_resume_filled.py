"""A run goes on as it began, from any file that does not name a key that is filled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.config.changes import kind_of
from dora_pipe.config.load import dump_toml, from_plain, leaves, load_config, read_table
from dora_pipe.config.logged import FILLED_IN
from dora_pipe.launch.run import load_again

OWN = """
[run]
name = "r"
steps = 3
[model]
path = "m"
[task]
kind = "arithmetic"
[sampling]
temperature = 0.7
"""


def test_resume_by_a_file_that_says_nothing_of_parts_keeps_what_the_run_began_with(
    tmp_path: Path,
) -> None:
    own, runs = tmp_path / "own.toml", tmp_path / "runs"
    own.write_text(OWN + "[groups]\nper_step = 32\n")
    stored = runs / "r" / "config.toml"
    stored.parent.mkdir(parents=True)
    begun = load_config(own, ())
    assert begun.trainer.parts == 4
    for parts in (1, 2, 4):
        stored.write_text(dump_toml(load_config(own, (f"trainer.parts={parts}",))))
        assert load_again(own, (), "", runs).trainer.parts == parts
    assert load_again(own, ("trainer.parts=3",), "", runs).trainer.parts == 3


def _begun(tmp_path: Path, text: str, *words: str) -> tuple[Path, Path]:
    """A user's file of a run that began with these overrides, and where runs lie."""
    own, runs = tmp_path / "own.toml", tmp_path / "runs"
    own.write_text(text)
    stored = runs / "r" / "config.toml"
    stored.parent.mkdir(parents=True)
    stored.write_text(dump_toml(load_config(own, words)))
    return own, runs


def test_every_frozen_key_that_is_filled_in_is_known_to_be(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = OWN.replace('path = "m"', 'path = "/m"')
    own.write_text(text + "[groups]\nper_step = 32\n[evaluation]\nsiblings = 2\n")
    said, filled = leaves(from_plain(read_table(own))), leaves(load_config(own, ()))
    found = {key for key in filled if filled[key] != said[key] and kind_of(key) == "frozen"}
    assert found == {"trainer.parts", "evaluation.sampling.temperature"}
    assert all(key.startswith(FILLED_IN) for key in found)


@pytest.mark.parametrize(
    "word",
    ["trainer.parts=2", "evaluation.sampling.temperature=0.0", "evaluation.sampling.top_k=3"],
)
def test_what_a_run_began_with_stays_where_its_file_says_nothing_and_would_be_filled_in(
    tmp_path: Path, word: str
) -> None:
    own, runs = _begun(tmp_path, OWN + "[groups]\nper_step = 32\n", word)
    assert load_again(own, (), "", runs) == load_config(own, (word,))


def test_what_one_of_several_evaluations_began_with_stays_its_own(tmp_path: Path) -> None:
    several = OWN + '[[evaluation]]\nname = "a"\n[[evaluation]]\nname = "b"\n'
    word = "evaluation.b.sampling.temperature=0.0"
    own, runs = _begun(tmp_path, several, word)
    assert load_again(own, (), "", runs) == load_config(own, (word,))
