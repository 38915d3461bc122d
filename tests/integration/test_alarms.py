"""Tests of alarms printed by `run`: each alarm once, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.alarms import Alarms
from dora_pipe.observe.progress import RunProgress
from dora_pipe.observe.top import frame
from dora_pipe.observe.waits import summarise
from dora_pipe.observe.why import why_now
from dora_pipe.producers.tasks.calls import RewardCall, TaskEvent, TaskFailed
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import Command
from tests.support.cluster import ORCHESTRATOR, TICK_NS, Cluster, make_config
from tests.support.inline_tasks import InlineTasks

SECOND_TICKS = 1_000_000_000 // TICK_NS


def follow(cluster: Cluster) -> RunProgress:
    lease_s = cluster.config.timing.lease_s
    alarms = Alarms(cluster.bus, cluster.topics, lease_s=lease_s, clock=cluster.clock)
    return RunProgress(cluster.bus, cluster.topics, alarms=alarms)


def alarms(progress: RunProgress) -> list[str]:
    return [line for line in progress.lines() if line.startswith("ALARM")]


@pytest.fixture
def sound(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, make_config(run__steps=30), on_disk=False) as cluster:
        yield cluster


def test_sound_run_raises_no_alarm(sound: Cluster) -> None:
    progress = follow(sound)
    texts = []
    while sound.roles:
        sound.tick()
        texts += alarms(progress)
    # Those who left in order are not missed, however long ago that was.
    sound.clock.ns += 60 * 10**9
    removed = [line for line in alarms(progress) if "ALARM w" in line]
    progress.close()
    assert (texts, removed) == ([], [])
    assert len(progress.steps) == 30


def test_reward_that_does_not_come_is_an_alarm_that_names_worker_and_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = InlineTasks(held={RewardCall})
    monkeypatch.setattr("dora_pipe.config.model.ALARM_S", 1.0)
    config = make_config()
    with Cluster(tmp_path, config, on_disk=False, workers=("w0",), tasks=lambda: tasks) as cluster:
        progress = follow(cluster)
        machine = cluster.roles["w0"].machine
        cluster.until(lambda: machine.requests.in_phase(Phase.REWARDING) > 0)
        first = [row.place.trajectory for row in machine.requests.by_key.values()]
        cluster.ticks(SECOND_TICKS // 2)
        assert alarms(progress) == []
        texts = []
        for _ in range(40):
            cluster.ticks(SECOND_TICKS // 20)
            texts += alarms(progress)
        progress.close()
    rewards = [line for line in texts if line.startswith("ALARM w0: ") and "rewards" in line]
    assert len(rewards) == 1
    assert any(f"trajectory {name}" in rewards[0] for name in first)


def test_pause_that_a_user_asked_for_raises_no_alarm_while_it_lasts_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.config.model.ALARM_S", 1.0)
    monkeypatch.setattr("dora_pipe.config.model.ALARM_WORK_S", 1.0)
    config = make_config(run__steps=6)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        progress = follow(cluster)
        cluster.until(lambda: cluster.version == 2)
        texts: list[str] = []
        shown: list[str] = []
        for verb in ("pause", "resume"):
            cluster.tell(Command(at_ns=cluster.clock.wall_ns(), user="ada", verb=verb))
            for _ in range(60):
                cluster.ticks(SECOND_TICKS // 20)
                texts += alarms(progress)
                screen = frame(progress, cluster.clock.wall_ns())
                shown += [line.text for line in screen.waits.lines if "ALARM" in line.text]
            answer = why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())
            texts += answer.alarms
        assert (texts, shown) == ([], [])
        assert progress.over
        with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
            assert summarise(cluster.bus, cluster.topics, catalogue).alarms == ()
        progress.close()


def test_dead_trainer_is_said_once_with_its_last_word(sound: Cluster) -> None:
    progress = follow(sound)
    sound.until(lambda: sound.version == 2)
    assert alarms(progress) == []
    sound.kill("trainer")
    texts = []
    for _ in range(30):
        sound.ticks(SECOND_TICKS // 10)
        texts += alarms(progress)
    assert len(texts) == 1
    assert texts[0].startswith("ALARM trainer: nothing heard for 1.")
    sound.start("trainer")
    sound.ticks(SECOND_TICKS // 2)
    assert alarms(progress) == []
    progress.close()


def test_roles_of_a_run_that_halts_are_not_missed(tmp_path: Path) -> None:
    def broken(call: RewardCall) -> TaskEvent:
        return TaskFailed(request=call.request, error="KeyError", message="'answr'")

    def tasks() -> InlineTasks:
        return InlineTasks(reward=broken)

    with Cluster(tmp_path, make_config(), on_disk=False, tasks=tasks) as cluster:
        progress = follow(cluster)
        request: list[str] = []

        def halted() -> bool:
            request.extend(alarms(progress))
            return ORCHESTRATOR not in cluster.roles

        cluster.until(halted)
        cluster.ticks(2 * SECOND_TICKS)
        request += alarms(progress)
        assert progress.halted and request == []
        progress.close()


def test_roles_that_were_asked_to_end_are_not_missed(sound: Cluster) -> None:
    progress = follow(sound)
    sound.until(lambda: sound.version == 2)
    assert alarms(progress) == []
    sound.kill("trainer")
    sound.ticks(2 * SECOND_TICKS)
    progress.stopping = True
    assert alarms(progress) == []
    progress.stopping = False
    assert [line[:28] for line in alarms(progress)] == ["ALARM trainer: nothing heard"]
    progress.close()


def test_worker_that_left_is_not_missed_and_its_next_incarnation_is(sound: Cluster) -> None:
    progress = follow(sound)
    sound.until(lambda: sound.version == 1)
    sound.stop("w2")
    sound.until(lambda: "w2" not in sound.roles)
    sound.ticks(2 * SECOND_TICKS)
    assert alarms(progress) == []
    sound.start("w2")
    sound.ticks(SECOND_TICKS // 5)
    sound.kill("w2")
    sound.ticks(SECOND_TICKS // 2)
    assert alarms(progress) == []
    texts = []
    for _ in range(20):
        if not sound.roles:
            break
        sound.ticks(SECOND_TICKS // 10)
        texts += alarms(progress)
    progress.close()
    assert [line[:27] for line in texts if "w2" in line] == ["ALARM w2: nothing heard for"]
