"""Requests that move between real processes, because a worker is drained; and its sudden death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dora_pipe.schemas.control import RequestReleased
from tests.support.moving_run import (
    DRAINED,
    asked_away,
    drain,
    of,
    run_until_it_samples,
    stopped,
    trajectories,
)
from tests.support.user_run import WAIT_S, assert_clean, call, furnish, until

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return furnish(tmp_path)


def test_drained_process_hands_its_requests_over_and_they_are_the_same(directory: Path) -> None:
    with run_until_it_samples(directory) as running:
        with stopped(directory):  # no request ends before the check
            drain(directory)
            until(lambda: bool(asked_away(directory)))
        assert running.wait(WAIT_S) == 0, (directory / "said").read_text()
    assert_clean(directory, "tiny")
    released = [release for release in of(directory, RequestReleased) if release.worker == DRAINED]
    with_cache = [release for release in released if release.kv is not None]
    assert with_cache, released
    actual_trajectories = trajectories(directory)
    imported = [
        release for release in with_cache if actual_trajectories[release.trajectory].meta.migrations
    ]
    assert len(imported) == len(with_cache)
    assert {actual_trajectories[release.trajectory].meta.worker for release in imported}.isdisjoint(
        {DRAINED}
    )
    names = [release.trajectory for release in imported[:4]]
    assert call(directory, "replay", "tiny", *names) == 0, (directory / "said").read_text()
    assert not (directory / "runs/tiny/handover").exists()


def test_source_that_is_killed_before_it_lets_go_leaves_its_progress(directory: Path) -> None:
    with run_until_it_samples(directory, "-o", "timing.lease_s=2") as running:
        with stopped(directory) as pid:
            drain(directory)
            until(lambda: bool(asked_away(directory)))
            os.kill(pid, signal.SIGKILL)
        asked = asked_away(directory)
        assert running.wait(WAIT_S) == 0, (directory / "said").read_text()
    assert_clean(directory, "tiny")
    assert not any(release.trajectory in asked for release in of(directory, RequestReleased))
    actual_trajectories = trajectories(directory)
    assert asked <= actual_trajectories.keys()
    gone_on = [
        actual_trajectories[name]
        for name in asked
        if len(actual_trajectories[name].meta.prefills) > 1
    ]
    assert gone_on, "none of them had a progress record"
    assert {trajectory.segments[1].worker for trajectory in gone_on} == {DRAINED}
    assert all(trajectory.meta.attempt > 1 for trajectory in gone_on)
