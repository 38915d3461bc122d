"""Round in which a worker is stopped beyond its lease and continues once it is fenced.

`python -m tests.support.stopped_worker FOLDER` plays it. It is a program because roles are forked
before torch is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import Supervisor
from dora_pipe.schemas.control import WorkerJoined, decode_control
from dora_pipe.schemas.rounds import Fence, decode_round
from dora_pipe.schemas.topics import Topics
from tests.support.kill_rounds.inject import Files
from tests.support.kill_rounds.order import Order, Point
from tests.support.kill_rounds.rounds import Session
from tests.support.tidy import ROOT

STOPPED: Final = Order(
    number=2,
    seed=5,
    role="w1",
    at=Point(moment="before", what="trajectories-logged", nth=2),
    stop=True,
)
SHORT_LEASE: Final = {"timing.lease_s": 1.5, "run.steps": 12}


def run_round(folder: Path, *, limit_s: float) -> RunDir:
    """Play the round in another process and return its run directory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stopped_worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(folder / f"round-{STOPPED.number}-{STOPPED.seed}")


def stopped_incarnation(directory: RunDir) -> int:
    return int((directory.path / "stopped-incarnation").read_text())


class _ContinueWhenFenced:
    def __init__(self) -> None:
        self.done = False

    def __call__(self, supervisor: Supervisor, files: Files) -> None:
        hit = files.read_hit()
        if self.done or hit is None:
            return
        topics = Topics(files.directory.name)
        with closing(SqliteBus(files.directory / "log.sqlite")) as bus:
            control = records_of(bus, ends_of(bus, topics.control))
            joined = [(record.offset, decode_control(record.value)) for record in control]
            decisions = records_of(bus, ends_of(bus, topics.decisions))
            rounds = [decode_round(decision.value) for decision in decisions]
        incarnation = max(
            offset
            for offset, fact in joined
            if isinstance(fact, WorkerJoined) and fact.pid == hit.pid
        )
        decided = [decision for round_ in rounds for decision in round_.decisions]
        if any(
            isinstance(decision, Fence) and decision.incarnation == incarnation
            for decision in decided
        ):
            (files.directory / "stopped-incarnation").write_text(str(incarnation))
            os.kill(hit.pid, signal.SIGCONT)
            self.done = True


def main() -> None:
    (folder,) = sys.argv[1:]
    watch = _ContinueWhenFenced()
    with closing(Session(Path(folder))) as session:
        result = session.play(STOPPED, changes=dict(SHORT_LEASE), watch=watch)
    assert watch.done, "the worker was not fenced"
    assert not result.trouble, result.trouble
    assert result.verdict is not None and result.verdict.clean, result.verdict


if __name__ == "__main__":
    main()
