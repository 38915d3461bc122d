"""Other processes gather the evidence: what they bring is what this process would have read."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import Auditor, audit
from dora_pipe.audit.evidence import (
    Evidence,
    EvidenceBuffer,
    Helpers,
    OwnReader,
    Request,
    helpers_for,
    serve,
)
from dora_pipe.audit.helper import start_helper
from dora_pipe.audit.reading import ends_of
from dora_pipe.audit.report import plain
from dora_pipe.bench.audit_log import LogPlan, write_log
from dora_pipe.bus.base import EMPTY_POLLS_MAX
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.log_location import LogLocation

TOPICS = Topics("synthetic")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that never happened."""
    path = tmp_path_factory.mktemp("log") / "log.sqlite"
    bus = SqliteBus(path)
    written = write_log(bus, LogPlan(trajectories=200, tokens=24, group_size=4, per_step=5))
    bus.close()
    assert written.steps == 10
    assert written.trajectories >= 200
    return path


def _helpers(log: Path, positions: dict[int, int], ends: dict[int, int], count: int) -> Helpers:
    start = partial(start_helper, LogLocation(run="synthetic", url=f"sqlite:{log}"))
    return Helpers(start, TOPICS.trajectories, positions, ends, count=count)


def test_run_that_never_happened_holds(log: Path) -> None:
    bus = SqliteBus(log)
    found = audit(bus, TOPICS, None)
    bus.close()
    assert found.holds
    assert found.finished
    assert found.plans == found.rounds
    assert found.one_version_share == 1.0


def test_audit_with_helpers_says_what_one_without_says(log: Path) -> None:
    bus = SqliteBus(log)
    expected = plain(audit(bus, TOPICS, None))
    used = []

    def source(positions: dict[int, int], ends: dict[int, int]) -> Helpers:
        used.append(_helpers(log, positions, ends, 2))
        return used[-1]

    auditor = Auditor(bus, TOPICS, None, source=source)
    auditor.advance()
    found = plain(auditor.finish())
    auditor.close()
    bus.close()
    assert len(used) == 1
    assert found == expected


def test_helper_writes_what_it_has_read_and_where_it_is(log: Path) -> None:
    bus, out = SqliteBus(log), io.BytesIO()
    ends = {tp.partition: end for tp, end in ends_of(bus, TOPICS.trajectories).items()}
    request = Request(
        topic=TOPICS.trajectories, positions=dict.fromkeys(ends, 0), ends=ends, opened=True
    )
    serve(bus, request, out)
    reader = OwnReader(bus, TOPICS.trajectories, dict.fromkeys(ends, 0))
    while reader.poll(0, 0.0):
        pass
    reader.close()
    bus.close()
    assert len(out.getvalue()) > 200 * 300
    assert out.getvalue().count(b"synthetic") >= 200


def test_helper_that_cannot_read_says_so_in_one_line(tmp_path: Path) -> None:
    helpers = _helpers(tmp_path / "none.sqlite", {0: 0}, {0: 5}, 1)
    with pytest.raises(BusError, match="helps audit ended before its work was done"):
        helpers.poll(0, 20.0)
    helpers.close()


@pytest.mark.parametrize("written", [b"x" * 100, b"\xff" * 4, b"\x01\0\0\0\xc1", b"\x01\0", b""])
def test_helper_that_writes_nonsense_or_nothing_is_one_line(written: bytes) -> None:
    def start(_: Request) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"import os; os.write(1, {written!r})"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)

    helpers = Helpers(start, TOPICS.trajectories, {0: 0}, {0: 5}, count=1)
    with pytest.raises(BusError, match="helps audit"):
        helpers.poll(0, 20.0)
    helpers.close()


@pytest.mark.parametrize("held_back", [True, False])
def test_log_that_holds_records_back_is_slow_and_not_cut(held_back: bool) -> None:
    class Delayed:
        polls = 0

        def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
            assert timeout_s or not self.polls, "a busy wait"
            self.polls += 1
            return []

        def position(self, partition: int) -> int:
            return 5 if self.polls > 2 * EMPTY_POLLS_MAX else 0

        def held_back(self) -> bool:
            return held_back

        def close(self) -> None: ...

    buffer, source = EvidenceBuffer(), Delayed()
    buffer.begin({0: 5}, lambda _: source)
    with nullcontext() if held_back else pytest.raises(BusError, match="no more records"):
        buffer.read_all()


def test_short_log_is_read_without_help() -> None:
    assert helpers_for(10, 4) == 0
    assert helpers_for(1_000_000, 1) in (0, 1)
