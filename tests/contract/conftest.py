"""The log of each kind that the contract's suites run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus_harness import KafkaHarness, MemoryHarness, SqliteHarness
from tests.support.bus_steps import Harness

BUSES = ["memory", "sqlite", pytest.param("kafka", marks=pytest.mark.kafka)]


@pytest.fixture(params=BUSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness: Any
    if request.param == "memory":
        harness = MemoryHarness()
    elif request.param == "sqlite":
        harness = SqliteHarness(tmp_path)
    else:
        harness = KafkaHarness(request.getfixturevalue("kafka_broker").bootstrap)
    yield harness
    harness.close()
