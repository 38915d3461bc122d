"""A run that is older than a key goes on as it began, from any file that does not name the key."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.config.load import dump_toml, load_config
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


def test_resume_by_the_users_own_file_keeps_the_way_in_which_the_run_began(tmp_path: Path) -> None:
    own, runs = tmp_path / "own.toml", tmp_path / "runs"
    own.write_text(OWN)
    stored = runs / "r" / "config.toml"
    stored.parent.mkdir(parents=True)
    text = dump_toml(load_config(own, ()))
    stored.write_text(text)
    assert load_again(own, (), "", runs).sampling.logprobs == "tempered"
    older = text.replace('logprobs = "tempered"', "").replace('special_tokens = "text"', "")
    stored.write_text(older)
    for file in (own, stored.parent):
        again = load_again(file, (), "", runs)
        assert (again.sampling.logprobs, again.task.special_tokens) == ("raw", "parse")
    told = load_again(own, ("sampling.logprobs=tempered",), "", runs)
    assert told.sampling.logprobs == "tempered"  # and is refused as a changed frozen key


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
