"""A paradigm is a name for keys; every one of them is read, shown and told apart."""

from pathlib import Path

import msgspec
import pytest

from dora_pipe.config.changes import kind_of
from dora_pipe.config.describe import dump_toml
from dora_pipe.config.load import changed_keys, load_config
from dora_pipe.config.model import Config, Staleness, in_flight_batches
from dora_pipe.config.paradigms import PARADIGMS, paradigm, paradigm_of
from dora_pipe.core.errors import ConfigError

SMALL = """
[run]
name = "small"
steps = 3
[model]
path = "models/tiny"
[task]
kind = "arithmetic"
"""
OTHER = "[staleness]\nmax_staleness = 5\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL + OTHER)
    return path


def of(config: Config) -> tuple[int, float, bool]:
    found = config.staleness
    return found.max_staleness, in_flight_batches(found), found.interruptible


def with_staleness(config: Config, **changes: object) -> Config:
    staleness = msgspec.structs.replace(config.staleness, **changes)
    return msgspec.structs.replace(config, staleness=staleness)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("sync", (0, 1.0, False)),
        ("one-step", (1, 2.0, False)),
        ("dora", (2, 3.0, False)),
        ("interruptible", (2, 3.0, True)),
    ],
)
def test_paradigm_lays_its_keys_over_the_file(
    file: Path, name: str, keys: tuple[int, float, bool]
) -> None:
    read = load_config(file, (), paradigm=name)
    assert of(read) == keys
    assert paradigm_of(read) == name
    assert f"# paradigm: {name} " in dump_toml(read)


def test_override_has_the_last_word_over_a_paradigm(file: Path) -> None:
    read = load_config(file, ["staleness.max_staleness=3"], paradigm="interruptible")
    assert of(read) == (3, 3.0, True)
    assert paradigm_of(read) == "interruptible with max_staleness 3"


def test_what_is_nearly_a_paradigm_says_what_it_changes(file: Path) -> None:
    read = load_config(file, ())
    assert paradigm_of(read) == "dora with max_staleness 5 and in_flight_batches 2"
    one = with_staleness(read, max_staleness=1, in_flight_batches=1.5)
    assert paradigm_of(one) == "one-step with in_flight_batches 1.5"
    other = with_staleness(read, max_staleness=0, in_flight_batches=None)
    assert paradigm_of(other) == "sync"


def test_default_configuration_is_dora_that_does_not_fill_its_window(file: Path) -> None:
    file.write_text(SMALL)
    assert paradigm_of(load_config(file, ())) == "dora with in_flight_batches 2"
    assert paradigm_of(with_staleness(load_config(file, ()), in_flight_batches=3.0)) == "dora"
    automatic = with_staleness(load_config(file, ()), in_flight_batches="auto")
    assert paradigm_of(automatic) == "dora with in_flight_batches auto"
    assert paradigm("dora").keys == {
        "staleness.max_staleness": Staleness().max_staleness,
        "staleness.in_flight_batches": Staleness().max_staleness + 1.0,
        "staleness.interruptible": Staleness().interruptible,
    }


def test_every_key_of_staleness_belongs_to_every_paradigm() -> None:
    names = {f"staleness.{name}" for name in Staleness.__struct_fields__}
    assert all(one.keys.keys() == names for one in PARADIGMS.values())


def test_unknown_paradigm_is_refused_with_those_there_are(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, (), paradigm="async")
    assert caught.value.hint is not None
    assert "sync, one-step, dora, interruptible" in caught.value.hint


def test_interruptible_cannot_be_switched_by_resuming(file: Path) -> None:
    frozen, logged, _ = changed_keys(
        load_config(file, (), paradigm="sync"), load_config(file, (), paradigm="interruptible")
    )
    assert frozen == {"staleness.interruptible"}
    assert logged == {"staleness.max_staleness", "staleness.in_flight_batches"}
    assert kind_of("staleness.interruptible") == "frozen"
