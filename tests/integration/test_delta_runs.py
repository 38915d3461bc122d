"""Whole runs whose versions are mostly deltas: they end, audit holds, all versions are there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis.replay import Rebuilt, SourceRun
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.prune import plan_prune, prune
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.commits import OF_DELTAS
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.store.copies import MADE
from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import ORCHESTRATOR, TRAINER, Cluster, make_config
from tests.support.worker import VirtualClock

STEPS = 11


def patched_run(directory: Path, **changes: Any) -> Cluster:
    config = make_config(
        run__steps=STEPS,
        run__name="patched",
        policies__full_every=4,
        trainer__checkpoint_every=6,
        **changes,
    )
    cluster = Cluster(directory, config, on_disk=False)
    for version, role in ((2, TRAINER), (5, ORCHESTRATOR), (6, "w0"), (7, TRAINER)):
        cluster.until(lambda version=version: cluster.version >= version)  # type: ignore[misc]
        cluster.restart(role)
    cluster.run()
    return cluster


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with patched_run(tmp_path_factory.mktemp("patched")) as cluster:
        yield cluster


def digests_of(cluster: Cluster) -> list[str]:
    history = read_history(cluster.bus, cluster.topics, VirtualClock())
    return [history.digest_of(version) for version in range(history.next_step + 1)]


def store_alone(cluster: Cluster, directory: Path) -> PolicyStore:
    shutil.copytree(cluster.store.root, directory, ignore=shutil.ignore_patterns(MADE))
    return PolicyStore(directory)


def test_the_commits_say_what_of_each_version_lies_in_the_store(over: Cluster) -> None:
    commits = over.facts(StepCommitted)
    assert [commit.full for commit in commits] == [
        (commit.step + 1) % 4 == 0 or (commit.step + 1) % 6 == 0 for commit in commits
    ]
    for event in commits:
        assert event.delta is not None
        assert event.metrics.keys() >= OF_DELTAS
        assert over.store.has_whole(event.digest_after) == event.full
        path = over.store.root / delta_name(event.digest_after)
        assert path.stat().st_size == event.delta.bytes


def test_audit_holds_and_does_not_look_at_copies(over: Cluster) -> None:
    before = over.store.everything()
    report = audit(over.bus, over.topics, over.store)
    assert not report.violations
    assert over.store.everything() == before


def test_steps_are_replayed_bit_by_bit(over: Cluster) -> None:
    assert all(line.equal for line in over.replayed(0, STEPS - 1))


def test_every_version_is_to_be_had_from_the_store_alone(over: Cluster, tmp_path: Path) -> None:
    store = store_alone(over, tmp_path / "p")
    rebuilt_weights: list[Rebuilt] = []
    rebuilder = SourceRun(
        bus=over.bus,
        topics=over.topics,
        store=store,
        make=lambda started: SimulatedLearner(),
        clock=VirtualClock(),
        on_rebuilt=rebuilt_weights.append,
    )
    for version, digest in enumerate(digests_of(over)):
        assert rebuilder.weights(version).is_file()
        assert store.verify(digest).digest == digest
    assert not rebuilt_weights


def test_a_version_whose_delta_is_damaged_is_trained_again(over: Cluster, tmp_path: Path) -> None:
    store, rebuilt, digests = store_alone(over, tmp_path / "p"), list[Rebuilt](), digests_of(over)
    damaged = store.root / delta_name(digests[2])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    rebuilder = SourceRun(
        bus=over.bus,
        topics=over.topics,
        store=store,
        make=lambda started: SimulatedLearner(),
        clock=VirtualClock(),
        on_rebuilt=rebuilt.append,
    )
    rebuilder.weights(3)
    assert [version.version for version in rebuilt] == [3]
    assert store.verify(digests[3]).digest == digests[3]


@pytest.mark.parametrize("case", ["lost", "damaged", "of another", "whole lost"])
def test_audit_names_what_is_wrong_with_a_delta(over: Cluster, tmp_path: Path, case: str) -> None:
    store, digests = store_alone(over, tmp_path / "p"), digests_of(over)
    path = store.root / delta_name(digests[3])
    if case == "lost":
        path.unlink()
    elif case == "damaged":
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
    elif case == "of another":
        path.write_bytes((store.root / delta_name(digests[2])).read_bytes())
    else:
        (store.root / weights_name(digests[4])).unlink()
    lines = [violation.line for violation in audit(over.bus, over.topics, store).violations]
    assert lines
    subject = "version 4" if case == "whole lost" else "delta of version 3"
    assert subject in lines[0]
    assert len(lines) == 1, lines


def test_prune_takes_copies_and_leaves_what_versions_are_made_of(
    over: Cluster, tmp_path: Path
) -> None:
    shutil.copytree(over.store.root, tmp_path / "p")
    store, digests = PolicyStore(tmp_path / "p"), digests_of(over)
    plan = plan_prune(
        over.bus, over.topics, store, keep_every=1, stopped=False, clock=VirtualClock(), keep=(2,)
    )
    assert {candidate.why for candidate in plan.candidates} == {"copy", "retention"}
    for candidate in plan.candidates:
        store.remove(candidate.file)
    assert 3 in plan.versions and 2 not in plan.versions
    kept = sorted(set(range(STEPS + 1)) - set(plan.versions))
    for version in kept:
        assert store.verify(digests[version]).digest == digests[version]
    assert not store.has_weights(digests[3])


@pytest.mark.parametrize("full_every", [3, 50])
def test_a_run_that_drops_versions_keeps_what_the_kept_ones_are_made_of(
    tmp_path: Path, full_every: int
) -> None:
    config = make_config(
        run__steps=14,
        run__name="dropping",
        policies__full_every=full_every,
        trainer__checkpoint_every=5,
        store__keep_every=1,
    )
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        for version, role in ((4, TRAINER), (9, TRAINER)):
            cluster.until(lambda version=version: cluster.version >= version)  # type: ignore[misc]
            cluster.restart(role)
        cluster.run()
        history = read_history(cluster.bus, cluster.topics, VirtualClock())
        digests = digests_of(cluster)
        assert len(history.kept) < 14
        store = store_alone(cluster, tmp_path / "p")
        for version in history.kept:
            assert store.verify(digests[version]).digest == digests[version]
        assert not audit(cluster.bus, cluster.topics, store).violations
        where = (cluster.bus, cluster.topics, store)
        plan = plan_prune(*where, keep_every=0, stopped=False, clock=VirtualClock())
        assert {candidate.why for candidate in plan.candidates} == {"copy"}
        prune(*where, plan, user="somebody", clock=VirtualClock())
        for version in history.kept:
            assert store.verify(digests[version]).digest == digests[version]
