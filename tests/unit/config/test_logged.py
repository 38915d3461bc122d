"""Tests of configurations read from a log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dora_pipe.config.load import dump_toml, from_plain, load_config
from dora_pipe.config.logged import logged_config
from dora_pipe.core.errors import ConfigError
from tests.support.configs import plain_config

PLAIN = plain_config(sampling={"temperature": 0.7}, evaluation={"sampling": {"temperature": 0.2}})


def test_logged_configuration_says_every_key() -> None:
    config = from_plain(PLAIN)
    assert config.task.special_tokens == "text"
    plain = msgspec.to_builtins(config)
    assert logged_config(plain) == config


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
