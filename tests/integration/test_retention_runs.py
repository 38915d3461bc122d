"""Whole runs that delete versions: they end, audit holds, and what is gone is made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.analysis.replay import Rebuilt, SourceRun
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.prune import plan_prune, prune
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import ReplayDiverged, UsageError
from dora_pipe.schemas.control import VersionsDropped
from dora_pipe.store.names import digest_in
from tests.support.cluster import ORCHESTRATOR, TRAINER, Cluster, make_config
from tests.support.stores import Writer
from tests.support.worker import VirtualClock

STEPS = 14


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = make_config(
        run__steps=STEPS, run__name="kept", trainer__checkpoint_every=2, store__keep_every=2
    )
    with Cluster(tmp_path_factory.mktemp("kept"), config, on_disk=False) as cluster:
        for version, role in ((4, TRAINER), (6, ORCHESTRATOR), (9, TRAINER)):
            cluster.until(lambda version=version: cluster.version >= version)  # type: ignore[misc]
            cluster.restart(role)
        cluster.run()
        yield cluster


def rebuilder(cluster: Cluster, rebuilt_weights: list[Rebuilt], flavour: str = "") -> SourceRun:
    return SourceRun(
        bus=cluster.bus,
        topics=cluster.topics,
        store=cluster.store,
        make=lambda started: SimulatedLearner(flavour=flavour),
        clock=VirtualClock(),
        on_rebuilt=rebuilt_weights.append,
    )


def missing(cluster: Cluster) -> list[int]:
    history = read_history(cluster.bus, cluster.topics, VirtualClock())
    return [
        version
        for version in range(history.next_step + 1)
        if not cluster.store.has_weights(history.digest_of(version))
    ]


def test_versions_are_gone_and_audit_holds(over: Cluster) -> None:
    removed = missing(over)
    assert removed and 0 not in removed and STEPS not in removed
    # Checkpoints 2, 4, 6, ...: every second one of them stays, and the newest two.
    assert not {4, 8, 12, 14} & set(removed)
    report = audit(over.bus, over.topics, over.store)
    assert not report.violations
    assert read_history(over.bus, over.topics, VirtualClock()).kept.isdisjoint(removed)


def test_every_version_that_is_gone_is_made_again_bit_for_bit(over: Cluster) -> None:
    removed, rebuilt = missing(over), list[Rebuilt]()
    again = rebuilder(over, rebuilt)
    history = read_history(over.bus, over.topics, VirtualClock())
    for version in removed:
        path = again.weights(version)
        assert path == over.store.weights_path(history.digest_of(version))
        assert over.store.verify(history.digest_of(version))
    assert [entry.version for entry in rebuilt] == removed
    assert all(
        rebuilt.base % 4 == 0 and rebuilt.base + rebuilt.steps == rebuilt.version
        for rebuilt in rebuilt
    )
    assert "rebuilding it from" in rebuilt[0].line and rebuilt[0].digest[:12] in rebuilt[0].line
    assert again.weights(removed[0]).is_file() and len(rebuilt) == len(removed)
    for version in removed:  # as they were, for the other tests
        over.store.drop_weights(history.digest_of(version))


def test_machine_that_makes_other_bytes_writes_nothing(over: Cluster) -> None:
    removed = missing(over)
    before = over.store.everything()
    with pytest.raises(ReplayDiverged, match=f"version {removed[0]} cannot be rebuilt here"):
        rebuilder(over, [], flavour="elsewhere").weights(removed[0])
    assert over.store.everything() == before


def test_version_that_never_was_is_refused(over: Cluster) -> None:
    with pytest.raises(UsageError, match="was not published"):
        rebuilder(over, []).weights(STEPS + 1)


def test_steps_are_replayed_from_the_checkpoints_that_are_left(over: Cluster) -> None:
    lines = over.replayed(7, STEPS)
    assert [line.replayed.step for line in lines] == list(range(4, STEPS))
    assert all(line.replayed.equal for line in lines)


def test_prune_names_orphans_and_what_retention_drops_and_deletes_only_those(
    tmp_path: Path,
) -> None:
    config = make_config(run__steps=7, trainer__checkpoint_every=2)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        cluster.run()
        orphan = cluster.store.publish_weights(Writer(1.0))
        unfinished = cluster.store.root / "optimizer" / ".tmp-1-0"
        unfinished.write_bytes(b"half")
        clock, bus, topics, store = VirtualClock(), cluster.bus, cluster.topics, cluster.store
        plan = plan_prune(bus, topics, store, keep_every=0, stopped=False, clock=clock)
        assert {digest_in(candidate.file.name) for candidate in plan.candidates} == {
            orphan.digest,
            "",
        }
        assert {candidate.why for candidate in plan.candidates} == {
            "orphan"
        } and plan.versions == ()
        plan = plan_prune(bus, topics, store, keep_every=2, stopped=False, clock=clock)
        # Checkpoints 2, 4, 6: 4 by its number, 4 and 6 as the newest; 7 and 6 as the last ones.
        assert plan.versions == (1, 2, 3, 5)
        assert "not kept: 4 of the versions 1 to 5; `dora-pipe export policy small " in plan.note
        before = len(store.everything())
        assert prune(bus, topics, store, plan, user="u", clock=clock) == len(plan.candidates)
        assert len(store.everything()) == before - len(plan.candidates)
        assert missing(cluster) == [1, 2, 3, 5]
        report = audit(bus, topics, store)
        assert not report.violations
        again = plan_prune(bus, topics, store, keep_every=2, stopped=False, clock=clock)
        assert again.candidates == () and again.versions == () and again.note == plan.note


def test_what_was_made_again_and_what_a_dead_trainer_left_is_pruned(tmp_path: Path) -> None:
    config = make_config(run__steps=6, trainer__checkpoint_every=2, store__keep_every=1)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        cluster.run()
        (first, *_) = missing(cluster)
        rebuilder(cluster, []).weights(first)
        plan = plan_prune(
            cluster.bus,
            cluster.topics,
            cluster.store,
            keep_every=0,
            stopped=False,
            clock=VirtualClock(),
        )
        assert {candidate.why for candidate in plan.candidates} == {"dropped before"}
        assert first in {candidate.version for candidate in plan.candidates} and plan.versions == ()
        assert plan.freed_bytes == sum(candidate.file.bytes for candidate in plan.candidates) > 0


def test_run_that_is_not_finished_is_pruned_only_if_it_is_said_to_be_stopped(
    tmp_path: Path,
) -> None:
    config = make_config(run__steps=8, trainer__checkpoint_every=2)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        cluster.until(lambda: cluster.version >= 4)
        cluster.store.publish_weights(Writer(1.0))
        where = (cluster.bus, cluster.topics, cluster.store)
        with pytest.raises(UsageError, match="is not finished"):
            plan_prune(*where, keep_every=1, stopped=False, clock=VirtualClock())
        plan = plan_prune(*where, keep_every=1, stopped=True, clock=VirtualClock())
        assert plan.versions == ()
        assert {candidate.why for candidate in plan.candidates} == {"orphan"}


def test_record_that_drops_what_is_in_use_is_rejected_by_the_run(tmp_path: Path) -> None:
    with Cluster(tmp_path, make_config(run__steps=4), on_disk=False) as cluster:
        cluster.until(lambda: cluster.version >= 1)
        cluster.tell(VersionsDropped(at_ns=0, user="u", versions=(cluster.version,)))
        machine = cluster.roles[ORCHESTRATOR].machine
        cluster.until(lambda: machine.state.counters.rejected == 1)
        assert "is in use" in machine.state.counters.rejection
        cluster.run()
