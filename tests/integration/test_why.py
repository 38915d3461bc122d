"""`why` on whole runs in virtual time: who is named when a role stands still, is frozen or dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.observe.why import RoleAnswer, WhyAnswer, why_at, why_now
from dora_pipe.producers.tasks.calls import RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import Command
from tests.support.cluster import TICK_NS, Cluster, make_config
from tests.support.inline_tasks import InlineTasks

SECOND_TICKS = 1_000_000_000 // TICK_NS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, make_config(), on_disk=False) as cluster:
        yield cluster


def now(cluster: Cluster) -> WhyAnswer:
    return why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())


def role(answer: WhyAnswer, name: str) -> RoleAnswer:
    (role,) = [role for role in answer.roles if role.role == name]
    return role


def test_run_that_has_not_started_has_an_answer(cluster: Cluster) -> None:
    answer = now(cluster)
    assert (answer.step, answer.over, answer.alarms) == (None, False, ())
    assert answer.head == "small: not started"
    assert role(answer, "trainer").text == "no status yet"


def test_chain_leads_from_the_trainer_to_the_worker_that_has_the_missing_request(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, make_config(timing__lease_s=60.0), on_disk=False) as cluster:
        requests = cluster.roles["w1"].machine.requests
        cluster.until(lambda: cluster.version >= 2 and requests.in_phase(Phase.RUNNING) > 1)
        cluster.roles["w1"].frozen = True
        cluster.ticks(4 * SECOND_TICKS)
        answer = now(cluster)
    trainer = role(answer, "trainer")
    assert trainer.text.startswith(f"waiting for batch of step {answer.step}: ")
    assert trainer.since_s is not None and 2 < trainer.since_s < 4
    orchestrator, group, request, worker = trainer.chain
    assert orchestrator.startswith("orchestrator: waiting for groups g")
    name = group.partition(" (version")[0]
    assert name in orchestrator
    assert request.startswith(f"{name}-") and ": on w1 for " in request
    assert re.match(r"w1: silent: .* \(4\.[0-9] s\)$", worker)
    assert answer.trainer_chain() == (trainer.line, *trainer.chain)


def test_chain_ends_at_what_a_worker_waits_for(tmp_path: Path) -> None:
    tasks = InlineTasks(held={RewardCall})
    with Cluster(
        tmp_path, make_config(), on_disk=False, workers=("w0",), tasks=lambda: tasks
    ) as cluster:
        requests = cluster.roles["w0"].machine.requests
        cluster.until(lambda: requests.in_phase(Phase.REWARDING) == len(requests.by_key) > 4)
        cluster.ticks(SECOND_TICKS // 2)
        answer = now(cluster)
    worker = role(answer, "w0")
    assert worker.text.startswith("waiting for rewards (")
    assert ": on w0 for " in worker.end
    assert any(
        line.startswith("w0: waiting for rewards (") for line in role(answer, "trainer").chain
    )


def test_frozen_worker_is_called_silent_and_its_last_word_is_not_believed(tmp_path: Path) -> None:
    config = make_config(timing__lease_s=20.0, rollout__prompts_per_step=2)
    with Cluster(tmp_path, config, on_disk=False, workers=("w0",)) as cluster:
        machine = cluster.roles["w0"].machine
        cluster.until(lambda: bool(machine.requests.by_key) and cluster.version == 1)
        cluster.roles["w0"].frozen = True
        cluster.ticks(5 * SECOND_TICKS)
        answer = now(cluster)
    worker = role(answer, "w0")
    assert worker.since_s is not None and 4.9 < worker.since_s < 6
    assert "(fenced after 20 s); last status: " in worker.text
    assert answer.alarms == ()
    assert role(answer, "trainer").end == worker.line


def test_fenced_worker_is_out_and_dead_trainer_is_an_alarm(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 2)
    cluster.kill("w1")
    cluster.kill("trainer")
    cluster.ticks(3 * SECOND_TICKS)
    answer = now(cluster)
    assert role(answer, "w1").text == "fenced: nothing heard for a lease"
    trainer = role(answer, "trainer")
    assert trainer.wait == "silent" and set(trainer.alarms) <= set(answer.alarms)
    assert [alarm[:29] for alarm in trainer.alarms] == ["ALARM trainer: nothing heard "]
    orchestrator = role(answer, "orchestrator")
    assert orchestrator.text.startswith("waiting for the trainer: step 2")
    assert orchestrator.chain == (trainer.line,)
    idle = role(answer, "w0")
    assert "waiting for requests of version" in idle.text
    assert "; no group may start: staleness." in idle.text
    assert idle.chain == (orchestrator.line, trainer.line)


def test_pause_is_named_with_its_user(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 1)
    cluster.tell(Command(at_ns=0, verb="pause", args={}, user="u"))
    state = cluster.roles["orchestrator"].machine.state
    cluster.until(lambda: state.paused and not state.groups)
    cluster.ticks(SECOND_TICKS)
    answer = now(cluster)
    assert role(answer, "orchestrator").text.startswith("waiting for the end of a pause")
    assert role(answer, "w0").end == role(answer, "orchestrator").line


def test_past_is_explained_as_it_was_then(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 2)
    cluster.kill("trainer")
    cluster.ticks(SECOND_TICKS)
    then_ns = cluster.clock.wall_ns()
    text = now(cluster)
    cluster.start("trainer")
    cluster.run()
    assert now(cluster).over
    again = why_at(cluster.bus, cluster.topics, at_ns=then_ns - 1)
    assert (again.step, again.training, again.over) == (text.step, text.training, False)
    for name in ("trainer", "orchestrator"):
        assert role(again, name).line == role(text, name).line
    assert role(again, "orchestrator").chain == (role(text, "trainer").line,)


def test_run_that_is_over_waits_for_nothing(cluster: Cluster) -> None:
    cluster.run()
    answer = now(cluster)
    assert answer.over and answer.alarms == ()
    assert answer.head == "small: finished, 8 steps"
    assert {role.text for role in answer.roles} == {"run finished"}
