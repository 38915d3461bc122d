"""The fold behind the pages: which record is shown as a trajectory's own, and every sum."""

from __future__ import annotations

import pytest

from dora_pipe.schemas.control import Command
from dora_pipe.schemas.rounds import (
    Fence,
    GroupSpec,
    Place,
    PlacedRequest,
    PlacedSibling,
    StopRun,
)
from dora_pipe.ui import book as book_module
from dora_pipe.ui.overview import overview
from dora_pipe.ui.rows import PHASES
from tests.support import orchestrator_records as records
from tests.support.told_run import SECOND_NS
from tests.support.ui_stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A run that has begun."""
    return Stage()


def test_placed_and_logged_request_becomes_a_row(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0)
    stage.place(spec, "w0", epoch)
    stage.log(spec, epoch, rewards=(1.0, None), offset=40)
    first, second = (stage.book.trajectories[f"{spec.group}-00{one}"] for one in (0, 1))
    assert (first.worker, first.reward, first.offset, first.tokens) == ("w0", 1.0, 40, 20)
    assert (second.reward, second.offset) == (None, 41)
    assert [one.reason for one in first.placements] == ["its turn"]


def test_record_of_an_older_attempt_does_not_count(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0)
    stage.place(spec, "w0", epoch)
    stage.place(spec, "w0", epoch, attempt=2)
    stage.log(spec, epoch, attempt=1)
    assert stage.book.not_counting == 2
    stage.log(spec, epoch, attempt=2, offset=7)
    stage.log(spec, epoch, attempt=2, offset=9)
    assert stage.book.not_counting == 4
    assert stage.book.trajectories[f"{spec.group}-000"].offset == 7


def test_record_of_a_fenced_worker_does_not_count(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0)
    stage.place(spec, "w0", epoch)
    stage.decide(Fence(reason="silent", worker="w0", epoch=epoch))
    stage.log(spec, epoch)
    assert stage.book.not_counting == 2
    assert stage.book.workers[epoch].gone_why == "fenced: silent"


def test_step_sums_up_its_batch(stage: Stage) -> None:
    epoch = stage.worker()
    specs = [stage.group(0), stage.group(1)]
    for number, spec in enumerate(specs):
        stage.place(spec, "w0", epoch)
        stage.log(spec, epoch, rewards=(1.0, None) if number else (1.0, 0.0), tokens=20 + number)
    stage.train(0, *specs)
    (step,) = stage.book.steps
    assert (step.rewards, step.reward_sum, step.invalid) == (3, 2.0, 1)
    assert step.means == (0.5, 1.0)
    assert step.staleness == (0, 0)
    assert step.bound == 1
    assert step.tokens == (20, 20, 21, 21)
    assert step.waited_s == pytest.approx((step.taken_ns - step.free_ns) / 1e9)
    assert [stage.book.groups[spec.group].fate for spec in specs] == ["trained", "trained"]
    assert stage.book.version == 1


def test_second_commit_of_a_step_counts_for_nothing(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0)
    stage.place(spec, "w0", epoch)
    stage.log(spec, epoch)
    stage.train(0, spec)
    before = len(stage.book.steps), dict(stage.book.group_fates)
    stage.fact(records.committed(0, (stage.taken(spec),)))
    assert (len(stage.book.steps), dict(stage.book.group_fates)) == before


def test_time_of_a_trained_trajectory_is_cut_where_it_changed_hands(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0)
    stage.now_ns += 2 * SECOND_NS
    stage.place(spec, "w0", epoch)  # 3 s after the dispatch
    stage.now_ns += 4 * SECOND_NS
    stage.log(spec, epoch)  # 5 s later
    stage.now_ns += 6 * SECOND_NS
    stage.train(0, spec)  # taken 7 s later, committed 1 s after that
    ((count, *found),) = stage.book.times.values()
    assert count == 2
    seconds = {name: one / count for name, one in zip(PHASES, found, strict=True)}
    assert seconds == {"queued": 3, "worker": 5, "siblings": 0, "batch": 7, "training": 1}


def test_every_trajectory_of_an_ended_training_group_has_a_fate(stage: Stage) -> None:
    epoch = stage.worker()
    trained, filtered, failed, open_ = (stage.group(one) for one in range(4))
    for spec in (trained, filtered):
        stage.place(spec, "w0", epoch)
        stage.log(spec, epoch)
    stage.train(0, trained)
    stage.end(filtered, "filtered")
    stage.end(failed, "failed", "no sibling is valid")
    assert dict(stage.book.group_fates) == {"trained": 1, "filtered": 1, "failed": 1}
    assert stage.book.groups[open_.group].fate == "open"
    found = overview(stage.book)
    assert sum(row["n"] for row in found["fates"]) == 6
    assert found["totals"]["open"] == 1


def test_evaluation_is_apart_from_training(stage: Stage) -> None:
    epoch = stage.worker()
    spec = stage.group(0, purpose="eval")
    stage.place(spec, "w0", epoch)
    stage.log(spec, epoch, rewards=(1.0, 0.0))
    stage.end(spec, "evaluated")
    found = overview(stage.book)
    assert found["evaluation"] == {"version": [0], "reward": [0.5], "n": [2]}
    assert found["fates"] == []
    assert stage.book.sampled_from == {}


def test_request_that_failed_leaves_its_slot_and_its_error(stage: Stage) -> None:
    epoch = stage.worker(slots=2)
    spec = stage.group(0)
    stage.place(spec, "w0", epoch)
    filling = stage.book.workers[epoch].filling
    assert filling.requests == 2
    place = next(iter(_requests(spec, epoch)))
    stage.fact(records.failed(place))
    assert filling.requests == 1
    row = stage.book.trajectories[place.trajectory]
    assert row.errors == ["attempt 1: EngineError: test"]
    stage.fact(records.failed(place))
    assert filling.requests == 1, "who is told twice lets go once"


def test_request_that_moves_is_taken_from_the_worker_that_had_it(stage: Stage) -> None:
    first, second = stage.worker("w0"), stage.worker("w1")
    spec = stage.group(0)
    stage.place(spec, "w0", first)
    stage.place(spec, "w1", second, attempt=2)
    fillings = [stage.book.workers[one].filling.requests for one in (first, second)]
    assert fillings == [0, 2]


def test_decisions_are_told_with_their_reasons_and_the_oldest_go(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "DECISIONS_MAX", 3)
    short = Stage()
    for step in range(4):
        short.fact(Command(at_ns=0, user="u", verb="set", args={"step": step}))
    assert len(short.book.decisions) == 3
    assert short.book.counts["command"] == 4
    stage.decide(StopRun(reason="all steps are committed"))
    assert stage.book.stopped
    assert stage.book.decisions[-1].reason == "all steps are committed"


def test_facts_of_strangers_change_nothing(stage: Stage) -> None:
    before = dict(stage.book.trajectories)
    stranger = Stage().group(9)
    stage.log(stranger, 77)
    stage.end(stranger, "failed")
    assert stage.book.trajectories == before
    assert dict(stage.book.group_fates) == {}


def test_book_without_anything_has_an_overview() -> None:
    found = overview(book_module.Book("empty"))
    assert found["run"]["name"] == "empty"
    assert found["run"]["version"] == -1
    assert found["timeline"]["rows"] == []


def _requests(spec: GroupSpec, epoch: int) -> list[PlacedRequest]:
    siblings = (PlacedSibling(sibling=0, attempt=1),)
    return Place(reason="", spec=spec, worker="w0", epoch=epoch, siblings=siblings).requests()
