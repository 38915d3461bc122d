"""A retraining that is killed goes on where it was, with torch, as a process of its own.

Method: three steps of a small run are trained again by the command; a SIGKILL comes once the first
of them is committed, and the same command is called again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dora_pipe.config.load import dump_toml
from dora_pipe.core.errors import DoraError
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2
from tests.support.retrained import audited, commits
from tests.support.user_run import WAIT_S, answer, start

STEPS = 6

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of torch, whose trainer keeps a checkpoint every third step."""
    folder = tmp_path_factory.mktemp("retrain")
    config = make_config(
        run__steps=STEPS,
        run__name="small",
        sampling__max_tokens=24,
        trainer__checkpoint_every=3,
        trainer__minibatches=2,
    )
    parts = TorchParts(make_qwen2(folder / "model"))
    with Cluster(folder / "small", config, parts=parts, workers=("w0", "w1")) as running:
        running.run()
        (folder / "small" / "config.toml").write_text(dump_toml(running.config))
    yield folder


def command(root: Path, *words: str) -> list[str]:
    return ["retrain", "small", "--runs", str(root), *words]


@pytest.mark.parametrize("batches", ["kept", "again"])
def test_a_killed_retraining_goes_on_at_the_next_step_with_equal_weights(
    root: Path, batches: str
) -> None:
    words = command(root, "--name", batches, "--from", "1", "--batches", batches)
    began = start(root, *words)
    give_up_s = time.monotonic() + WAIT_S
    while not _committed(root, batches) and began.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.02)
    os.kill(began.pid, signal.SIGKILL)
    began.wait()
    there = _committed(root, batches)
    assert 1 <= there < STEPS - 1
    done = answer(root, *words)
    assert done.returncode == 0, done.stderr
    assert "goes on where it was" in done.stderr
    assert "every step gave the weights of the source" in done.stdout
    theirs = [one.digest_after for one in commits(root, "small")[1:]]
    assert [one.digest_after for one in commits(root, batches)] == theirs
    report = audited(root, batches)
    assert report.holds, [one.line for one in report.violations]
    again = answer(root, *words)
    assert again.returncode == 0, again.stderr


def _committed(root: Path, name: str) -> int:
    """Steps that the run has by now; 0 while its log is being made."""
    if not (root / name / "log.sqlite").is_file():
        return 0
    with suppress(DoraError):
        return len(commits(root, name))
    return 0


def test_batches_taken_again_are_proved_and_a_run_without_a_whole_batch_says_so(
    root: Path, tmp_path: Path
) -> None:
    words = ("--batches", "again", "-o", "groups.per_step=5")
    done = answer(root, *command(root, "--name", "many", "--from", "4", *words))
    assert done.returncode == 0, done.stderr
    assert "no whole batch is left for step 5, within deadlines" in done.stderr
    report = audited(root, "many")
    assert (report.holds, report.steps) == (True, 1)
    assert [len(one.groups) for one in commits(root, "many")] == [5]
