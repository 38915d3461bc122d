"""Tests of the wait summary: each second of a trainer's wait has a cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.pure.records import Append
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.waits import (
    Kind,
    Piece,
    RoleWaits,
    StepWait,
    Summary,
    piece_words,
    summarise,
    waits_of,
)
from dora_pipe.observe.why import ADVICE, WORDS
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.metrics import Wait, WorkerStatus
from dora_pipe.schemas.rounds import Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.golden.later_values import STATUS_SINCE
from tests.support.cluster import TICK_NS, Cluster, make_config

SECOND_NS = 1_000_000_000
SECOND_TICKS = SECOND_NS // TICK_NS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("summary")
    config = make_config(timing__lease_s=2.0)
    with pytest.MonkeyPatch.context() as delta:
        delta.setattr("dora_pipe.config.model.ALARM_S", 1.0)
        delta.setattr("dora_pipe.config.model.ALARM_WORK_S", 1.0)
        cluster = Cluster(directory, config, on_disk=False)
    with cluster:
        requests = cluster.roles["w1"].machine.requests
        cluster.until(lambda: cluster.version == 2 and requests.in_phase(Phase.RUNNING) > 1)
        cluster.roles["w1"].frozen = True
        cluster.ticks(3 * SECOND_TICKS)
        cluster.roles["w1"].frozen = False
        cluster.run()
        yield cluster


def role(waits: tuple[RoleWaits, ...], name: str) -> RoleWaits:
    (wait,) = [wait for wait in waits if wait.role == name]
    return wait


def summary_of(bus: Bus, topics: Topics) -> Summary:
    with closing(read_catalogue(bus, topics)) as catalogue:
        return summarise(bus, topics, catalogue)


def waits_in(bus: Bus, topics: Topics) -> list[StepWait]:
    with closing(read_catalogue(bus, topics)) as catalogue:
        return waits_of(catalogue)


def test_every_step_is_accounted_for_from_commit_to_commit(cluster: Cluster) -> None:
    waits = waits_in(cluster.bus, cluster.topics)
    assert [wait.step for wait in waits] == list(range(8))
    for before, after in pairwise(waits):
        assert before.committed_ns is not None
        assert before.free_ns <= before.taken_ns <= before.committed_ns == after.free_ns


def test_pieces_of_a_wait_add_up_to_it(cluster: Cluster) -> None:
    for wait in waits_in(cluster.bus, cluster.topics):
        assert sum(piece.seconds for piece in wait.pieces) == pytest.approx(wait.waited_s)
        assert all(piece.seconds > 0 and piece.version >= 0 for piece in wait.pieces)


def test_wait_for_a_frozen_worker_is_put_down_to_it(cluster: Cluster) -> None:
    (longest, *_) = summary_of(cluster.bus, cluster.topics).longest
    assert longest.waited_s > 1.2
    lost = {piece.kind: piece for piece in longest.pieces}["lost"]
    assert (lost.worker, lost.version) == ("w1", longest.version)
    assert lost.seconds > 1
    assert f"attempt lost on w1 (version {lost.version}) " in longest.text()


def test_summary_names_the_longest_waits_of_every_role(cluster: Cluster) -> None:
    summary = summary_of(cluster.bus, cluster.topics)
    assert (summary.steps, summary.over) == (8, True)
    assert [role.role for role in summary.roles] == ["trainer", "orchestrator", "w0", "w1", "w2"]
    for entry in summary.roles:
        assert 0 <= entry.waited_s <= entry.there_s * 1.02
        assert [seconds for *_, seconds in entry.waits] == sorted(
            (seconds for *_, seconds in entry.waits), reverse=True
        )
    trainer = role(summary.roles, "trainer")
    assert trainer.waits[0][1].startswith("attempt lost on ")
    assert role(summary.roles, "orchestrator").waits[0][1] in ("groups to finish", "the trainer")
    assert role(summary.roles, "w0").waits[0][1] == "requests"
    assert summary.head.startswith("small finished: 8 steps in ")
    first, longest, *rest = trainer.rows()
    assert (first[0], first[1]) == ("trainer", trainer.waited_s)
    assert longest[3:] == (trainer.waits[0][1], ADVICE["lost"])
    assert sum(row[1] for row in (longest, *rest)) == pytest.approx(trainer.waited_s)


def test_every_wait_that_has_a_name_has_advice_and_none_else() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    section = page.partition("### Wait names and alarms")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    listed = {name for line in table for name in re.findall(r"`([a-z]+)`", line.split("|")[2])}
    kinds = set(get_args(Kind))
    assert set(WORDS) <= set(ADVICE)
    assert listed | kinds | {"silent"} >= set(ADVICE)
    assert listed - set(ADVICE) == set()


def test_alarms_of_the_past_are_said_with_their_full_length(cluster: Cluster) -> None:
    alarms = summary_of(cluster.bus, cluster.topics).alarms
    (trainer,) = [alarm for alarm in alarms if alarm.startswith("ALARM trainer: ")]
    assert "for batch of step" in trainer and "(limit 1 s)" in trainer
    seconds = float(trainer.partition("waiting ")[2].partition(" s")[0])
    assert 1 < seconds < 3
    assert any(alarm.startswith("ALARM orchestrator: ") and "group" in alarm for alarm in alarms)


def test_batch_that_was_taken_before_there_was_a_trainer_kept_nobody_waiting() -> None:
    bus, topics = MemoryBus(MemoryLog()), Topics("r")
    bus.create([TopicSpec(name=name) for name in topics.all()])
    take = TakeBatch(step=0, attempt=1, groups=(), settings={}, reason="")
    round_ = Round(ordinal=0, incarnation=0, now_ns=10**18, control_next=0, decisions=(take,))
    bus.writer().append([Append(topic=topics.decisions, value=encode(round_))])
    (wait,) = waits_in(bus, topics)
    assert (wait.waited_s, wait.free_ns, wait.pieces) == (0.0, 10**18, ())


def test_pieces_of_many_versions_are_one_thing_to_wait_for() -> None:
    assert piece_words("sampling", "w1", {7}) == "sampling on w1 (version 7)"
    assert piece_words("sampling", "w1", {7, 3, 9}) == "sampling on w1 (versions 3-9)"
    assert (
        piece_words("admission", "", {0, 2})
        == "no group could start: staleness or in-flight limit (versions 0-2)"
    )


def test_run_without_waits_says_so_without_dividing_by_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, make_config(), on_disk=False) as cluster:
        summary = summary_of(cluster.bus, cluster.topics)
        assert (summary.steps, summary.over, summary.longest) == (0, False, ())
        assert summary.head == "small open: 0 steps in 0.0 s"


def test_line_of_a_step_whose_batch_was_there_is_short() -> None:
    ready = StepWait(step=4, free_ns=10, taken_ns=10, waited_s=0.0)
    assert ready.text() == "step 4: the batch was ready before the trainer"
    waited = StepWait(
        step=4,
        free_ns=0,
        taken_ns=2_000_000_000,
        waited_s=2.0,
        last="g0000000017-003",
        version=2,
        worker="w1",
        pieces=(Piece(kind="queue", seconds=0.5, version=2), Piece(kind="decision", seconds=1.5)),
    )
    assert waited.text() == (
        "step 4: the trainer waited 2.00 s for its batch; last trajectory g0000000017-003 "
        "(version 2) from w1: no free slot (version 2) 0.50 s; "
        "batch decision of the orchestrator 1.50 s"
    )
    only_parts = StepWait(step=4, free_ns=0, taken_ns=SECOND_NS, waited_s=0.0, early_s=1.0)
    assert "waited 0.00 s" in only_parts.text(), "its batch was not there before"
    ahead = StepWait(step=4, free_ns=0, taken_ns=2 * SECOND_NS, waited_s=1.25, early_s=0.75)
    assert ahead.text() == (
        "step 4: the trainer waited 1.25 s for its batch, computed parts of it for 0.75 s"
    )


def test_wait_without_news_lasted_until_the_heartbeat_before_the_next_status() -> None:
    bus, topics = MemoryBus(MemoryLog()), Topics("r")
    bus.create([TopicSpec(name=name) for name in topics.all()])
    wait = Wait(name="reward", description="rewards (1)", since_ns=0, blocking=True)
    statuses = [status(0, (wait,)), status(2 * SECOND_NS, ())]
    appends = [Append(topic=topics.metrics, key=b"w0", value=encode(text)) for text in statuses]
    bus.writer().append(appends)
    (role,) = [role for role in summary_of(bus, topics).roles if role.role == "w0"]
    assert role.waits == (("reward", "rewards", 1.75),), "to half a heartbeat of 0.5 s"


def status(at_ns: int, waits: tuple[Wait, ...]) -> WorkerStatus:
    return msgspec.structs.replace(STATUS_SINCE, worker="w0", at_ns=at_ns, waits=waits)
