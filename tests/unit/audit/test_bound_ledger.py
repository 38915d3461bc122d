"""Tests that the ledger's staleness bound equals the orchestrator's rules."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from dora_pipe.audit.bound_ledger import BoundLedger, outlook_of, why_infeasible
from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.config.changes import with_settings
from dora_pipe.ledger.history import GroupHistory, RecordLogged, RequestHistory
from dora_pipe.orchestrator import staleness
from dora_pipe.schemas.control import Command, TrajectoryLogged
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import GroupSpec
from tests.support.orchestrator_records import make_config
from tests.support.worker import spec_of

DEADLINES = st.lists(st.integers(0, 6), max_size=12)


def _spec(ordinal: int, deadline: int) -> GroupSpec:
    return msgspec.structs.replace(spec_of(ordinal), deadline=deadline)


def _books(deadlines: list[int], version: int, training: bool) -> BoundLedger:
    books = BoundLedger()
    books.version = version
    books.training = (version, 1) if training else None
    for ordinal, deadline in enumerate(deadlines):
        books.add(_spec(ordinal, deadline))
    return books


@given(DEADLINES, st.integers(0, 6), st.integers(1, 3))
def test_feasibility_is_that_of_the_orchestrator(
    deadlines: list[int], step: int, per_step: int
) -> None:
    theirs = staleness.feasible(Counter(deadlines), step, per_step)
    assert (not why_infeasible(deadlines, step, per_step)) == theirs


@given(DEADLINES, st.integers(0, 4), st.booleans(), st.integers(0, 3), st.integers(1, 3))
def test_admission_is_that_of_the_orchestrator(
    deadlines: list[int], version: int, training: bool, eta: int, per_step: int
) -> None:
    # U is feasible at all times; the orchestrator does not check again.
    assume(staleness.feasible(Counter(deadlines), version + training, per_step))
    config = make_config(
        staleness__max_staleness=eta,
        rollout__prompts_per_step=per_step,
        run__steps=6,
        rollout__group_size=2,
    )
    standing = staleness.Standing(
        version=version,
        training=training,
        max_staleness=eta,
        async_batches=min(2.0, eta + 1.0),
        per_step=per_step,
        steps=6,
    )
    ours = _books(deadlines, version, training).why_not_admit(
        version + eta, EffectiveConfig(config)
    )
    assert (not ours) == staleness.may_admit(Counter(deadlines), standing), ours


def _says(batches: float | None, before: float = 2.0, **staleness: object) -> str:
    books = BoundLedger(in_flight=before)
    automatic = {"async_batches": "auto", "max_staleness": 3, **staleness}
    config = make_config(**{f"staleness__{name}": value for name, value in automatic.items()})
    return books.why_not_in_flight(batches, EffectiveConfig(config))


def test_an_automatic_c_is_said_by_every_batch_and_changes_a_little_at_a_time() -> None:
    assert not _says(2.0) and not _says(2.25) and not _says(3.75, before=4.0)
    assert "in one batch" in _says(2.5)
    assert "not between 2 and 4" in _says(4.25, before=4.0)
    assert "not between 2 and 4" in _says(1.75)
    assert "records no" in _says(None)
    assert "which is set" in _says(2.0, async_batches=2.0)
    assert not _says(2.0, before=4.0, max_staleness=1), "a bound that went down holds at once"
    assert not _says(4.0, before=4.0, max_staleness=1), "and C is not decided at every batch"
    assert "not between 2 and 2" in _says(3.75, before=4.0, max_staleness=1)


def test_admission_is_held_against_the_c_that_the_newest_batch_said() -> None:
    config = make_config(
        staleness__max_staleness=2, staleness__async_batches="auto", rollout__prompts_per_step=2
    )
    books = _books([2, 2, 2, 2], 0, training=False)
    assert "the limit is 4" in books.why_not_admit(2, EffectiveConfig(config))
    books.in_flight = 2.25
    assert not books.why_not_admit(2, EffectiveConfig(config))


@given(DEADLINES, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(1, 3))
def test_the_batch_that_may_be_taken_is_that_of_the_orchestrator(
    deadlines: list[int], done: list[bool], per_step: int
) -> None:
    config = make_config(rollout__prompts_per_step=per_step, run__steps=9)
    books = _books(deadlines, 0, training=False)
    finished = sorted(
        staleness.Finished(deadline, ordinal, _spec(ordinal, deadline).group)
        for ordinal, deadline in enumerate(deadlines)
        if done[ordinal]
    )
    for entry in finished:
        group = _history(_spec(entry.ordinal, entry.deadline))
        books.settle(group, "finished")
    theirs = staleness.next_batch(finished, Counter(deadlines), step=0, per_step=per_step)
    names = [entry.group for entry in (theirs or finished[:per_step])]
    ours = books.why_not_take(0, names, EffectiveConfig(config))
    assert (not ours) == bool(theirs), ours
    if theirs and len(finished) > per_step:
        assert "not the" in books.why_not_take(
            0, [*names[:-1], finished[per_step].group], EffectiveConfig(config)
        )


def test_overdue_group_is_named_although_a_step_has_room() -> None:
    # j = -1 of the rule: with j >= 0 alone, a group due at step 1 would wait for step 2.
    assert why_infeasible([1], 2, 1) == "the group 1. in line, due at step 1, has its turn at 2"
    assert why_infeasible([2], 2, 1) == ""


def test_two_batches_are_never_in_training() -> None:
    books = _books([3, 3], 0, training=True)
    assert books.why_not_take(1, [], EffectiveConfig(make_config())) == "step 0 is being trained"


def _history(spec: GroupSpec, requests: dict[str, RequestHistory] | None = None) -> GroupHistory:
    return GroupHistory(
        spec=spec, reason="", round=1, offset=1, dispatched_ns=1, requests=requests or {}
    )


def _group(*endings: float | str | None, size: int = 4) -> GroupHistory:
    spec = msgspec.structs.replace(spec_of(0), size=size)
    entries = {}
    for sample, ending in enumerate([*endings, *["running"] * (size - len(endings))]):
        name = trajectory_id(spec.group, sample)
        entry = entries[name] = RequestHistory(trajectory=name)
        entry.failed = ending == "failed"
        if not isinstance(ending, str):
            entry.bound = RecordLogged(fact=_fact(name, ending), status="bound", offset=1)
    return _history(spec, entries)


def _fact(name: str, reward: float | None) -> TrajectoryLogged:
    return TrajectoryLogged(
        at_ns=0,
        worker="w0",
        incarnation=1,
        trajectory=name,
        attempt=1,
        version=0,
        digest="0" * 64,
        partition=0,
        offset=0,
        sha256="0" * 64,
        bytes=1,
        tokens=1,
        reward=reward,
        finish="stop",
        error="",
    )


def test_group_is_finished_when_all_ended_and_enough_are_valid() -> None:
    rules = make_config(rollout__min_valid_trajectories=2).rollout
    assert outlook_of(_group(1.0, 0.0, None), rules) == "running"
    assert outlook_of(_group(1.0, 0.0, None, "failed"), rules) == "finished"


def test_group_has_failed_as_soon_as_too_few_can_be_valid() -> None:
    rules = make_config(rollout__min_valid_trajectories=2).rollout
    assert outlook_of(_group(None, "failed"), rules) == "running"
    assert outlook_of(_group(None, "failed", None), rules) == "failed"


def test_equal_rewards_filter_a_group_only_where_they_are_filtered() -> None:
    equal = _group(1.0, 1.0, None, "failed")
    assert outlook_of(equal, make_config().rollout) == "finished"
    filtering = make_config(rollout__filter_zero_advantage=True).rollout
    assert outlook_of(equal, filtering) == "filtered"
    assert outlook_of(_group(1.0, 0.0, 1.0, 1.0), filtering) == "finished"


def _command(verb: str, **args: object) -> Command:
    return Command(at_ns=0, user="u", verb=verb, args=dict(args))


def test_set_changes_logged_keys_and_nothing_else() -> None:
    in_force = EffectiveConfig(make_config(run__steps=9))
    in_force.command(_command("set", **{"staleness.max_staleness": 3}), step=2, waiting=0)
    assert in_force.config.staleness.max_staleness == 3
    for wrong in ({"rollout.group_size": 9}, {"staleness.max_staleness": "many"}, {"run.steps": 1}):
        before = in_force.config
        in_force.command(_command("set", **wrong), step=2, waiting=0)
        assert in_force.config == before


def test_set_of_another_objective_starts_from_its_defaults_as_in_the_run() -> None:
    in_force = EffectiveConfig(make_config(objective__kl_coef=0.1))
    changes = {"objective.kind": "topr", "staleness.max_staleness": 3}
    in_force.command(_command("set", **changes), step=0, waiting=0)
    assert in_force.config == with_settings(make_config(objective__kl_coef=0.1), changes)
    for refused in ("none", "mine:OBJECTIVE"):
        in_force.command(_command("set", **{"objective.kind": refused}), step=0, waiting=0)
        assert in_force.config.objective.kind == "topr"


def test_stop_leaves_the_steps_that_the_groups_in_flight_fill() -> None:
    in_force = EffectiveConfig(make_config(run__steps=9, rollout__prompts_per_step=2))
    in_force.command(_command("stop"), step=3, waiting=5)
    assert in_force.steps == 5
    in_force.command(_command("stop", now=True), step=3, waiting=5)
    assert in_force.steps == 3
