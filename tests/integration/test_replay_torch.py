"""Tests of bitwise replay with the torch engine and trainer on a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.analysis.change import Change
from dora_pipe.analysis.replay import StepResult, raise_if_diverged
from dora_pipe.analysis.retrain import retrain
from dora_pipe.audit.replay_trajectory import generate_again
from dora_pipe.core.errors import ReplayDiverged
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.store.model_dir import weights_digest
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.contexts import served_agent
from tests.support.ledgers import build_ledger
from tests.support.models import make_qwen2
from tests.support.recorded_run import progress_is_known

STEPS = 4
WIDE_LOGITS = 20.0
"""Random weights give nearly equal logits; these make the choice of a token matter."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("torch")
    parts = TorchParts(make_qwen2(folder / "model", scale=WIDE_LOGITS))
    config = make_config(
        run__steps=STEPS,
        run__name="torch",
        sampling__max_tokens=48,
        sampling__top_p=0.95,
        rollout__prompts_per_step=3,
        objective__kl_coef=0.1,
        objective__reference_every=2,
        trainer__schedule="cosine",
        trainer__warmup_steps=2,
        timing__lease_s=0.5,
    )
    with Cluster(folder / "run", config, parts=parts, workers=("w0", "w1")) as running:
        running.until(lambda: running.version >= 1)
        running.until(lambda: progress_is_known(running, "w1"))
        running.kill("w1")
        running.ticks(130)
        running.start("w1")
        running.run()
        yield running


def _replay(cluster: Cluster, first: int, last: int, **changed: float) -> list[StepResult]:
    return cluster.replayed(
        first, last, {name.replace("__", "."): value for name, value in changed.items()}
    )


def test_run_with_torch_holds(cluster: Cluster) -> None:
    assert cluster.clean_report().steps == STEPS


def test_commits_follow_a_schedule_and_a_moving_reference(cluster: Cluster) -> None:
    commits = cluster.facts(StepCommitted)
    assert [commit.settings["trainer.reference"] for commit in commits] == [0, 0, 2, 2]
    rates = [float(commit.settings["trainer.learning_rate"]) for commit in commits]
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)
    kls = [commit.metrics["kl"] for commit in commits]
    assert kls[2] == 0.0 < min(kls[1], kls[3])


def test_steps_come_out_bit_for_bit(cluster: Cluster) -> None:
    lines = _replay(cluster, 0, STEPS)
    assert [line.replayed.step for line in lines] == list(range(STEPS))
    assert all(line.equal for line in lines)
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_another_digit_of_the_learning_rate_is_named_with_step_and_tensor(cluster: Cluster) -> None:
    lines = _replay(cluster, 1, 2, trainer__learning_rate=1.1e-5)
    assert [line.replayed.equal for line in lines] == [True, False]
    with pytest.raises(ReplayDiverged, match=r"step 1 .* the first tensor that differs is \w+\."):
        raise_if_diverged(lines[1])


def test_twenty_random_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    ledger = build_ledger(cluster.bus, cluster.topics)
    moved = [
        entry.trajectory
        for group in ledger.accounts.groups.values()
        for entry in group.requests.values()
        if any(attempt.resumed for attempt in entry.attempts)
    ]
    assert moved
    results = cluster.regenerated(20)
    assert [result for result in results if not result.equal] == []
    assert len(results) == 20
    resumed = cluster.regenerated(moved)
    assert all(result.equal and result.prefills > 1 for result in resumed), resumed


def test_calls_of_an_agent_come_out_bit_for_bit_behind_what_they_saw(cluster: Cluster) -> None:
    records = cluster.records(cluster.topics.trajectories)
    recorded = (decode_trajectory(record.value) for record in records)
    params = sampling_params(cluster.config.sampling, cluster.parts.stop_ids(cluster.assets))
    weights = cluster.store.weights_path(cluster.run_started.policy.digest)
    engine = cluster.parts.engine(cluster.assets, cluster.config, cluster.clock)
    served = next(
        served
        for entry in recorded
        if entry.version == 0
        for served in [served_agent(entry, engine, params, weights)]
        if served.length - served.meta.contexts[2].start > 6
    )
    assert len(served.meta.contexts) == 3
    (again,) = generate_again(engine, [served], {served.meta.source: params}, lambda *_: weights)
    assert again.difference == ""
    assert again.prefills == 7


def test_a_changed_run_that_is_retrained_has_the_same_digests_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    change = Change(settings={"trainer.learning_rate": 1.1e-5})
    first, second = (retrain(cluster.source, range(2), change, tmp_path / n) for n in ("1", "2"))
    assert first == second
    assert not any(step.equal for step in first)
    assert weights_digest(tmp_path / "1") == weights_digest(tmp_path / "2") == first[-1].digest
