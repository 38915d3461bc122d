"""Fixtures of the recorded run for tests of traces and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.observe.traces.span import Span
from tests.support.ledgers import build_ledger
from tests.support.recorded_run import RecordedRun
from tests.support.traces import traces_of


@pytest.fixture(scope="module")
def bus(recorded: RecordedRun) -> Iterator[SqliteBus]:
    with closing(recorded.open()) as opened:
        yield opened


@pytest.fixture(scope="session")
def spans(recorded: RecordedRun) -> list[Span]:
    with closing(recorded.open()) as opened:
        return traces_of(opened, recorded.topics)


@pytest.fixture(scope="session")
def ledger(recorded: RecordedRun) -> Ledger:
    with closing(recorded.open()) as opened:
        return build_ledger(opened, recorded.topics)
