"""Tests of sums and worker load on the overview page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace

from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.tables import StepRow
from dora_pipe.observe.web.health import finished_warnings
from dora_pipe.observe.web.overview import PHASES, overview
from dora_pipe.observe.web.timeline import SLICES_MAX, utilisation
from dora_pipe.observe.web.view import view_of
from dora_pipe.schemas.control import Command, RequestReleased
from dora_pipe.schemas.rounds import Fence, GroupSpec, Migrate, StopRun
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SAMPLES, SECOND_NS, START_NS, CatalogueStage
from tests.support.ui_stage import view_of_stage


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    yield stage
    stage.catalogue.close()


def _overview(stage: CatalogueStage) -> dict[str, Any]:
    return overview(view_of_stage(stage))


def _done(stage: CatalogueStage, ordinal: int, incarnation: int, **log: Any) -> GroupSpec:
    spec = stage.group(ordinal)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation, **log)
    return spec


def test_reward_of_a_step_is_valid_and_raw_with_the_middle_half_of_its_groups(
    stage: CatalogueStage,
) -> None:
    incarnation = stage.worker()
    first = _done(stage, 0, incarnation, rewards=(1.0, 0.0))
    second = _done(stage, 1, incarnation, rewards=(1.0, None), tokens=21)
    stage.train(0, first, second)
    overview = _overview(stage)
    expected = {
        "step": [0],
        "last": [0],
        "valid": [0.6667],
        "raw": [0.5],
        "reward_low": [0.625],
        "reward_high": [0.875],
        "invalid": [1],
        "n": [3],
        "p50": [20],
        "longest": [21],
        "bound": [1],
    }
    assert {name: overview["points"][name] for name in expected} == expected
    assert (overview["staleness"], overview["run"]["version"]) == ({"0": 2}, 1)


@pytest.mark.parametrize("steps", [399, 400, 401, 1000])
def test_long_runs_have_few_points_and_every_step_is_in_one(
    stage: CatalogueStage, steps: int
) -> None:
    stage.train(0, _done(stage, 0, stage.worker()))
    (step,) = (row for row in stage.builder.drain() if isinstance(row, StepRow))
    with closing(Catalogue()) as catalogue:
        catalogue.append(replace(step, step=number) for number in range(steps))
        result = overview(view_of(catalogue, "long"))["points"]
    assert len(result["step"]) == min(steps, 400)
    assert (result["step"][0], result["last"][-1], sum(result["n"])) == (0, steps - 1, 2 * steps)
    sizes = {last - first for first, last in zip(result["step"], result["last"], strict=True)}
    assert max(sizes) - min(sizes) <= 1
    assert all(a + 1 == b for a, b in zip(result["last"], result["step"][1:], strict=False))


def test_time_of_a_trained_trajectory_is_cut_where_it_changed_hands(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.now_ns += 2 * SECOND_NS
    stage.place(spec, incarnation)  # 3 s after the dispatch
    stage.now_ns += 4 * SECOND_NS
    stage.log(spec, incarnation)  # 5 s later
    stage.now_ns += 6 * SECOND_NS
    stage.train(0, spec)  # taken 7 s later, committed 1 s after that
    (row,) = _overview(stage)["times"]["rows"]
    assert (row["low"], row["high"], row["n"]) == (17, 32, SAMPLES)
    seconds = dict(zip(PHASES, row["seconds"], strict=True))
    assert seconds == {"queued": 3, "worker": 5, "samples": 0, "batch": 7, "training": 1}
    waits = _overview(stage)["waits"]["rows"]
    waited_s = stage.catalogue.query("select sum(waited_s) from steps")[0][0]
    assert sum(row[1] for row in waits) == pytest.approx(waited_s, abs=0.1)


def test_groups_are_counted_by_outcome(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    trained, filtered = (_done(stage, index, incarnation) for index in range(2))
    failed, _ = stage.group(2), stage.group(3)
    stage.train(0, trained)
    stage.end(filtered, "filtered")
    stage.end(failed, "failed", "no trajectory is valid")
    overview = _overview(stage)
    assert overview["totals"]["outcomes"] == {"trained": 1, "filtered": 1, "failed": 1}
    assert (overview["totals"]["groups"], overview["totals"]["open"]) == (4, 1)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 1023, 1024, 1025, 2**30, 2**30 + 1])
def test_lengths_lie_in_the_bucket_of_audit(stage: CatalogueStage, tokens: int) -> None:
    stage.train(0, _done(stage, 0, stage.worker(), tokens=tokens))
    (row,) = _overview(stage)["times"]["rows"]
    assert row["low"] <= tokens <= row["high"] and row["high"] in (0, 1, 2 * (row["low"] - 1))


def test_parts_and_faults_are_drawn_by_step(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec, failed = stage.group(0), stage.group(1)
    for entry in (spec, failed):
        stage.place(entry, incarnation)
    stage.logged(
        spec,
        incarnation,
        (1.0, None),
        text={0: {"parts": {"math": 0.5}}, 1: {"error": "KeyError: 'x'"}},
    )
    stage.logged(failed, incarnation, (None, None), text={0: {"error": "TimedOut: 10 s"}}, offset=9)
    stage.train(0, spec)
    stage.end(failed, "failed", "no trajectory is valid")
    overview = _overview(stage)
    assert overview["parts"] == {"math": [0.5]}
    assert overview["invalid"] == {
        "series": {"infrastructure": [0], "answer": [0], "code": [1]},
        "errors": {"infrastructure": {"TimedOut": 1}, "answer": {}, "code": {"KeyError": 1}},
    }


def test_figures_of_learning_have_a_chart_each(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    for step, rate in enumerate((1e-3, 2e-3)):
        spec = stage.group(step)
        stage.place(spec, incarnation)
        stage.log(spec, incarnation, offset=9 * step)
        metrics = {"entropy": 1.5, "updates": 2.0} | ({} if step else {"kl": 0.25})
        stage.train(step, spec, metrics=metrics, settings={"trainer.learning_rate": rate})
    overview = _overview(stage)
    assert overview["points"]["step"] == [0, 1]
    assert {row["name"]: row["y"] for row in overview["learning"]} == {
        "entropy": [1.5, 1.5],
        "kl": [0.25, None],
        "learning_rate": [1e-3, 2e-3],
    }


def test_evaluation_is_apart_from_training(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0, purpose="eval")
    stage.place(spec, incarnation)
    stage.log(spec, incarnation, rewards=(1.0, 0.0))
    stage.end(spec, "evaluated")
    overview = _overview(stage)
    metrics = {"mean@2": [0.5], "pass@1": [0.5], "pass@2": [1.0]}
    series = {"name": "", "version": [0], "reward": [0.5], "n": [2], "metrics": metrics}
    assert overview["evaluations"] == [series]
    assert overview["times"]["rows"] == []


def test_records_that_do_not_count_are_told_apart(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = _done(stage, 0, incarnation)
    stage.decide(Fence(reason="silent", worker="w0", incarnation=incarnation))
    stage.log(spec, incarnation, offset=900)
    totals = _overview(stage)["totals"]
    assert (totals["trajectories"], totals["not_counting"], totals["tokens"]) == (2, 2, 40)
    (row,) = _overview(stage)["timeline"]["rows"]
    assert row["gone"][0][1] == "fenced: silent"


def test_a_record_that_names_no_moment_moves_no_beginning(stage: CatalogueStage) -> None:
    stage.builder.fact(99, Command(at_ns=0, user="u", verb="set", args={}))
    stage.group(0)
    assert view_of_stage(stage).first_ns == START_NS
    assert _overview(stage)["run"]["seconds"] == 1.0


def test_warnings_of_a_finished_run_name_invalid_rewards(stage: CatalogueStage) -> None:
    stage.train(0, _done(stage, 0, stage.worker(), rewards=(1.0, None)))
    stage.decide(StopRun(reason="all steps are committed"))
    view = view_of_stage(stage)
    assert view.finished
    (warning,) = (warning for warning in finished_warnings(view) if "valid reward" in warning[1])
    assert warning[:2] == ["bad", "50% of the trained trajectories have no valid reward"]


def test_a_run_without_anything_has_an_overview() -> None:
    with closing(Catalogue()) as catalogue:
        actual_overview = overview(view_of(catalogue, "empty"))
    assert (actual_overview["run"]["name"], actual_overview["run"]["version"]) == ("empty", -1)
    assert actual_overview["timeline"]["rows"] == []


def _busy_s(stage: CatalogueStage) -> float:
    actual_utilisation = utilisation(view_of_stage(stage))
    width_s = 2 * actual_utilisation["at"][0]
    assert len(actual_utilisation["at"]) <= SLICES_MAX
    assert all(0 <= entry <= 1 for entry in actual_utilisation["mean"] if entry is not None)
    last_s = (stage.now_ns - view_of_stage(stage).first_ns) / 1e9
    lengths = [
        min(width_s, last_s - index * width_s) for index in range(len(actual_utilisation["at"]))
    ]
    shares = [float(entry or 0) for entry in actual_utilisation["mean"]]
    return float(sum(length * share for length, share in zip(lengths, shares, strict=True)))


def test_a_slot_is_in_use_from_placement_to_record(stage: CatalogueStage) -> None:
    incarnation = stage.worker(slots=4)
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.now_ns += 2 * SECOND_NS
    stage.log(spec, incarnation)  # two of four slots for 3 s
    stage.now_ns += 3 * SECOND_NS
    stage.decide(StopRun(reason="over"))
    assert _busy_s(stage) == pytest.approx(1.5, rel=0.01)


def test_requests_ahead_of_the_slots_count_for_none(stage: CatalogueStage) -> None:
    incarnation = stage.worker(slots=1)
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.now_ns += 2 * SECOND_NS
    stage.log(spec, incarnation)
    assert _busy_s(stage) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("how", ["failed", "released", "fenced"])
def test_a_request_that_is_let_go_leaves_its_slot(stage: CatalogueStage, how: str) -> None:
    incarnation = stage.worker(slots=2)
    spec = stage.group(0)
    placed = stage.placed(spec, "w0", incarnation)
    first = placed.requests()[0]
    move = Migrate(
        reason="room",
        trajectory=first.trajectory,
        attempt=1,
        worker="w0",
        incarnation=incarnation,
        to="w1",
        to_incarnation=incarnation + 1,
    )
    stage.decide(placed, *([move] if how == "released" else []))
    stage.now_ns += SECOND_NS
    if how == "failed":
        stage.fact(records.failed(first))
    elif how == "released":
        stage.fact(
            RequestReleased(
                at_ns=0,
                worker="w0",
                incarnation=incarnation,
                trajectory=first.trajectory,
                attempt=1,
            )
        )
    else:
        stage.decide(Fence(reason="silent", worker="w0", incarnation=incarnation))
    stage.now_ns += 2 * SECOND_NS
    stage.decide()
    expected = {"failed": 1.0 + 1.5, "released": 1.0 + 1.5, "fenced": 2.0}[how]
    assert _busy_s(stage) == pytest.approx(expected, rel=0.01)


def test_what_happened_to_the_run_is_marked_and_no_slot_is_in_use_while_it_was_stopped(
    stage: CatalogueStage,
) -> None:
    stage.begins("orchestrator", 0)
    spec, incarnation = stage.group(0), stage.worker()
    stage.place(spec, incarnation)  # never logged: the worker is killed with the run
    stage.fact(records.command("set", trainer__learning_rate=0.5))
    last_s = (stage.now_ns - START_NS) / 1e9
    stage.now_ns += 60 * SECOND_NS
    stage.begins("orchestrator", 1)
    stage.begins("trainer", 1)
    stage.worker()
    stage.decide()
    overview = _overview(stage)
    assert [(row["step"], row["text"].split(" ")[2]) for row in overview["marks"]] == [
        (0, "trainer.learning_rate"),
        (0, "resumed"),
    ]
    use = overview["utilisation"]
    stopped = [
        mean
        for index, mean in zip(use["at"], use["mean"], strict=True)
        if last_s + 2 < index < last_s + 58
    ]
    assert len(stopped) > 10 and set(stopped) == {None}
    (row,) = overview["timeline"]["rows"]
    assert all(piece[2] <= last_s + 1 or piece[0] >= last_s + 59 for piece in row["pieces"])
