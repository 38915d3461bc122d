"""A whole run on one machine whose policies are in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import s3_address
from tests.support.user_run import answer, assert_clean, call, furnish, steps

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def test_a_run_with_an_object_store_trains_and_replays(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = furnish(tmp_path)
    with (directory / "config.toml").open("a") as file:
        file.write(f'[store]\nurl = "{s3_address(request)}"\n')
    assert call(directory, "run", "config.toml") == 0, (directory / "said").read_text()
    assert steps(directory, "tiny") == [0, 1, 2]
    logs = "".join(
        path.read_text() for path in (directory / "runs" / "tiny" / "logs").glob("*.log")
    )
    assert "Traceback" not in logs
    assert answer(directory, "replay", "tiny").returncode == 0
    assert_clean(directory, "tiny")
