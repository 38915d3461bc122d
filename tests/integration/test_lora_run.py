"""Tests of a LoRA run on torch: resident versions, batches in parts, bfloat16, bitwise replays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.rounds import Assign, Migrate
from dora_pipe.store.adapters import base_of, stands_on
from tests.support.cluster import TRAINER, Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS = 5
WIDE_LOGITS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("lora")
    parts = TorchParts(make_qwen2(folder / "model", scale=WIDE_LOGITS), dtype="bfloat16")
    config = make_config(
        run__steps=STEPS,
        run__name="lora",
        sampling__max_tokens=24,
        rollout__prompts_per_step=2,
        lora__rank=4,
        lora__alpha=8.0,
        trainer__learning_rate=1e-2,
        trainer__batch_parts=2,
        objective__kl_coef=0.1,
        objective__reference_every=2,
        workers__max_resident_versions=3,
        policies__full_every=4,
        timing__lease_s=0.5,
    )
    with Cluster(folder / "run", config, parts=parts, workers=("w0", "w1")) as running:
        running.until(lambda: running.version >= 2)
        running.kill("w1")
        running.ticks(130)
        running.start("w1")
        running.until(lambda: running.version >= 4)
        running.restart(TRAINER)
        running.run()
        yield running


def test_audit_is_clean_and_the_reference_moves(cluster: Cluster) -> None:
    assert cluster.clean_report().steps == STEPS
    commits = cluster.facts(StepCommitted)
    assert [commit.settings["trainer.reference"] for commit in commits] == [0, 0, 2, 2, 4]


def test_every_later_version_is_a_small_adapter_on_the_first(cluster: Cluster) -> None:
    first = cluster.run_started.policy
    commits = cluster.facts(StepCommitted)
    for commit in commits:
        assert (commit.policy.dtype, commit.numerics["policies"]) == ("bfloat16", "bfloat16")
        assert commit.delta is not None
        assert stands_on(commit.policy, first.digest)
        assert commit.policy.bytes < first.bytes / 2
    kept = [commit.policy.digest for commit in commits if commit.full]
    assert kept
    assert {base_of(cluster.store.weights_path(digest)) for digest in kept} == {first.digest}


def test_workers_had_several_versions_at_once_and_nothing_moved(cluster: Cluster) -> None:
    state, most, versions_on_one = State(), 0, 0
    assigned, moved = 0, 0
    for logged_round in read_rounds(cluster.bus, cluster.topics):
        fold_round(state, logged_round.round, logged_round.folded())
        assigned += sum(isinstance(decision, Assign) for decision in logged_round.round.decisions)
        moved += sum(isinstance(decision, Migrate) for decision in logged_round.round.decisions)
        for name, residence in state.residents.items():
            most = max(most, len(residence.held))
            here = state.workers[name].requests
            specs = {state.groups[state.requests[entry].group].spec.version for entry in here}
            versions_on_one = max(versions_on_one, len(specs))
    assert 1 < most <= 3, most
    assert versions_on_one > 1, "requests of two versions ran on one worker"
    assert assigned >= STEPS
    assert moved == 0


def test_steps_come_out_bit_for_bit(cluster: Cluster) -> None:
    lines = cluster.replayed(0, STEPS)
    assert [line.replayed.step for line in lines] == list(range(STEPS))
    assert all(line.equal for line in lines)
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    results = cluster.regenerated(25)
    assert [result for result in results if not result.equal] == []
    assert len({result.version for result in results}) > 1
