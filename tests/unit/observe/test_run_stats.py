"""Tests of run statistics, also of an entire log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.contributions import contributed
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.ledger.statuses import WorkerCounts
from dora_pipe.observe.run_stats import Histogram, RunStats, evaluation_words
from dora_pipe.observe.top import frame, summaries_of
from dora_pipe.observe.waits import waits_of
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.rounds import NO_VERSION, End, EndSamples, Fence, SampleOutcome, TakeBatch
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS
from tests.support.metrics import values_of
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.stats_stage import Stage, stats_of

BOUNDS = (0.0, 1.0, 2.5, 10.0)


@pytest.fixture(scope="module")
def stats(bus: SqliteBus, recorded: RecordedRun) -> RunStats:
    return stats_of(bus, recorded.topics)


@pytest.fixture(scope="module")
def state(bus: SqliteBus, recorded: RecordedRun) -> State:
    state = State()
    for logged_round in read_rounds(bus, recorded.topics):
        fold_round(state, logged_round.round, logged_round.folded())
    return state


def test_numbers_of_a_whole_run_are_those_of_the_orchestrators_state(
    stats: RunStats, state: State
) -> None:
    assert stats.over
    assert stats.version == state.version == STEPS
    assert dict(stats.outcomes) == dict(state.counters.outcomes)
    assert stats.dispatched == Counter(train=state.ordinal, eval=state.eval_ordinal)
    assert stats.rounds == state.rounds
    assert not stats.account.open


def test_trainers_waits_of_a_whole_run_are_those_that_why_accounts_for(
    stats: RunStats, bus: SqliteBus, recorded: RecordedRun
) -> None:
    with closing(read_catalogue(bus, recorded.topics)) as catalogue:
        waits = waits_of(catalogue)
    assert [step.step for step in stats.steps] == [wait.step for wait in waits]
    assert [step.waited_s for step in stats.steps] == pytest.approx(
        [wait.waited_s for wait in waits]
    )
    named = {step.worker for step in stats.steps if step.worker}
    assert named <= {wait.worker for wait in waits}
    waited_ms = sum(stats.waited_by.values())
    assert waited_ms == pytest.approx(1000 * stats.wait_s.total, abs=STEPS)


def test_every_record_that_was_read_is_counted_and_nothing_is_left_behind(
    stats: RunStats, bus: SqliteBus, recorded: RecordedRun
) -> None:
    for topic in ("control", "decisions", "metrics"):
        values = [
            record.value for record in records_of(bus, ends_of(bus, f"{recorded.run}.{topic}"))
        ]
        assert stats.meter.topics[topic].records == len(values)
        assert stats.meter.topics[topic].bytes == sum(map(len, values))
        assert stats.meter.topics[topic].unreadable == 0
    assert all(position.position == position.end for position in stats.meter.positions.values())
    assert stats.delay_s.observations > 0


def test_workers_that_were_killed_fenced_and_left_are_told_apart(stats: RunStats) -> None:
    assert {worker.gone for worker in stats.workers.values()} == {"left"}
    assert stats.lost["fenced"] == 2
    assert all(worker.counts.sampled > 0 for worker in stats.workers.values())


def test_tokens_of_earlier_incarnations_are_kept() -> None:
    stage = Stage()
    first = stage.worker()
    stage.status("w0", first, sampled=100)
    stage.decide(Fence(reason="lost", worker="w0", incarnation=first))
    second = stage.worker()
    stage.status("w0", first, sampled=500)
    assert stage.stats.workers["w0"].counts.sampled == 100
    stage.status("w0", second, sampled=7, computed=40, reused=2)
    stage.status("w0", second, sampled=7, computed=50, reused=3)
    received_stage = stage.stats.workers["w0"]
    assert received_stage.counts == WorkerCounts(107, 50, 3)


def test_statuses_that_come_before_their_worker_joined_are_believed_when_it_has() -> None:
    stage = Stage()
    first = stage.offset + 1
    for incarnation, sampled in ((first, 5), (first, 25), (first + 2, 7)):
        stage.status("w0", incarnation, sampled=sampled)
        stage.now_ns += SECOND_NS
    assert not stage.stats.workers
    assert stage.worker() == first
    assert stage.stats.workers["w0"].status is None, "that was its earlier incarnation"
    stage.worker()
    received_stage = stage.stats.workers["w0"]
    assert received_stage.status is not None
    assert (received_stage.counts.sampled, received_stage.status.tokens_total) == (32, 7)


def test_worker_is_what_was_decided_and_what_it_said_last() -> None:
    stage = Stage()
    incarnation = stage.fact(records.joined("w0"))
    states = [stage.stats.workers["w0"].state]
    happens: tuple[Callable[[], object], ...] = (
        lambda: stage.fact(records.ready("w0", incarnation, 0)),
        lambda: stage.assign("w0", incarnation, 0),
        lambda: stage.status("w0", incarnation, active=2),
        lambda: stage.fact(records.left("w0", incarnation)),
    )
    for moment in happens:
        moment()
        states.append(stage.stats.workers["w0"].state)
    assert states == ["joined", "loading", "idle", "generating", "left"]
    assert stage.stats.heard == {}


def test_colocated_worker_that_shall_host_no_version_sleeps() -> None:
    stage = Stage()
    incarnation = stage.fact(records.joined("w0", colocated=True))
    states = [stage.stats.workers["w0"].state]
    for version in (0, NO_VERSION):
        stage.fact(records.ready("w0", incarnation, version))
        stage.assign("w0", incarnation, version)
        states.append(stage.stats.workers["w0"].state)
    assert states == ["asleep", "idle", "asleep"]
    lines = frame(stage.stats, stage.now_ns).workers.lines
    assert [line.text for line in lines] == ["1 asleep, no version", "w0 -   asleep"]


def test_rate_is_of_the_last_statuses_alone() -> None:
    stage = Stage()
    incarnation = stage.worker()
    for sampled in (0, 10_000, 10_010, 10_020, 10_030):
        stage.status("w0", incarnation, sampled=sampled)
        stage.now_ns += 5 * SECOND_NS
    assert stage.stats.workers["w0"].tokens_per_s == 2.0


def test_status_of_an_older_trainer_is_history() -> None:
    stage = Stage()
    stage.trainer(incarnation=2)
    newest = stage.stats.heard["trainer"]
    stage.trainer(incarnation=1)
    assert stage.stats.heard["trainer"] is newest


def test_reward_of_a_step_is_the_mean_of_valid_ones_and_the_wait_is_put_down_to_who_came_last() -> (
    None
):
    stage = Stage()
    incarnation = stage.worker()
    specs = [stage.group(ordinal, incarnation) for ordinal in range(2)]
    stage.log(specs[0], incarnation, 1.0, None)
    stage.log(specs[1], incarnation, 0.0, 0.5)
    taken = tuple(
        TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()) for spec in specs
    )
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=taken, settings={}))
    assert stage.stats.account.batch is not None
    stage.now_ns += 3 * SECOND_NS
    stage.fact(records.committed(0, taken))
    (step,) = stage.stats.steps
    assert (step.reward, step.tokens, step.worker) == (0.5, 80, "w0")
    assert (step.waited_s, step.training_s, step.seconds) == (5.0, 3.0, 8.0)
    assert stage.stats.account.batch is None
    assert stage.stats.trajectories == {("stop", "yes"): 3, ("stop", "no"): 1}


def test_samples_that_were_not_waited_for_are_counted_by_why() -> None:
    stage = Stage()
    incarnation = stage.worker()
    ends: tuple[tuple[tuple[int, ...], SampleOutcome], ...] = (
        ((2,), "redundant"),
        ((1, 3), "expired"),
    )
    for ordinal, (samples, outcome) in enumerate(ends):
        group = stage.group(ordinal, incarnation).group
        stage.decide(EndSamples(reason="test", group=group, samples=samples, outcome=outcome))
    assert stage.stats.left_over == {"redundant": 1, "expired": 2}
    received_stage = values_of(stage.stats)
    assert received_stage['dora_pipe_trajectories_unused_total{outcome="expired"}'] == 2


def test_report_that_a_worker_repeats_is_counted_once() -> None:
    stage = Stage()
    incarnation = stage.worker()
    spec = stage.group(0, incarnation)
    at_ns = stage.now_ns
    for _ in range(2):
        stage.now_ns = at_ns
        stage.log(spec, incarnation, 1.0, 0.0)
    assert stage.stats.trajectories == {("stop", "yes"): 2}
    assert stage.stats.meter.topics["trajectories"].records == 2
    stage.logged(spec, incarnation, (1.0, 0.0), offset=900)
    assert stage.stats.lengths.observations == 4, "another report names other records"


def test_batch_is_trained_on_when_a_fenced_trainer_refuses_it() -> None:
    stage = Stage()
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=(), settings={}))
    stage.fact(records.refused(0, [], incarnation=-2))
    assert stage.stats.refused == 1
    assert stage.stats.account.batch is not None


def test_evaluation_counts_when_its_last_prompt_has_ended() -> None:
    stage = Stage(evaluation__prompts=2)
    incarnation = stage.worker()
    for ordinal, reward in ((0, 1.0), (1, 0.0)):
        assert stage.stats.evaluated == {}
        spec = stage.group(ordinal, incarnation, purpose="eval")
        stage.log(spec, incarnation, reward, reward)
        stage.decide(End(reason="done", group=spec.group, outcome="evaluated"))
    (ended,) = stage.stats.evaluated.values()
    assert (ended.version, ended.reward) == (0, 0.5)


def test_evaluation_with_a_name_is_told_with_it_and_with_what_its_samples_say() -> None:
    stage = Stage(evaluation__prompts=1, evaluation__name="hard")
    incarnation = stage.worker()
    spec = stage.group(0, incarnation, purpose="eval", evaluation="hard")
    stage.log(spec, incarnation, 1.0, 0.0)
    stage.decide(End(reason="done", group=spec.group, outcome="evaluated"))
    (ended,) = stage.stats.evaluated.values()
    assert ended.metrics == {"mean@2": 0.5, "pass@1": 0.5, "pass@2": 1.0}
    text = "evaluation hard of version 0: reward 0.500, pass@2 1.000"
    assert evaluation_words(ended) == text
    assert text in str(frame(stage.stats, stage.now_ns))
    received_stage = values_of(stage.stats)
    assert received_stage['dora_pipe_evaluation_reward{evaluation="hard"}'] == 0.5
    assert received_stage['dora_pipe_evaluation_metric{evaluation="hard",metric="pass@2"}'] == 1


def test_rewards_of_a_step_are_told_by_task() -> None:
    stage = Stage()
    incarnation = stage.worker()
    specs = [stage.group(index, incarnation, task=name) for index, name in enumerate(("b", "a"))]
    stage.log(specs[0], incarnation, 1.0, None)
    stage.log(specs[1], incarnation, 0.0, 0.5)
    taken = tuple(
        TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()) for spec in specs
    )
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=taken, settings={}))
    stage.fact(records.committed(0, taken))
    assert stage.stats.steps[-1].task_rewards == (("a", 0.25), ("b", 1.0))
    received_stage = values_of(stage.stats)
    assert received_stage["dora_pipe_step_reward"] == 0.5
    for task, value in (("a", 0.25), ("b", 1)):
        assert received_stage[f'dora_pipe_step_task_reward{{task="{task}"}}'] == value


def test_parts_answers_and_faults_are_told_of_steps_and_evaluations() -> None:
    stage = Stage(evaluation__prompts=1)
    incarnation = stage.worker()
    spec = stage.group(0, incarnation, task="add")
    scores: dict[int, dict[str, Any]] = {
        0: {"parts": {"math": 1.0, "form": 0.5}},
        1: {"error": "Retry: busy"},
    }
    stage.logged(spec, incarnation, (1.0, None), text=scores)
    taken = (TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()),)
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=taken, settings={}))
    stage.fact(records.committed(0, taken))
    (step,) = stage.stats.steps
    assert (step.parts, step.errors) == ({"add": {"math": 1.0, "form": 0.5}}, {"Retry": 1})
    spec = stage.group(0, incarnation, purpose="eval")
    scores = {index: {"parts": {"math": float(index)}, "answer": "4"} for index in range(2)}
    stage.logged(spec, incarnation, (0.0, 1.0), text=scores)
    stage.decide(End(reason="done", group=spec.group, outcome="evaluated"))
    (ended,) = stage.stats.evaluated.values()
    assert ended.metrics["part/math"] == 0.5
    received_stage = values_of(stage.stats)
    assert received_stage['dora_pipe_step_reward_part{part="form",task="add"}'] == 0.5
    invalid = 'dora_pipe_trajectories_invalid_total{error="Retry",fault="infrastructure"}'
    assert received_stage[invalid] == 1


def test_decisions_of_one_kind_in_a_round_are_one_line() -> None:
    stage = Stage()
    incarnation = stage.worker()
    stage.group(0, incarnation)
    words = [
        summary.words
        for position in stage.stats.recent_rounds
        for summary in summaries_of(position)
    ]
    assert words == ["dispatch version 0", "schedule 2 version 0 on w0"]


def test_equal_weights_make_a_full_effective_sample_and_unequal_ones_less() -> None:
    def row(ratio: float | None, staleness: int = 0) -> dict[str, object]:
        return {"ratio_mean": ratio, "staleness": staleness}

    assert contributed(0, [row(1.0), row(1.0), row(None)]).effective == 1.0
    unequal = contributed(3, [row(1.0), row(3.0, 2)])
    assert unequal.effective == pytest.approx(16 / 20)
    assert dict(unequal.mismatch) == pytest.approx({0: 0.0, 2: 1.0986}, abs=1e-4)
    assert contributed(0, []).effective is None


def test_value_at_a_bound_belongs_to_its_bucket_and_one_above_all_to_infinity() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 1.0, 1.1, 99.0):
        histogram.add(value)
    assert list(histogram.cumulative()) == [
        (0.0, 1),
        (1.0, 2),
        (2.5, 3),
        (10.0, 3),
        (float("inf"), 4),
    ]
    assert histogram.total == 101.1
