"""Tests of `dora-pipe run` on a real broker: a worker dies, and another run has a similar name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import WorkerJoined
from tests.support.kafka_broker import KafkaBroker
from tests.support.user_run import WAIT_S, call, facts, furnish, start, steps, until

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 30
"""Long enough for a dead worker to be missed, started again and given work."""
OTHER_STEPS = 3
LEASE_S = 3.0


@pytest.fixture
def directory(tmp_path: Path, kafka_broker: KafkaBroker) -> Path:
    config = furnish(tmp_path) / "config.toml"
    text = config.read_text().replace("lease_s = 5.0", f"lease_s = {LEASE_S}")
    config.write_text(f'{text}[bus]\nurl = "kafka://{kafka_broker.bootstrap}"\n')
    return tmp_path


def workers(path: Path, run: str) -> list[WorkerJoined]:
    return [fact for fact in facts(path, run) if isinstance(fact, WorkerJoined)]


def said(path: Path) -> str:
    return (path / "said").read_text()


def test_two_runs_on_one_broker_end_proved_although_a_worker_is_killed(directory: Path) -> None:
    tiny = start(directory, "run", "config.toml", "-o", f"run.steps={STEPS}")
    words = ("-o", 'run.name="tiny-control"', "-o", f"run.steps={OTHER_STEPS}")
    other = start(directory, "run", "config.toml", *words)
    until(lambda: said(directory).count(" joined (") >= 4)
    until(lambda: len(steps(directory, "tiny")) >= 2)
    killed = workers(directory, "tiny")[0]
    os.kill(killed.pid, signal.SIGKILL)
    assert (tiny.wait(WAIT_S), other.wait(WAIT_S)) == (0, 0), said(directory)

    assert steps(directory, "tiny") == list(range(STEPS))
    assert steps(directory, "tiny-control") == list(range(OTHER_STEPS))
    assert [fact.worker for fact in workers(directory, "tiny")].count(killed.worker) >= 2
    for run in ("tiny", "tiny-control"):
        assert runs_named_in(directory, run) == {run}
        assert call(directory, "audit", run) == 0, said(directory)
    assert call(directory, "replay", "tiny") == 0, said(directory)
    assert f"{STEPS} of {STEPS} steps bit-equal" in said(directory)
    assert call(directory, "replay", "tiny", "--random", "8") == 0, said(directory)
    assert "8 of 8 trajectories bit-equal" in said(directory)
    assert call(directory, "run", "config.toml", "--runs", "elsewhere") == 3
    assert "the log already holds a run 'tiny'" in said(directory)


def runs_named_in(path: Path, run: str) -> set[str]:
    with opened(str(path / "runs" / run)) as open_run:
        ends = ends_of(open_run.bus, open_run.topics.trajectories)
        return {dict(record.headers)["run"].decode() for record in records_of(open_run.bus, ends)}
