"""Which worker hosts which version: kept, freed, orphaned, given way; transitions are from-to."""

from __future__ import annotations

from dora_pipe.orchestrator import hosting
from dora_pipe.orchestrator.planner import decide, may_still_admit
from dora_pipe.schemas.rounds import Assign, Dispatch, Place
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def targets(stage: Stage) -> dict[str, int]:
    """Version by worker."""
    return {name: one.target for name, one in sorted(stage.state.workers.items())}


def test_serving_remains_on_its_version_until_it_has_no_open_request() -> None:
    stage = Stage(groups__per_step=1, groups__size=1).begin()
    stage.worker("w0", slots=2)
    assert stage.running() == ["g0000000000-000", "g0000000001-000"]
    stage.finish("g0000000000-000")
    stage.settle()
    stage.commit()
    stage.settle()
    assert targets(stage) == {"w0": 0}, "one request of version 0 runs on"
    assert stage.state.workers["w0"].room == 1, "and nothing new is given to it meanwhile"
    stage.finish("g0000000001-000")
    assigned = [one for one in stage.plan() if isinstance(one, Assign)]
    assert [(one.worker, one.version, one.digest) for one in assigned] == [
        ("w0", 1, records.weights(1))
    ]


def test_two_workers_host_different_versions_at_the_same_time() -> None:
    stage = Stage(groups__per_step=1, groups__size=2).begin()
    stage.worker("w0", slots=2)
    stage.worker("w1", slots=2)
    done = stage.running("w0")
    for name in stage.running():
        if name in done:
            stage.finish(name)
    stage.settle()
    stage.commit()
    stage.settle()
    assert sorted(targets(stage).values()) == [0, 1]


def test_loading_remains_loading_when_the_version_advances() -> None:
    stage = Stage(groups__per_step=1, groups__size=1, staleness__max_staleness=3).begin()
    stage.tell(records.command("set", staleness__in_flight_batches=4.0))
    stage.worker("w0", slots=1)
    stage.finish("g0000000000-000")
    stage.plan()
    stage.join("w1", slots=1)
    stage.plan()
    assert targets(stage)["w1"] == 0
    stage.commit()
    assert not [one for one in stage.plan() if isinstance(one, Assign) and one.worker == "w1"]
    stage.load()
    again = [one for one in stage.plan() if isinstance(one, Assign) and one.worker == "w1"]
    assert [one.version for one in again] == [1]


def test_worker_is_not_moved_to_the_newest_version_without_work_for_it() -> None:
    stage = Stage(run__steps=1, groups__per_step=1).begin()
    stage.worker("w0", slots=4)
    stage.join("w1", slots=4)
    assert [one for one in stage.plan() if isinstance(one, Assign)] == []


def test_orphaned_version_gets_a_free_worker_before_new_work() -> None:
    stage = Stage(groups__per_step=1, groups__size=1).begin()
    stage.worker("w0", slots=2)
    stage.finish("g0000000000-000")
    stage.settle()
    stage.commit()
    stage.settle()
    stage.join("w1", slots=2)
    stage.lose("w0")
    decisions = stage.plan()
    assigned = [one for one in decisions if isinstance(one, Assign)]
    assert [(one.worker, one.version) for one in assigned] == [("w1", 0)]
    assert "no host" in assigned[0].reason


def test_orphan_with_only_busy_newer_hosts_makes_the_emptiest_a_victim() -> None:
    stage = Stage(groups__per_step=1, groups__size=4, staleness__max_staleness=3).begin()
    stage.tell(records.command("set", staleness__in_flight_batches=4.0))
    stage.worker("old", slots=8)
    stage.finish_group("g0000000000")
    stage.settle()
    stage.commit()
    stage.worker("a", slots=3)
    stage.worker("b", slots=2)
    assert targets(stage) == {"a": 1, "b": 1, "old": 0}
    stage.lose("old")
    stage.settle()
    assert hosting.orphans(stage.state) == [0]
    assert hosting.victims(stage.state) == {"b"}
    before, held = stage.state.ordinal, stage.running("b")
    for name in held:
        stage.finish(name)
        stage.settle()
    assert stage.state.ordinal == before, "nothing is admitted while a version has no host"
    assert targets(stage) == {"a": 1, "b": 0}
    assert {stage.placed[name].spec.version for name in stage.running("b")} == {0}


def three_versions() -> Stage:
    """`v0` runs one request of version 0, `v1` two of version 1, `a` and `b` three of version 2."""
    stage = Stage(
        run__steps=50,
        groups__per_step=1,
        groups__size=1,
        staleness__max_staleness=20,
        staleness__in_flight_batches=21.0,
    ).begin()
    stage.worker("v0", slots=2)
    for trained in ("g0000000000-000", "g0000000001-000"):
        stage.finish(trained)
        stage.settle()
        stage.commit()
        if trained == "g0000000000-000":
            stage.worker("v1", slots=2)
    stage.worker("a", slots=3)
    stage.worker("b", slots=3)
    assert targets(stage) == {"a": 2, "b": 2, "v0": 0, "v1": 1}
    open_ = {name: len(stage.running(name)) for name in targets(stage)}
    assert open_ == {"a": 3, "b": 3, "v0": 1, "v1": 2}
    assert may_still_admit(stage.state) > 0
    return stage


