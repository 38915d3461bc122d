"""Tests of marks: settings, stops, restarts, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dora_pipe.ledger.marks import stopped_ns
from dora_pipe.schemas.control import WorkerLeft
from dora_pipe.schemas.rounds import Fence
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS, CatalogueStage

RATE = "trainer.learning_rate"
STOPPED_S = 40
Story = Callable[[CatalogueStage], None]


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    stage.begins("orchestrator", 0)
    yield stage
    stage.catalogue.close()


def marks_of(stage: CatalogueStage) -> list[tuple[int, str, str]]:
    return [
        (row["step"], row["kind"], row["subject"])
        for row in stage.catalogue.records("select * from marks")
    ]


def trained(stage: CatalogueStage, step: int, incarnation: int) -> None:
    spec = stage.group(step, step)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    stage.train(step, spec)


def stopped(stage: CatalogueStage, *roles: str) -> None:
    stage.now_ns += STOPPED_S * SECOND_NS
    for role in roles:
        stage.begins("trainer" if role == "trainer" else "orchestrator", 1)


@pytest.mark.parametrize(
    ("args", "result"),
    [
        ({RATE: 0.5}, [(1, "setting", RATE)]),
        ({RATE: "abc"}, []),
        ({"rollout.group_size": 4}, []),
        ({RATE: 1e-5}, []),
    ],
)
def test_a_setting_that_changes_is_a_mark_of_the_step_it_is_in_force_from(
    stage: CatalogueStage, args: dict[str, object], result: list[tuple[int, str, str]]
) -> None:
    trained(stage, 0, stage.worker())
    stage.fact(records.command("set", **args))
    assert marks_of(stage) == result


def test_a_mark_says_both_values_and_who(stage: CatalogueStage) -> None:
    before = records.make_config().trainer.learning_rate
    stage.fact(records.command("set", **{RATE: 0.5}))
    stage.fact(records.command("set", **{RATE: 0.25}))
    assert stage.catalogue.query("select before, after, description from marks") == [
        (str(before), "0.5", f"{RATE} {before} -> 0.5, set by tester"),
        ("0.5", "0.25", f"{RATE} 0.5 -> 0.25, set by tester"),
    ]


def left(stage: CatalogueStage) -> None:
    stage.fact(WorkerLeft(at_ns=0, worker="w0", incarnation=4, reason="asked"))


FENCE = Fence(reason="silent", worker="w0", incarnation=4)
STORIES: dict[str, tuple[list[Story], list[tuple[int, str, str]]]] = {
    "all begin again": (
        [lambda stage: stopped(stage, "orchestrator", "trainer")],
        [(1, "resumed", "run")],
    ),
    "all begin again, the trainer first": (
        [lambda stage: stopped(stage, "trainer", "orchestrator")],
        [(1, "resumed", "run")],
    ),
    "the trainer alone": (
        [lambda stage: stopped(stage, "trainer"), lambda stage: stage.decide()],
        [(1, "restarted", "trainer")],
    ),
    "the orchestrator alone": (
        [lambda stage: stopped(stage, "orchestrator"), lambda stage: trained(stage, 1, 4)],
        [(1, "restarted", "orchestrator")],
    ),
    "a worker is killed": ([lambda stage: stage.decide(FENCE)], [(1, "lost", "w0")]),
    "a worker ended with the run": (
        [
            lambda stage: stopped(stage, "orchestrator", "trainer"),
            lambda stage: stage.decide(FENCE),
        ],
        [(1, "resumed", "run")],
    ),
    "a worker leaves": ([left], []),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_role_that_begins_again_or_is_lost_is_a_mark(stage: CatalogueStage, name: str) -> None:
    assert stage.worker() == 4
    trained(stage, 0, 4)
    story, result = STORIES[name]
    for happens in story:
        happens(stage)
    assert marks_of(stage) == result


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("orchestrator trainer", ""),
        ("trainer orchestrator", ""),
        ("orchestrator", "trainer"),
        ("", "orchestrator trainer"),
        ("", "trainer orchestrator"),
    ],
)
def test_a_time_in_which_the_run_was_stopped_is_nobodys_wait(
    stage: CatalogueStage, before: str, between: str
) -> None:
    incarnation = stage.worker()
    trained(stage, 0, incarnation)
    spec = stage.group(1, 1)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    if before:
        stopped(stage, *before.split())
    groups = stage.take(1, spec)
    if not before:
        stage.now_ns += STOPPED_S * SECOND_NS
    for role in between.split():
        stage.begins("trainer" if role == "trainer" else "orchestrator", 1)
    stage.now_ns += SECOND_NS
    stage.fact(records.committed(1, groups))
    (row,) = stage.catalogue.records("select * from steps where step = 1")
    assert row["seconds"] < STOPPED_S
    assert row["seconds"] + row["stopped_s"] == pytest.approx(
        (row["committed_ns"] - row["free_ns"]) / 1e9
    )
    pieces = dict(
        stage.catalogue.query("select kind, sum(seconds) from waits where step = 1 group by kind")
    )
    assert pieces.pop("stopped", 0.0) == pytest.approx(
        min(row["stopped_s"], (row["taken_ns"] - row["free_ns"]) / 1e9 - row["waited_s"])
    )
    assert sum(pieces.values()) == pytest.approx(row["waited_s"])


def test_a_stop_lasts_until_both_roles_are_back_whatever_a_failed_resume_wrote(
    stage: CatalogueStage,
) -> None:
    trained(stage, 0, stage.worker())
    since_ns = stage.now_ns
    stage.now_ns += STOPPED_S * SECOND_NS
    stage.begins("orchestrator", 1)
    stage.decide()
    stage.now_ns += STOPPED_S * SECOND_NS
    stage.begins("orchestrator", 2)
    stage.begins("trainer", 1)
    assert stage.catalogue.query("select since_ns, at_ns from marks where kind = 'resumed'") == [
        (since_ns, stage.now_ns)
    ]


@pytest.mark.parametrize(
    ("from_ns", "until_ns", "result"), [(0, 4, 2), (3, 4, 1), (5, 9, 0), (0, 20, 8)]
)
def test_stopped_time_is_counted_within_bounds(from_ns: int, until_ns: int, result: int) -> None:
    assert stopped_ns([(2, 5), (10, 15)], from_ns, until_ns) == result
