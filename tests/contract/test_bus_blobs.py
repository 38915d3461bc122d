"""Tests of the log contract with all values stored outside the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora_pipe.bus.blobs import BlobBus, BlobFiles, BlobWriter
from dora_pipe.bus.bus import Bus, Writer
from tests.support import bus_contract as writing
from tests.support.bus_contract import CHECKS
from tests.support.bus_harness import MemoryHarness, SqliteHarness
from tests.support.bus_steps import Check

LIMIT_OF_THE_CHECK_BYTES = 99_980
"""What `a_record_too_large_is_refused_with_its_whole_call` means by too large, without headers."""


class BlobHarness:
    def __init__(self, inner: MemoryHarness | SqliteHarness, folder: Path) -> None:
        self.inner = inner
        self.waits, self.shared, self.url = inner.waits, inner.shared, ""
        self.files = BlobFiles(folder)
        self.bytes_max = 1 << 30

    def open(self) -> Bus:
        return BlobBus(
            self.inner.open(),
            self.files,
            eligible=lambda topic: True,
            above_bytes=0,
            bytes_max=self.bytes_max,
        )

    def topic(self, name: str) -> str:
        return self.inner.topic(name)

    def make_next_append_unknown(self, writer: Writer) -> None:
        assert isinstance(writer, BlobWriter)
        self.inner.make_next_append_unknown(writer.inner)

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        return self.inner.leave_open(topic)


@pytest.fixture(params=["memory", "sqlite"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobHarness]:
    inner = MemoryHarness() if request.param == "memory" else SqliteHarness(tmp_path)
    yield BlobHarness(inner, tmp_path / "blobs")
    inner.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bus_with_claims(harness: BlobHarness, check: Check) -> None:
    if check is writing.a_record_too_large_is_refused_with_its_whole_call:
        harness.bytes_max = LIMIT_OF_THE_CHECK_BYTES
    check(harness)
