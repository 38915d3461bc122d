"""Real processes: every paradigm, and workers that come and go; tests/integration/test_churn.py has
both in one process, one worker under a wide bound too."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.schemas.control import RunStarted, WorkerJoined, WorkerLeft
from tests.support.user_run import assert_clean, call, facts, furnish, start, steps, until

pytestmark = pytest.mark.slow

ETA, C = "staleness.max_staleness", "staleness.async_batches"
PARADIGMS = {
    "sync": (f"{ETA}=0", f"{C}=1"),
    "one-step": (f"{ETA}=1", f"{C}=2"),
    "dora": (f"{ETA}=2", f"{C}=3"),
    "partial_rollout": (f"{ETA}=2", f"{C}=3", "staleness.partial_rollout=true"),
}
EVERY_S = 1.5
"""Between two things that happen to workers."""


def run_with(path: Path, paradigm: str, *overrides: str) -> subprocess.Popen[bytes]:
    words = [word for override in (*PARADIGMS[paradigm], *overrides) for word in ("-o", override)]
    return start(path, "run", "config.toml", *words)


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_every_paradigm_ends_clean_and_is_replayed(tmp_path: Path, paradigm: str) -> None:
    directory = furnish(tmp_path)
    process = run_with(directory, paradigm, "run.steps=6", "evaluation.every=2")
    assert process.wait(200) == 0
    assert steps(directory, "tiny") == list(range(6))
    assert_clean(directory, "tiny")
    assert call(directory, "replay", "tiny", "--random", "20") == 0


def living(path: Path) -> dict[str, int]:
    results: dict[str, int] = {}
    for fact in facts(path, "tiny"):
        if isinstance(fact, WorkerJoined):
            results[fact.worker] = fact.pid
        elif isinstance(fact, WorkerLeft):
            results.pop(fact.worker, None)
    return results


def names() -> Iterator[str]:
    number = 0
    while True:
        yield f"x{number}"
        number += 1


def test_workers_that_join_retire_and_die_all_the_time_leave_the_run_clean(tmp_path: Path) -> None:
    directory, chance, fresh = furnish(tmp_path), random.Random(5), names()
    hardy = ("timing.max_restarts=200", "rollout.max_attempts=50", "timing.lease_s=2.0")
    process = run_with(
        directory, "partial_rollout", "run.steps=60", "sampling.max_tokens=40", *hardy
    )
    log = directory / "runs" / "tiny" / "log.sqlite"
    until(
        lambda: (
            log.exists() and any(isinstance(fact, RunStarted) for fact in facts(directory, "tiny"))
        )
    )
    until(lambda: len(living(directory)) == 2)
    rest: dict[str, subprocess.Popen[bytes]] = {}
    done = {"died": 0, "drained": 0, "joined": 0}
    while process.poll() is None:
        there = living(directory)
        mine = [name for name in rest if name in there]
        what = chance.choice(["died", "drained", "joined", "joined"])
        if what == "joined" and len(mine) < 3:
            name = next(fresh)
            rest[name] = start(directory, "worker", "config.toml", "--name", name)
            done[what] += 1
        elif what == "drained" and mine:
            if call(directory, "control", "drain", "tiny", chance.choice(mine)) != 0:
                assert process.wait(timeout=120) == 0, "only a run that is over refuses commands"
                break
            done[what] += 1
        elif what == "died" and there:
            try:
                os.kill(there[chance.choice(sorted(there))], signal.SIGKILL)
            except ProcessLookupError:
                continue  # it had died already, and has not joined again yet
            done[what] += 1
        _pause(process)
    assert process.returncode == 0, (directory / "said").read_text()[-2000:]
    for other in rest.values():
        other.wait(60)
    assert min(done.values()) >= 2, json.dumps(done)
    assert steps(directory, "tiny") == list(range(60))
    assert_clean(directory, "tiny")


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(EVERY_S)
    except subprocess.TimeoutExpired:
        return
