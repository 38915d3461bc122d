"""A configuration that is older than a key means what it meant when it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.load import dump_toml, from_plain, load_config
from dora_pipe.config.logged import OLDER, logged_config, with_older
from dora_pipe.core.errors import ConfigError

PLAIN: dict[str, Any] = {
    "run": {"name": "r", "steps": 4},
    "model": {"path": "m"},
    "task": {"kind": "arithmetic"},
    "sampling": {"temperature": 0.7},
    "evaluation": {"sampling": {"temperature": 0.2}},
}


def as_older(plain: dict[str, Any]) -> dict[str, Any]:
    """What a version without the keys wrote."""
    for section, keys in OLDER.items():
        for key in keys:
            del plain[section][key]
            plain["evaluation"]["sampling"].pop(key, None)
    return plain


def test_new_file_without_the_keys_gets_the_new_way_and_says_so_in_full() -> None:
    config = from_plain(PLAIN)
    assert (config.sampling.logprobs, config.evaluation.sampling.logprobs) == ("tempered",) * 2
    assert config.task.special_tokens == "text"
    plain = msgspec.to_builtins(config)
    assert logged_config(plain) == config
    assert with_older(plain) == plain


def test_log_without_the_keys_keeps_the_old_way() -> None:
    older = as_older(msgspec.to_builtins(from_plain(PLAIN)))
    assert with_older(older) != older
    config = logged_config(older)
    assert (config.sampling.logprobs, config.evaluation.sampling.logprobs) == ("raw", "raw")
    assert config.task.special_tokens == "parse"
    assert config.sampling.logprob_temperature == 1.0
    plain = msgspec.to_builtins(config)
    assert with_older(plain) == plain


def test_stored_file_of_an_older_run_keeps_the_old_way_and_can_be_told_otherwise(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(from_plain(PLAIN)))
    lines = file.read_text().splitlines()
    keys = [key for section in OLDER.values() for key in section]
    file.write_text("\n".join(one for one in lines if one.split(" ")[0] not in keys))
    assert load_config(file, (), stored=True).sampling.logprobs == "raw"
    assert load_config(file, (), stored=True).evaluation.sampling.logprobs == "raw"
    assert load_config(file, (), stored=True).task.special_tokens == "parse"
    assert load_config(file, ()).sampling.logprobs == "tempered"
    told = load_config(file, ("sampling.logprobs=tempered",), stored=True)
    assert told.sampling.logprobs == "tempered"


@pytest.mark.parametrize("section", ["sampling", "evaluation.sampling"])
@pytest.mark.parametrize("temperature", ["1e-7", "0.009", "1e5"])
def test_temperature_without_digits_is_refused(
    tmp_path: Path, section: str, temperature: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(from_plain(PLAIN)))
    with pytest.raises(ConfigError, match=f"^{section}.temperature: .* neither 0"):
        load_config(file, (f"{section}.temperature={temperature}",))
    for fine in ("0", "0.01", "100.0"):
        load_config(file, (f"{section}.temperature={fine}",))
