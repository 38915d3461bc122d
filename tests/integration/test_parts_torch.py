"""Batches in parts on torch, whose trainer is killed between two of them: replayed bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.schemas.control import StepCommitted
from tests.support.cluster import TRAINER, Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS, PARTS = 3, 3
WIDE_LOGITS = 20.0


def has_computed(cluster: Cluster, part: int) -> bool:
    machine = cluster.roles[TRAINER].machine
    parts = machine._parts.get(machine.history.next_step)
    return bool(machine.phase == "idle" and parts is not None and parts.begun == part)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("torch")
    config = make_config(
        run__steps=STEPS,
        rollout__prompts_per_step=6,
        trainer__batch_parts=PARTS,
        sampling__max_tokens=24,
        workers__max_num_seqs=4,
        trainer__minibatches=PARTS,
        objective__kind="decoupled-ppo",
        objective__proximal="recomputed",
    )
    parts = TorchParts(make_qwen2(folder / "model", scale=WIDE_LOGITS))
    with Cluster(folder / "run", config, parts=parts, workers=("w0",)) as running:
        for part in (1, 2):
            running.until(partial(has_computed, running, part))
            running.restart(TRAINER)
        running.run()
        yield running


def test_run_whose_trainer_was_killed_between_parts_holds(cluster: Cluster) -> None:
    assert cluster.clean_report().steps == STEPS


def test_every_step_comes_out_bit_for_bit(cluster: Cluster) -> None:
    lines = cluster.replayed(0, STEPS)
    assert [line.replayed.equal for line in lines] == [True] * STEPS


def test_contributions_tell_the_update_of_each_part(cluster: Cluster) -> None:
    commits = cluster.facts(StepCommitted)
    assert commits[0].parts == (2, 2)
    assert {commit.metrics["updates"] for commit in commits} == {PARTS}
    rows = stored_contributions(cluster.store, commits[0].contributions.sha256)
    updates = {row["group"]: row["minibatch"] for row in rows}
    assert [updates[group.group] for group in commits[0].groups] == [0, 0, 1, 1, 2, 2]
