"""Several ranks: each reads its own share, a bad log is named, a lost rank ends the trainer."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.consumers.learners.deepspeed.commands import Ready, StepReply
from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.core.errors import ConfigError, InvariantBroken
from dora_pipe.store.safetensors_file import TensorSource
from tests.deepspeed.conftest import Bench
from tests.support import deepspeed
from tests.support.batches import SETTINGS, make_batch

LIMIT_S = 240

KILLED = """
import os, signal, sys, time
from pathlib import Path
from dora_pipe.core.errors import ResourceError
from tests.deepspeed.conftest import Bench
from tests.support.batches import SETTINGS, make_batch

if __name__ == "__main__":
    bench = Bench(Path(sys.argv[1]))
    trainer = bench.deepspeed()
    trainer.train(make_batch(seed=0), SETTINGS)
    from dora_pipe.consumers.learners.deepspeed import rank_group as ranks
    child = ranks._GROUP[0]._children[1]
    os.kill(child.pid, signal.SIGKILL)
    if sys.argv[2] == "idle":
        time.sleep(60)
    try:
        trainer.train(make_batch(seed=1), SETTINGS)
    except ResourceError as error:
        print("said:", error.message)
        os._exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def _two_ranks() -> None:
    deepspeed.need_deepspeed(ranks=2)


def _changed(batch: TrainBatch) -> TrainBatch:
    groups = [
        replace(group, places=[replace(location, sha256="0" * 64) for location in group.places])
        for group in batch.groups
    ]
    return replace(batch, groups=groups)


def test_rank_that_finds_other_bytes_in_the_log_is_named_and_the_others_go_on(bench: Bench) -> None:
    trainer, batch = bench.deepspeed(), make_batch(seed=1)
    logged = bench.log.logged(batch)
    with pytest.raises(InvariantBroken, match=r"rank 1 could not read its share: .*other bytes"):
        trainer.trainer.train(_changed(logged), SETTINGS)
    assert trainer.manifest() == bench.policy
    fresh = bench.deepspeed()
    for entry in (trainer, fresh):
        entry.train(batch, SETTINGS)
    assert trainer.manifest() == fresh.manifest()


def test_rank_reads_its_own_share_of_the_batch_from_the_log_and_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = bench.deepspeed()
    group, text = trainer.trainer._group, []
    heard = group.replies

    def replies() -> list[bytes]:
        text.append(heard())
        return text[-1]

    monkeypatch.setattr(group, "replies", replies)
    settings = {**SETTINGS, "trainer.minibatches": 1}
    result = trainer.train(make_batch(seed=3, groups=5, samples=5), settings)
    ((ready,), (reply,)) = text
    rows = sum(map(len, msgspec.msgpack.decode(reply, type=StepReply).updates[0].rows))
    assert 0 < rows < result.metrics["trajectories"]
    between = msgspec.msgpack.decode(ready, type=Ready).records - rows
    # A record whose neighbours are both its own is read with them.
    assert 0 <= between <= rows / 2


def test_rank_group_of_another_size_is_one_line(bench: Bench) -> None:
    from dora_pipe.consumers.learners.deepspeed.rank_group import rank_group

    with pytest.raises(ConfigError, match=r"trainer.ranks is 3, but this process has 2"):
        rank_group(3, "cpu")


def test_disk_that_fills_up_while_weights_are_written_leaves_the_ranks_in_step(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora_pipe.consumers.learners.deepspeed import learner as deepspeed_trainer

    trainer = bench.deepspeed(zero_stage=3)

    def full(path: Path, sources: list[TensorSource]) -> None:
        sources[0].data()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(deepspeed_trainer, "write_tensors", full)
        with pytest.raises(OSError, match="No space"):
            trainer.save_weights(tmp_path / "weights")
    assert trainer.manifest() == bench.policy


@pytest.mark.parametrize("when", ["busy", "idle"])
def test_rank_that_is_killed_ends_the_trainer_with_one_line(when: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), when],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    line = "rank 1 of the trainer was killed (SIGKILL)"
    if when == "busy":
        assert f"said: {line}" in done.stdout
    else:
        assert f"error: {line}" in done.stderr
