"""The reading half of the bus contract, over an archive and over an archive below a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import bus_checks_reading as reading
from tests.support.bus_archive import ArchiveHarness, SpliceHarness
from tests.support.bus_steps import Check


@pytest.fixture(params=[ArchiveHarness, SpliceHarness])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArchiveHarness]:
    made = request.param(tmp_path)
    assert isinstance(made, ArchiveHarness)
    yield made
    made.close()


@pytest.mark.parametrize("check", reading.CHECKS, ids=lambda check: check.__name__)
def test_archive(harness: ArchiveHarness, check: Check) -> None:
    check(harness)