def test_victim_is_of_the_newest_version_even_if_an_older_host_is_emptier() -> None:
    stage = three_versions()
    stage.lose("v0")
    stage.settle()
    assert hosting.orphans(stage.state) == [0]
    assert hosting.victims(stage.state) == {"a"}
    stage.finish(stage.running("b")[0])
    assert hosting.victims(stage.state) == {"b"}


def test_nothing_is_admitted_while_a_version_has_no_host_although_slots_are_free() -> None:
    stage = three_versions()
    stage.finish(stage.running("a")[0])
    stage.finish(stage.running("b")[0])
    admitted = stage.copy()
    assert [one for one in decide(admitted) if isinstance(one, Dispatch)], "but for the loss"
    stage.lose("v0")
    decisions = stage.plan()
    assert hosting.orphans(stage.state) == [0]
    assert not [one for one in decisions if isinstance(one, Dispatch)]


def test_worker_that_has_just_loaded_a_newer_version_gives_way_to_an_older_orphan() -> None:
    stage = Stage(groups__per_step=1, groups__size=2, staleness__max_staleness=3).begin()
    stage.worker("v0", slots=4)
    stage.finish_group("g0000000000")
    stage.settle()
    stage.commit()
    stage.join("w", slots=1)
    stage.plan()
    assert targets(stage) == {"v0": 0, "w": 1}
    stage.load()
    stage.plan()
    place = stage.placed[stage.running("w")[0]]
    stage.tell(records.failed(place))
    stage.lose("v0")
    (assigned,) = [one for one in stage.plan() if isinstance(one, Assign)]
    assert (assigned.worker, assigned.version) == ("w", 0)
    assert 1 in stage.state.queues, "version 1 waits, oldest first"


def test_one_worker_serves_versions_one_after_the_other_oldest_first() -> None:
    stage = Stage(groups__per_step=1, groups__size=1, staleness__max_staleness=1).begin()
    stage.worker("w0", slots=2)
    stage.finish("g0000000000-000")
    stage.settle()
    stage.commit()
    stage.settle()
    stage.join("w1", slots=2)
    stage.settle()
    assert targets(stage) == {"w0": 0, "w1": 1}
    stage.lose("w0")
    stage.settle()
    assert hosting.victims(stage.state) == {"w1"}
    hosted = []
    while not stage.state.done:
        for name in stage.running():
            stage.finish(name)
        hosted += [one.version for one in stage.settle() if isinstance(one, Assign)]
        if stage.state.training is not None:
            stage.commit()
    assert hosted[0] == 0
    assert hosted[1:] == sorted(hosted[1:]), "then only forwards"
    assert stage.state.counters.fates["trained"] == 4


def test_old_version_keeps_only_as_many_workers_as_its_requests_need() -> None:
    stage = Stage(groups__per_step=4, groups__size=1, groups__min_valid_siblings=1).begin()
    stage.worker("a", slots=4)
    stage.worker("b", slots=4)
    workers = list(stage.state.workers.values())
    assert [len(one.requests) for one in workers] == [4, 4]
    stage.finish(stage.running("b")[0])
    stage.finish(stage.running("b")[0])
    stage.finish(stage.running("a")[0])
    kept = hosting.kept(stage.state, 0)
    assert [one.name for one in kept] == ["a", "b"], "five open requests, four slots each"
    stage.finish(stage.running("b")[0])
    assert [one.name for one in hosting.kept(stage.state, 0)] == ["a"]


def test_draining_and_silent_workers_host_nothing() -> None:
    stage = Stage().begin()
    stage.worker("w0")
    stage.worker("w1")
    stage.tell(records.command("drain", worker="w0"))
    stage.lose("w1")
    assert stage.state.index.hosts == {}
    assert sorted(stage.state.index.draining) == ["w0"]
    assert sorted(stage.state.index.silent) == ["w1"]


def test_placements_pack_the_hosts_of_an_old_version_slots_first() -> None:
    stage = Stage(groups__size=1).begin()
    stage.join("a", slots=2, prefetch=1)
    stage.join("b", slots=2, prefetch=1)
    found: list[str] = []
    workers = [stage.state.workers[name] for name in ("a", "b")]
    for worker in workers:
        worker.target = worker.hosted = 0
    for worker in hosting.pack(stage.state, workers):
        worker.requests.add(f"r{len(found)}")
        found.append(worker.name)
    assert found == ["a", "a", "b", "b", "a", "b"]


def test_versions_placed_oldest_first() -> None:
    stage = Stage(groups__per_step=1, groups__size=2).begin()
    stage.worker("w0", slots=1)
    stage.finish_all()
    stage.commit()
    order = [one.spec.version for one in stage.settle() if isinstance(one, Place | Dispatch)]
    assert order == sorted(order)
