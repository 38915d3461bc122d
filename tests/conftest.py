"""Decides which tests run where: the broker, the accelerator, and one fixed course of chance.

`slow` tests run when the command line asks for them (`make test-full`), two at a time; what
measures, or has to meet a moment, says why it runs `alone`. Those that are `pure` run in the time
that the others leave (`support.slow_tier`), so they only compute: no broker, no limit in seconds,
no measurement of their own process.

A `gpu` test is skipped where there is no GPU, and with DORA_PIPE_DEVICE=cuda every test is
(`support.device`); a `kafka` test is skipped with one line where Java or Maven is missing, except
with CI=true, where that is a failure.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.device import NO_GPU, has_gpu, need_device
from tests.support.kafka_broker import KafkaBroker, archive_classes, missing_tools
from tests.support.kafka_secure import Certificates, secure_broker

if TYPE_CHECKING:
    from tests.support.command_line import Call
    from tests.support.recorded_run import RecordedRun

settings.register_profile(
    "house",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")


CLIENT_THREADS = "kafka-"
"""How the names of threads of Kafka's client begin, and of ours that wait for it."""

THREAD_LIMIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _clients_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(CLIENT_THREADS):
            thread.join(THREAD_LIMIT_S)
            assert not thread.is_alive(), f"this module leaves {thread.name} behind"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    from tests.support.recorded_run import recorded_in

    return recorded_in(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(recorded: RecordedRun, tmp_path: Path) -> RecordedRun:
    return recorded.copy(tmp_path / "copy")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    from tests.support.command_line import caller

    return caller(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _log_levels_stay() -> Iterator[None]:
    logger = logging.getLogger("dora_pipe")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    need_device()
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip(NO_GPU)
    if item.get_closest_marker("kafka"):
        require_broker_tools()


def require_broker_tools() -> None:
    missing = missing_tools()
    if not missing:
        archive_classes()
        return
    line = f"a real broker needs {' and '.join(missing)}, not found on this machine"
    if os.environ.get("CI") == "true":
        pytest.fail(line, pytrace=False)
    pytest.skip(line)


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    require_broker_tools()
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure_kafka(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[KafkaBroker]:
    with secure_broker(tmp_path_factory.mktemp("secure"), certificates) as broker:
        yield broker
