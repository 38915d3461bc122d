"""A run whose trainer's package is missing is refused before anything is made."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.cli.start import run
from dora_pipe.core.errors import ConfigError
from tests.support.user_run import furnish


def test_run_without_deepspeed_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = furnish(tmp_path)
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "deepspeed" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match="needs deepspeed, which is not installed") as caught:
        run(
            directory / "config.toml",
            override=["trainer.kind=deepspeed", "trainer.ranks=2"],
            root=directory / "runs",
        )
    assert caught.value.exit_code == 3
    assert not (directory / "runs").exists()
