"""`why` on whole runs in virtual time: who is named when a role stands still, is frozen or dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.bus.port import Append
from dora_pipe.core.errors import UsageError
from dora_pipe.observe.why.answer import WhyAnswer, why_at, why_now, why_step
from dora_pipe.observe.why.chain import Node
from dora_pipe.producers.tasks.calls import RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode
from tests.support.cluster import TICK_NS, Cluster, make_config
from tests.support.inline_tasks import InlineTasks

SECOND_TICKS = 1_000_000_000 // TICK_NS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, make_config(), on_disk=False) as made:
        yield made


def now(cluster: Cluster) -> WhyAnswer:
    return why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())


def role(answer: WhyAnswer, name: str) -> Node:
    (found,) = [one for one in answer.roles if one.id == name]
    return found


def below(node: Node) -> Iterator[Node]:
    """A node and everything that explains it."""
    yield node
    for one in node.because:
        yield from below(one)


def test_run_that_has_not_started_has_an_answer(cluster: Cluster) -> None:
    answer = now(cluster)
    assert (answer.step, answer.over, answer.alarms) == (None, False, ())
    assert answer.head == "small: has not started"
    assert role(answer, "trainer").text == "trainer: has said nothing yet"


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
    assert trainer.text.startswith(f"trainer: waits for batch of step {answer.step}: ")
    assert trainer.since_s is not None and 2 < trainer.since_s < 4
    (orchestrator,) = trainer.because
    assert orchestrator.text.startswith("orchestrator: waits for groups g")
    groups = [one for one in orchestrator.because if one.kind != "more"]
    assert groups
    for group in groups:
        assert group.kind == "group" and f"{group.id} (version" in group.text
        for request in (one for one in group.because if one.kind != "more"):
            assert request.text.startswith(f"{request.id}: on w1 since ")
            (worker,) = request.because
            assert worker.id == "w1" and "w1: is silent since 4." in worker.text


def test_chain_ends_at_what_a_worker_waits_for(tmp_path: Path) -> None:
    tasks = InlineTasks(held={RewardCall})
    with Cluster(
        tmp_path, make_config(), on_disk=False, workers=("w0",), tasks=lambda: tasks
    ) as cluster:
        requests = cluster.roles["w0"].machine.requests
        cluster.until(lambda: requests.in_phase(Phase.REWARDING) == len(requests.by_key) > 4)
        cluster.ticks(SECOND_TICKS // 2)
        answer = now(cluster)
    (worker,) = {one.text for one in below(role(answer, "trainer")) if one.id == "w0"}
    assert worker.startswith("w0: waits for rewards (")
    held = [one for one in below(role(answer, "w0")) if one.kind == "trajectory"]
    assert held and all(one.text.startswith(f"{one.id}: on w0") for one in held)


def test_frozen_worker_is_called_silent_and_its_last_word_is_not_believed(tmp_path: Path) -> None:
    config = make_config(timing__lease_s=20.0, groups__per_step=2)
    with Cluster(tmp_path, config, on_disk=False, workers=("w0",)) as cluster:
        machine = cluster.roles["w0"].machine
        cluster.until(lambda: bool(machine.requests.by_key) and cluster.version == 1)
        cluster.roles["w0"].frozen = True
        cluster.ticks(5 * SECOND_TICKS)
        answer = now(cluster)
        worker = role(answer, "w0")
        assert worker.text.startswith("w0: is silent since 5.")
        assert "(fenced after 20 s); its last word was: " in worker.text
        assert (worker.alarm, answer.alarms) == (False, ())
        trainer = role(answer, "trainer")
        silent = [one for one in below(trainer) if one.id == "w0"]
        assert silent and all("is silent since" in one.text for one in silent)


def test_fenced_worker_is_out_and_dead_trainer_is_an_alarm(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 2)
    cluster.kill("w1")
    cluster.kill("trainer")
    cluster.ticks(3 * SECOND_TICKS)
    answer = now(cluster)
    assert "is out since" in role(answer, "w1").text
    assert "nothing heard for a lease" in role(answer, "w1").text
    trainer = role(answer, "trainer")
    assert trainer.alarm and trainer.text in answer.alarms
    orchestrator = role(answer, "orchestrator")
    assert orchestrator.text.startswith("orchestrator: waits for the trainer: step 2")
    assert [one.id for one in orchestrator.because] == ["trainer"]
    idle = role(answer, "w0")
    assert "waits for requests of version" in idle.text
    assert any("no group may be admitted yet" in one.text for one in below(idle))


def test_role_is_explained_once_and_then_only_named(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 2)
    cluster.kill("trainer")
    cluster.ticks(SECOND_TICKS)
    lines = list(now(cluster).tree())
    long = [line for line in lines if "no group may be admitted yet" in line]
    heads = [line for line in lines if line.startswith("w")]
    assert len(heads) == 3 and len(long) <= 3
    assert sum(line.startswith("  trainer: ") for line in lines) == 1


def test_pause_is_named_with_its_user(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 1)
    pause = Command(at_ns=0, verb="pause", args={}, user="u")
    cluster.bus.writer().append([Append(topic=cluster.topics.control, value=encode(pause))])
    state = cluster.roles["orchestrator"].machine.state
    cluster.until(lambda: state.paused and not state.groups)
    cluster.ticks(SECOND_TICKS)
    answer = now(cluster)
    assert role(answer, "orchestrator").text.startswith(
        "orchestrator: waits for the end of a pause"
    )
    assert any("the run is paused" in one.text for one in below(role(answer, "w0")))


def test_past_is_explained_as_it_was_then(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version == 2)
    cluster.kill("trainer")
    cluster.ticks(SECOND_TICKS)
    then_ns = cluster.clock.wall_ns()
    said = now(cluster)
    cluster.start("trainer")
    cluster.run()
    assert now(cluster).over
    again = why_at(cluster.bus, cluster.topics, at_ns=then_ns - 1)
    assert (again.step, again.training, again.over) == (said.step, said.training, False)
    assert role(again, "trainer").text == role(said, "trainer").text
    orchestrator = role(again, "orchestrator")
    assert orchestrator.text == role(said, "orchestrator").text
    assert [one.text for one in orchestrator.because] == [role(said, "trainer").text]


def test_step_is_explained_at_the_moment_before_its_batch_was_taken(cluster: Cluster) -> None:
    cluster.run()
    answer = why_step(cluster.bus, cluster.topics, step=0)
    assert (answer.step, answer.training) == (0, None)
    trainer = role(answer, "trainer")
    assert trainer.text.startswith("trainer: waits for batch of step 0")
    assert [one.kind for one in below(trainer)][:3] == ["role", "role", "group"]
    with pytest.raises(UsageError, match="the batch of step 99 has not been taken"):
        why_step(cluster.bus, cluster.topics, step=99)


def test_run_that_is_over_waits_for_nothing(cluster: Cluster) -> None:
    cluster.run()
    answer = now(cluster)
    assert answer.over and answer.alarms == ()
    assert answer.head == "small: is over, 8 steps"
    assert {one.text.partition(": ")[2] for one in answer.roles} == {"the run is over"}
