"""Tests of partial rollout: requests continue under new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.replay_trajectory import Regenerated
from dora_pipe.schemas.trajectory import Sampler, Segment, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.cluster import (
    ORCHESTRATOR,
    TRAINER,
    Cluster,
    SimulatedParts,
    TorchParts,
    make_config,
)
from tests.support.inline_tasks import episode_tasks
from tests.support.ledgers import build_ledger
from tests.support.models import make_qwen2
from tests.support.recorded_run import RecordedRun, progress_is_known
from tests.support.tamper import Row, Tamper

STEPS = 10
LEASE_TICKS = 130
CHANGES = {
    "staleness__partial_rollout": True,
    "sampling__max_tokens": 200,
    "evaluation__every": 2,
    "timing__lease_s": 0.5,
    "run__name": "mixed",
}


def long_lengths(seed: int, turn: int) -> int:
    return 120 + seed % 60 if seed % 7 == 0 else 6 + seed % 20


LONG = SimulatedParts(lengths=long_lengths)
EVEN = SimulatedParts(lengths=lambda seed, turn: 20 + seed % 130)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("mixed") / "run"
    with Cluster(folder, make_config(run__steps=STEPS, **CHANGES), parts=LONG) as cluster:
        cluster.train_ticks = 3
        cluster.until(lambda: cluster.version >= 2)
        cluster.until(lambda: progress_is_known(cluster, "w1"))
        cluster.kill("w1")
        cluster.ticks(LEASE_TICKS)
        cluster.start("w1")
        cluster.until(lambda: cluster.version >= 4)
        cluster.restart(ORCHESTRATOR)
        cluster.restart(TRAINER)
        cluster.stop("w2")
        cluster.until(lambda: "w2" not in cluster.roles)
        cluster.start("w3")
        cluster.run()
        yield cluster


def trajectories(cluster: Cluster) -> list[Trajectory]:
    records = cluster.records(cluster.topics.trajectories)
    return [decode_trajectory(record.value) for record in records]


def is_mixed(trajectory: Trajectory) -> bool:
    return len(set(trajectory.versions)) > 1


def bound(ledger: Ledger) -> list[str]:
    facts = ledger.accounts.logged.values()
    return [fact.fact.trajectory for fact in facts if fact.status == "bound"]


def again_whole(cluster: Cluster) -> list[Regenerated]:
    names = bound(build_ledger(cluster.bus, cluster.topics))
    results = cluster.regenerated(names)
    assert sorted(result.trajectory for result in results) == sorted(names)
    return results


def test_eventful_run_that_mixes_versions_is_audited_clean(eventful: Cluster) -> None:
    report = eventful.clean_report()
    assert report.steps == STEPS
    assert report.partial_rollout
    assert report.mixed_share is not None
    assert 0.05 < report.mixed_share < 1
    assert max(report.versions_each) > 2
    assert report.staleness_max is not None
    assert report.staleness_bound is not None
    assert report.staleness_max <= report.staleness_bound == 2
    (c1,) = [line for line in report.checks if line.check == "C1"]
    assert c1.holds.startswith("declared off (partial_rollout)")


def test_evaluations_are_of_one_version_also_where_training_mixes(eventful: Cluster) -> None:
    evaluations = [
        trajectory for trajectory in trajectories(eventful) if trajectory.meta.purpose == "eval"
    ]
    assert {evaluation.version for evaluation in evaluations} == {0, 2, 4, 6, 8, 10}
    assert all(set(evaluation.versions) == {evaluation.version} for evaluation in evaluations)


def test_every_trajectory_comes_out_bit_for_bit_under_its_versions(eventful: Cluster) -> None:
    results = again_whole(eventful)
    assert [result for result in results if not result.equal] == []
    assert max(result.prefills for result in results) > 2


def test_request_goes_on_elsewhere_from_a_chain_over_several_versions(eventful: Cluster) -> None:
    def is_one(trajectory: Trajectory) -> bool:
        makers = {
            (part.incarnation, part.version) for part in trajectory.segments if part.kind == "model"
        }
        return len({incarnation for incarnation, _ in makers}) > 1 and is_mixed(trajectory)

    assert any(is_one(trajectory) for trajectory in trajectories(eventful))


def test_weights_of_every_version_are_named(eventful: Cluster) -> None:
    for trajectory in filter(is_mixed, trajectories(eventful)):
        rest = [
            version
            for version in dict.fromkeys(trajectory.versions)
            if version != trajectory.version
        ]
        assert [weights.version for weights in trajectory.meta.weights] == rest


def test_single_worker_with_evaluations_is_live(tmp_path: Path) -> None:
    config = make_config(run__steps=6, **CHANGES)
    with Cluster(tmp_path / "run", config, parts=LONG, workers=("w0",), train_ticks=3) as cluster:
        cluster.run()
        report = cluster.clean_report()
    assert report.steps == 6
    assert report.mixed_share


def test_host_of_an_evaluation_dies_and_another_goes_back_for_it(tmp_path: Path) -> None:
    config = make_config(run__steps=6, **(CHANGES | {"evaluation__sampling": {"max_tokens": 240}}))
    with Cluster(tmp_path / "run", config, parts=EVEN, train_ticks=3) as cluster:
        worker = ""

        def evaluates_alone() -> bool:
            nonlocal worker
            state = cluster.roles[ORCHESTRATOR].machine.state
            hosts = [worker for worker in state.workers.values() if worker.target < state.version]
            evals = [host for host in hosts if any(name[0] == "e" for name in host.requests)]
            worker = evals[0].name if len(evals) == 1 and len(hosts) == 1 else ""
            return bool(worker)

        cluster.until(evaluates_alone)
        cluster.kill(worker)
        cluster.run()
        report = cluster.clean_report()
        again_ = [result for result in again_whole(cluster) if not result.equal]
    assert again_ == []
    assert report.steps == 6


def test_turns_of_an_episode_may_be_of_several_versions(tmp_path: Path) -> None:
    config = make_config(run__steps=4, **(CHANGES | {"evaluation__prompts": 0}))
    parts = SimulatedParts(lengths=lambda seed, turn: 10 + (seed >> turn) % 40)
    with Cluster(
        tmp_path / "run", config, parts=parts, tasks=lambda: episode_tasks(3), train_ticks=3
    ) as cluster:
        cluster.run()
        report = cluster.clean_report()
        results = again_whole(cluster)
    assert report.mixed_share
    assert [result for result in results if not result.equal] == []


def test_torch_goes_on_under_new_weights_and_comes_out_bit_for_bit(tmp_path: Path) -> None:
    parts = TorchParts(make_qwen2(tmp_path / "model", scale=20.0))
    changes = CHANGES | {"sampling__max_tokens": 64, "rollout__prompts_per_step": 2}
    config = make_config(run__steps=4, **changes)
    with Cluster(
        tmp_path / "run", config, parts=parts, workers=("w0", "w1"), train_ticks=3
    ) as cluster:
        cluster.run()
        report = cluster.clean_report()
        names = [
            trajectory.trajectory for trajectory in trajectories(cluster) if is_mixed(trajectory)
        ][:12]
        results = cluster.regenerated(names)
    assert report.mixed_share
    assert len(results) == len(names) > 4
    assert [result for result in results if not result.equal] == []


# Damages: what is promised where C1 is off is looked at in every record.


def by_versions(trajectory: Trajectory, change: Callable[[int], int]) -> list[Segment]:
    return [
        msgspec.structs.replace(part, version=change(part.version))
        if part.kind == "model"
        else part
        for part in trajectory.segments
    ]


def back_to_an_older_one(trajectory: Trajectory) -> Trajectory:
    *rest, newer, last = trajectory.segments
    changed = [
        msgspec.structs.replace(newer, version=last.version),
        msgspec.structs.replace(last, version=newer.version),
    ]
    named = {each.version: each for each in trajectory.meta.weights}
    order = dict.fromkeys(part.version for part in [*rest[1:], *changed])
    weights = tuple(named[version] for version in order if version != trajectory.version)
    meta = msgspec.structs.replace(trajectory.meta, weights=weights)
    return replace(trajectory, segments=[*rest, *changed], meta=meta)


def never_served(trajectory: Trajectory) -> Trajectory:
    *rest, last = trajectory.segments
    return replace(
        trajectory,
        segments=[*rest, msgspec.structs.replace(last, incarnation=last.incarnation + 100_000)],
    )


def other_weights(trajectory: Trajectory) -> Trajectory:
    weights = tuple(
        Sampler(version=each.version, digest="ab" * 32) for each in trajectory.meta.weights
    )
    return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, weights=weights))


def beyond_the_trainer(trajectory: Trajectory) -> Trajectory:
    weights = tuple(
        Sampler(version=each.version + 50, digest=each.digest) for each in trajectory.meta.weights
    )
    segments = by_versions(
        trajectory, lambda version: version + 50 if version != trajectory.version else version
    )
    return replace(
        trajectory,
        segments=segments,
        meta=msgspec.structs.replace(trajectory.meta, weights=weights),
    )


DAMAGES = {
    "back": (back_to_an_older_one, "samples after version"),
    "never served": (never_served, "which never joined"),
    "other weights": (other_weights, "names other weights than version"),
    "beyond": (beyond_the_trainer, "is later than"),
}


@pytest.mark.parametrize(("change", "why"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_mixed_trajectory_is_named(
    eventful: Cluster, tmp_path: Path, change: Callable[[Trajectory], Trajectory], why: str
) -> None:
    run = RecordedRun(directory=eventful.directory, run="mixed").copy(tmp_path / "copy")

    def fits(row: Row) -> bool:
        trajectory = decode_trajectory(row.value)
        return (
            len(set(trajectory.versions)) == 3
            and trajectory.versions.count(trajectory.versions[-1]) == 1
        )

    with Tamper(run) as log:
        row = next(row for row in log.rows("trajectories") if fits(row))
        name = decode_trajectory(row.value).trajectory
        log.put(log.reencode(row, change))
    bus = run.open()
    try:
        report = audit(bus, run.topics, None)
    finally:
        bus.close()
    named = [
        violation.line
        for violation in report.violations
        if (violation.check, violation.subject) == ("C1", name)
    ]
    assert any(why in line for line in named), named
