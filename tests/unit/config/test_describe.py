"""Tests of the configuration reference page."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config import describe
from dora_pipe.config.changes import kind_of
from dora_pipe.config.describe import dump_toml, toml
from dora_pipe.config.load import from_plain, leaves, load_config
from tests.support.config_reference import page
from tests.support.configs import small_config

SMALL = small_config()


def test_every_key_stands_on_the_page_with_a_meaning() -> None:
    rows = [line.partition("): ") for line in page().splitlines() if line[:3] == "- `"]
    assert len(rows) == len(leaves(SMALL))
    assert [row[0] for row in rows if not row[2]] == []


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("run.steps", "logged"),
        ("run.seed", "frozen"),
        ("evaluation.sampling.top_k", "frozen"),
        ("workers.max_num_seqs", "free"),
    ],
)
def test_kind_of_a_key(key: str, kind: str) -> None:
    assert kind_of(key) == kind


def test_shown_configuration_has_every_key_under_its_meaning() -> None:
    shown = dump_toml(SMALL)
    table = tomllib.loads(shown)
    assert table["rollout"]["group_size"] == 8
    assert "async_batches" not in table["staleness"]
    assert "# async_batches =\n" in shown
    assert "# Trajectories per group. (frozen)\ngroup_size = 8\n" in shown
    names = {line.split(" =")[0].lstrip("# ") for line in shown.splitlines() if " =" in line}
    assert {key.rpartition(".")[2] for key in leaves(SMALL)} - {
        "options",
        "columns",
        "chat_template_kwargs",
        "args",
    } <= names


def test_basic_keys_and_changed_keys_make_the_same_configuration() -> None:
    basic = load_config(Path(describe.__file__).with_name("basic.toml"), ())
    for config in (SMALL, basic):
        shown = dump_toml(config, every=False)
        assert from_plain(tomllib.loads(shown)) == config
        assert "rewritten_history" not in shown and "\ngroup_size = 8\n" in shown


def test_value_that_toml_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        toml([None])


@given(value=st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_text_is_read_back_the_same_and_nothing_in_it_steers_a_terminal(value: object) -> None:
    shown = toml(value)
    assert tomllib.loads(f"a = {shown}")["a"] == value
    assert shown.isprintable()
