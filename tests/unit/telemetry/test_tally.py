"""A run in numbers: what is counted, what is not, and that a whole log comes out as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.history.reading import ends_of, records_of
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.rounds import End, Fence, TakeBatch
from dora_pipe.telemetry.ratios import contributed
from dora_pipe.telemetry.tally import Tally
from dora_pipe.views.why_steps import steps_of
from tests.support import orchestrator_records as records
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.tally_stage import Stage, tally_of
from tests.support.told_run import SECOND_NS


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def bus(recorded: RecordedRun) -> Iterator[SqliteBus]:
    """Its log."""
    with closing(recorded.open()) as opened:
        yield opened


@pytest.fixture(scope="module")
def tally(bus: SqliteBus, recorded: RecordedRun) -> Tally:
    """All of it in numbers."""
    return tally_of(bus, recorded.topics)


@pytest.fixture(scope="module")
def state(bus: SqliteBus, recorded: RecordedRun) -> State:
    """What the orchestrator knew at its end."""
    found = State()
    for at in read_rounds(bus, recorded.topics):
        fold_round(found, at.round, at.folded())
    return found


def test_numbers_of_a_whole_run_are_those_of_the_orchestrators_state(
    tally: Tally, state: State
) -> None:
    assert tally.over
    assert tally.version == state.version == STEPS
    assert dict(tally.fates) == dict(state.tally.fates)
    assert tally.dispatched == Counter(train=state.tally.dispatched, eval=state.tally.evaluations)
    per_bucket = {value: count for value, count in enumerate(tally.staleness.counts) if count}
    assert per_bucket == state.tally.staleness
    assert tally.rounds == state.rounds
    assert not tally.courses.open


def test_trainers_waits_of_a_whole_run_are_those_that_why_accounts_for(
    tally: Tally, bus: SqliteBus, recorded: RecordedRun
) -> None:
    waits = steps_of(bus, recorded.topics).waits
    assert [one.step for one in tally.steps] == [one.step for one in waits]
    assert [one.waited_s for one in tally.steps] == pytest.approx([one.waited_s for one in waits])
    named = {one.worker for one in tally.steps if one.worker}
    assert named <= {one.worker for one in waits}
    waited_ms = sum(tally.waited_by.values())
    assert waited_ms == pytest.approx(1000 * tally.wait_s.total, abs=STEPS)


def test_every_record_that_was_read_is_counted_and_nothing_is_left_behind(
    tally: Tally, bus: SqliteBus, recorded: RecordedRun
) -> None:
    for topic in ("control", "decisions", "metrics"):
        values = [one.value for one in records_of(bus, ends_of(bus, f"{recorded.run}.{topic}"))]
        assert tally.topics[topic].records == len(values)
        assert tally.topics[topic].bytes == sum(map(len, values))
        assert tally.topics[topic].unreadable == 0
    assert all(place.position == place.end for place in tally.places.values())
    assert tally.delay_s.observations > 0


def test_workers_that_were_killed_fenced_and_left_are_told_apart(tally: Tally) -> None:
    assert {worker.gone for worker in tally.fleet.workers.values()} == {"left"}
    assert tally.fleet.lost["fenced"] == 2
    assert all(worker.sampled > 0 for worker in tally.fleet.workers.values())


def test_tokens_of_earlier_incarnations_are_kept() -> None:
    stage = Stage()
    first = stage.worker()
    stage.status("w0", first, sampled=100)
    stage.decide(Fence(reason="lost", worker="w0", epoch=first))
    second = stage.worker()
    stage.status("w0", first, sampled=500)
    assert stage.tally.fleet.workers["w0"].sampled == 100
    stage.status("w0", second, sampled=7)
    assert stage.tally.fleet.workers["w0"].sampled == 107


def test_statuses_that_come_before_their_worker_joined_are_believed_when_it_has() -> None:
    stage = Stage()
    first = stage.offset + 1
    for epoch, sampled in ((first, 5), (first, 25), (first + 2, 7)):
        stage.status("w0", epoch, sampled=sampled)
        stage.now_ns += SECOND_NS
    assert not stage.tally.fleet.workers
    assert stage.worker() == first
    told = stage.tally.fleet.workers["w0"]
    assert (told.sampled, told.tokens_per_s) == (25, 20.0)
    stage.worker()
    assert stage.tally.fleet.workers["w0"].sampled == 32


def test_worker_is_what_was_decided_and_what_it_said_last() -> None:
    stage = Stage()
    epoch = stage.fact(records.joined("w0"))
    told = stage.tally.fleet.workers["w0"]
    states = [told.state]
    stage.fact(records.ready("w0", epoch, 0))
    states.append(told.state)
    told.target = 0
    states.append(told.state)
    stage.status("w0", epoch, active=2)
    states.append(told.state)
    stage.fact(records.left("w0", epoch))
    assert [*states, told.state] == ["joined", "loading", "idle", "generating", "left"]
    assert stage.tally.fleet.heard == {}


def test_rate_is_of_the_last_statuses_alone() -> None:
    stage = Stage()
    epoch = stage.worker()
    for sampled in (0, 10_000, 10_010, 10_020, 10_030):
        stage.status("w0", epoch, sampled=sampled)
        stage.now_ns += 5 * SECOND_NS
    assert stage.tally.fleet.workers["w0"].tokens_per_s == 2.0


def test_status_of_an_older_trainer_is_history() -> None:
    stage = Stage()
    stage.trainer(role_epoch=2)
    newest = stage.tally.fleet.heard["trainer"]
    stage.trainer(role_epoch=1)
    assert stage.tally.fleet.heard["trainer"] is newest


def test_reward_of_a_step_is_the_mean_of_valid_ones_and_the_wait_is_put_down_to_who_came_last() -> (
    None
):
    stage = Stage()
    epoch = stage.worker()
    specs = [stage.group(ordinal, epoch) for ordinal in range(2)]
    stage.log(specs[0], epoch, 1.0, None)
    stage.log(specs[1], epoch, 0.0, 0.5)
    taken = tuple(
        TakenGroup(group=spec.group, version=0, deadline=1, trajectories=()) for spec in specs
    )
    stage.decide(TakeBatch(reason="all", step=0, attempt=1, groups=taken, settings={}))
    assert stage.tally.taken is not None
    stage.now_ns += 3 * SECOND_NS
    stage.fact(records.committed(0, taken))
    (step,) = stage.tally.steps
    assert (step.reward, step.tokens, step.worker) == (0.5, 80, "w0")
    assert (step.waited_s, step.training_s, step.seconds) == (5.0, 3.0, 8.0)
    assert stage.tally.taken is None
    assert stage.tally.trajectories == {("stop", "yes"): 3, ("stop", "no"): 1}


def test_evaluation_counts_when_its_last_prompt_has_ended() -> None:
    stage = Stage()
    stage.tally._evaluation_size = 2
    epoch = stage.worker()
    for ordinal, reward in ((0, 1.0), (1, 0.0)):
        assert stage.tally.evaluation is None
        spec = stage.group(ordinal, epoch, purpose="eval")
        stage.log(spec, epoch, reward, reward)
        stage.decide(End(reason="done", group=spec.group, fate="evaluated"))
    assert stage.tally.evaluation == (0, 0.5)


def test_decisions_of_one_kind_in_a_round_are_one_line() -> None:
    stage = Stage()
    epoch = stage.worker()
    stage.group(0, epoch)
    words = [deed.words for deed in stage.tally.deeds]
    assert words == ["dispatch 1 group at version 0", "place 2 of version 0 on w0"]


def test_equal_weights_make_a_full_effective_sample_and_unequal_ones_less() -> None:
    def row(ratio: float | None, staleness: int = 0) -> dict[str, object]:
        return {"ratio_mean": ratio, "staleness": staleness}

    assert contributed(0, [row(1.0), row(1.0), row(None)]).effective == 1.0
    unequal = contributed(3, [row(1.0), row(3.0, 2)])
    assert unequal.effective == pytest.approx(16 / 20)
    assert dict(unequal.mismatch) == pytest.approx({0: 0.0, 2: 1.0986}, abs=1e-4)
    assert contributed(0, []).effective is None
