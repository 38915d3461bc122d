"""Tests of the versions that workers host, named by transition."""

from __future__ import annotations

from dora_pipe.orchestrator import serving
from dora_pipe.orchestrator.planner import may_still_admit
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def targets(stage: Stage) -> dict[str, int]:
    return {name: entry.target for name, entry in sorted(stage.state.workers.items())}


def test_orphan_with_only_busy_newer_hosts_makes_the_emptiest_a_victim() -> None:
    stage = Stage(
        rollout__prompts_per_step=1, rollout__group_size=4, staleness__max_staleness=3
    ).begin()
    stage.tell(records.command("set", staleness__async_batches=4.0))
    stage.worker("old", slots=8)
    stage.finish_group("g0000000000")
    stage.settle()
    stage.commit()
    stage.worker("a", slots=3)
    stage.worker("b", slots=2)
    assert targets(stage) == {"a": 1, "b": 1, "old": 0}
    stage.lose("old")
    stage.settle()
    assert serving.orphans(stage.state) == [0]
    assert serving.victims(stage.state) == {"b"}
    before, held = stage.state.ordinal, stage.running("b")
    for name in held:
        stage.finish(name)
        stage.settle()
    assert stage.state.ordinal == before, "nothing is admitted while a version has no host"
    assert targets(stage) == {"a": 1, "b": 0}
    assert {stage.placed[name].spec.version for name in stage.running("b")} == {0}


def three_versions() -> Stage:
    stage = Stage(
        run__steps=50,
        rollout__prompts_per_step=1,
        rollout__group_size=1,
        staleness__max_staleness=20,
        staleness__async_batches=21.0,
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
    assert serving.orphans(stage.state) == [0]
    assert serving.victims(stage.state) == {"a"}
    stage.finish(stage.running("b")[0])
    assert serving.victims(stage.state) == {"b"}
