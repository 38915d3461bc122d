"""What has become of requests and groups on the log of an evaluation, and which draw is of what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.evaluation_log import AskedDraws, EvaluationDraws, asking_only
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Evaluation, Task
from dora_pipe.config.several import pool_specs
from dora_pipe.orchestrator.evaluations import evaluation_group
from dora_pipe.schemas.control import (
    GroupScored,
    LoggedEntry,
    RequestFailed,
    ScoredSibling,
    TrajectoriesLogged,
)
from dora_pipe.schemas.identity import source_of
from tests.support.orchestrator_records import make_config, run_started, weights

GROUP = "e0000000000"
ONE, OTHER = f"{GROUP}-000", f"{GROUP}-001"
ROWS = 3


def draws(*, together: bool = False) -> EvaluationDraws:
    config = make_config(evaluation__prompts=ROWS, evaluation__siblings=2)
    started = run_started(config, together=("eval",) if together else ())
    return EvaluationDraws(started=started, config=config, evaluation=config.evaluation)


@pytest.mark.parametrize("name", ["", "hard", "other"])
def test_a_worker_of_one_evaluation_has_its_task_alone_and_asks_the_very_same(name: str) -> None:
    first = {"kind": "arithmetic", "name": "sums"}
    second = {"kind": "sandbox:Task", "name": "moves"}
    plain = {"prompts": ROWS, "siblings": 2}
    config = msgspec.structs.replace(
        make_config(**{f"evaluation__{key}": value for key, value in plain.items()}),
        task=msgspec.convert(first, Task),
        more_tasks=(msgspec.convert(second, Task),),
        more_evaluations=tuple(
            msgspec.convert({**plain, "name": one, "task": task}, Evaluation)
            for one, task in (("hard", "sums"), ("other", "moves"))
        ),
    )
    started = run_started(config)
    evaluation = next(one for one in config.evaluations if one.name == name)
    asked = asking_only(started, evaluation)
    alone = logged_config(asked.config)
    (pool,) = pool_specs(alone)
    assert pool.task.name == ("moves" if name == "other" else "sums")
    assert source_of("eval", name) in pool.sources
    one = EvaluationDraws(started=started, config=config, evaluation=evaluation)
    same = EvaluationDraws(started=asked, config=alone, evaluation=alone.evaluation)
    assert same.rows == one.rows
    assert [same.spec(at, "d") for at in range(4)] == [one.spec(at, "d") for at in range(4)]


def logged(trajectory: str, reward: float | None, *, epoch: int = 3, error: str = "") -> Any:
    entry = LoggedEntry(
        trajectory=trajectory,
        attempt=1,
        partition=0,
        offset=7,
        sha256="ab",
        bytes=1,
        tokens=1,
        reward=reward,
        finish="stop",
        error=error,
    )
    return TrajectoriesLogged(
        at_ns=0, worker="w", epoch=epoch, version=1, digest="d", trajectories=(entry,)
    )


def not_sampled(*, retryable: bool) -> RequestFailed:
    return RequestFailed(
        at_ns=0,
        worker="w",
        epoch=3,
        trajectory=ONE,
        attempt=1,
        error="EpisodeLost",
        message="its process ended",
        retryable=retryable,
    )


def scored(*, error: str = "", **rewards: float) -> GroupScored:
    siblings = tuple(
        ScoredSibling(trajectory=f"{GROUP}-{name[1:]}", reward=one) for name, one in rewards.items()
    )
    return GroupScored(
        at_ns=0,
        worker="w",
        epoch=3,
        group=GROUP,
        attempt=1,
        siblings=siblings,
        error=error,
        retryable=bool(error),
    )


def folded(*facts: Any) -> AskedDraws:
    sampled = AskedDraws(attempts_max=3)
    for one in facts:
        sampled.add(one)
    return sampled


def test_draws_are_the_siblings_row_by_row_and_then_again() -> None:
    found = [draws().draw(at) for at in (0, 1, 2, 5, 6, 7)]
    assert found == [(0, 0), (0, 1), (1, 0), (2, 1), (3, 0), (3, 1)]
    assert draws().needed(1, 3) == [(0, 1), (1, 0)]


def test_of_siblings_that_are_scored_together_all_are_needed() -> None:
    assert draws(together=True).needed(1, 3) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_draw_is_of_the_group_that_the_run_itself_would_dispatch() -> None:
    one, digest = draws(), weights(1)
    own = evaluation_group(
        one.started, one.config, one.evaluation, 2, ordinal=2, version=1, digest=digest
    )
    assert (one.spec(2, digest).seed, one.spec(2, digest).index) == (own.seed, 2)
    again = one.spec(2 + ROWS, digest)
    assert (again.index, again.dataset_digest) == (2, own.dataset_digest)
    assert again.seed not in (own.seed, one.spec(2 + 2 * ROWS, digest).seed)


def test_a_request_is_asked_again_as_often_as_the_run_asks() -> None:
    failed = not_sampled(retryable=True)
    assert not folded(failed, failed).is_over(ONE)
    sampled = folded(failed, failed, failed)
    assert sampled.is_over(ONE)
    assert sampled.value(ONE, GROUP, together=False) is None
    assert sampled.error(ONE, GROUP) == "EpisodeLost"
    assert folded(not_sampled(retryable=False)).is_over(ONE)


def test_the_first_record_of_a_trajectory_counts() -> None:
    sampled = folded(not_sampled(retryable=True), logged(ONE, 1.0), logged(ONE, 0.0, epoch=9))
    assert sampled.is_over(ONE)
    assert sampled.value(ONE, GROUP, together=False) == 1.0
    (taken,) = sampled.siblings(GROUP, 2)
    assert (taken.trajectory, taken.epoch, taken.offset) == (ONE, 3, 7)


def test_siblings_that_are_scored_together_count_what_their_group_gave_them() -> None:
    both = logged(ONE, 1.0), logged(OTHER, 0.0)
    assert folded(*both).value(ONE, GROUP, together=True) is None, "it has not been scored"
    sampled = folded(*both, scored(s000=3.0, s001=2.0))
    assert sampled.value(ONE, GROUP, together=True) == 3.0
    assert sampled.value(OTHER, GROUP, together=True) == 2.0


def test_a_sibling_without_a_reward_of_its_own_is_not_scored_with_the_others() -> None:
    sampled = folded(logged(ONE, 1.0), logged(OTHER, None, error="Retry: busy"))
    assert [one.trajectory for one in sampled.siblings(GROUP, 2)] == [ONE]
    assert sampled.value(OTHER, GROUP, together=True) is None
    assert sampled.error(OTHER, GROUP) == "Retry"


@pytest.mark.parametrize(("times", "ended"), [(2, False), (3, True)])
def test_a_group_that_cannot_be_scored_is_given_up_as_the_run_gives_it_up(
    times: int, ended: bool
) -> None:
    failed = scored(error="TimedOut: after 10 s")
    sampled = folded(logged(ONE, 1.0), *[failed] * times)
    assert (GROUP in sampled.unscored) == ended
    assert sampled.value(ONE, GROUP, together=True) is None
    assert sampled.error(ONE, GROUP) == ("TimedOut" if ended else "")
