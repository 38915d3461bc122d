"""Tests of a LoRA run on torch: resident versions, a clean audit, bitwise replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.replay_trajectory import Regenerated, pick, regenerate
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.rounds import Assign, Migrate
from dora_pipe.store.adapters import base_of, stands_on
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.ledgers import build_ledger
from tests.support.models import make_qwen2

STEPS = 5
WIDE_LOGITS = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("lora")
    parts = TorchParts(make_qwen2(folder / "model", scale=WIDE_LOGITS))
    config = make_config(
        run__steps=STEPS,
        run__name="lora",
        sampling__max_tokens=24,
        rollout__prompts_per_step=2,
        lora__rank=4,
        lora__alpha=8.0,
        trainer__learning_rate=1e-2,
        workers__max_resident_versions=3,
        timing__lease_s=0.5,
    )
    with Cluster(folder / "run", config, parts=parts, workers=("w0", "w1")) as running:
        running.until(lambda: running.version >= 2)
        running.kill("w1")
        running.ticks(130)
        running.start("w1")
        running.until(lambda: running.version >= 4)
        running.restart("trainer")
        running.run()
        yield running


def test_audit_is_clean(cluster: Cluster) -> None:
    report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert report.holds, [violation.line for violation in report.violations]
    assert report.steps == STEPS


def test_every_later_version_is_a_small_adapter_on_the_first(cluster: Cluster) -> None:
    ledger = build_ledger(cluster.bus, cluster.topics)
    first = cluster.run_started.policy
    for step in range(STEPS):
        policy = ledger.steps[step].fact.policy
        assert stands_on(policy, first.digest)
        assert policy.bytes < first.bytes / 2
        assert base_of(cluster.store.weights_path(policy.digest)) == first.digest


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
    assert all(line.replayed.equal for line in lines)
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    results = regenerated(cluster)
    assert [result for result in results if not result.equal] == []
    assert len({result.version for result in results}) > 1


def regenerated(cluster: Cluster) -> list[Regenerated]:
    stop_ids = cluster.parts.stop_ids(cluster.assets)
    params: dict[str, SamplingParams] = {
        "train": sampling_params(cluster.config.sampling, stop_ids),
        "eval": sampling_params(cluster.config.eval_sampling(), stop_ids),
    }
    engine = cluster.parts.engine(cluster.assets, cluster.config, cluster.clock)
    bus, topics, store = cluster.bus, cluster.topics, cluster.store.root
    with closing(read_catalogue(bus, topics)) as tables:
        return list(regenerate(bus, topics, store, tables, engine, pick(tables, 25, 5), params))


def test_a_run_in_bfloat16_is_audited_and_comes_out_bit_for_bit_its_versions_deltas(
    tmp_path: Path,
) -> None:
    parts = TorchParts(make_qwen2(tmp_path / "model", scale=WIDE_LOGITS), dtype="bfloat16")
    config = make_config(
        run__steps=4,
        run__name="narrow",
        sampling__max_tokens=12,
        lora__rank=4,
        lora__alpha=8.0,
        trainer__learning_rate=1e-3,
        trainer__batch_parts=2,
        trainer__checkpoint_every=3,
        policies__dtype="bfloat16",
        policies__full_every=4,
    )
    with Cluster(tmp_path / "run", config, parts=parts, workers=("w0",)) as running:
        running.until(lambda: running.version >= 3)
        running.restart("trainer")
        running.run()
        report = audit(running.bus, running.topics, running.store.root)
        assert report.holds, [violation.line for violation in report.violations]
        commits = [entry.fact for _, entry in sorted(ledger_of(running).steps.items())]
        assert {commit.numerics["policies"] for commit in commits} == {"bfloat16"}
        assert {commit.policy.dtype for commit in commits} == {"bfloat16"}
        assert all(
            stands_on(commit.policy, running.run_started.policy.digest) for commit in commits
        )
        assert all(commit.delta is not None for commit in commits)
        assert all(line.replayed.equal for line in running.replayed(0, 4))
        assert all(result.equal for result in regenerated(running))


def ledger_of(cluster: Cluster) -> Ledger:
    return build_ledger(cluster.bus, cluster.topics)
