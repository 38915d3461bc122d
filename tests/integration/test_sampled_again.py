"""Rows of an evaluation sampled again: what was logged under equal weights, pairs under others."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.sampled_again import answered, draws, sample_again
from dora_pipe.config.logged import logged_config
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.engines.port import RequestFinished, SamplingParams
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine, long_tailed_length
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.store.store import PolicyStore
from tests.support.recorded_run import RecordedRun

Sampled = tuple[list[Trajectory], dict[str, SamplingParams], SimulatedEngine]


@pytest.fixture
def sampled(recorded: RecordedRun) -> Sampled:
    """The evaluated trajectories of one version, how they were sampled, and an engine that has the
    version's weights and fewer slots than there are rows."""
    with closing(recorded.open()) as bus:
        started, _ = policy_after(bus, recorded.topics, 0)
        records = records_of(bus, ends_of(bus, recorded.topics.trajectories))
        every = [decode_trajectory(one.value) for one in records]
    rows = {
        one.trajectory: one
        for one in every
        if one.meta.purpose == "eval" and one.version == 0 and one.meta.finish != "error"
    }
    config = logged_config(started.config)
    engine = SimulatedEngine(slots=2, context_tokens=256, lengths=long_tailed_length)
    digest = started.policy.digest
    engine.load(PolicyStore(recorded.store).weights(digest), version=1, digest=digest)
    params = {"eval": sampling_params(config.evaluation.sampling, (END_TOKEN,))}
    return list(rows.values()), params, engine


def test_equal_weights_give_the_answers_that_were_logged(sampled: Sampled) -> None:
    rows, params, engine = sampled
    again = list(sample_again(engine, rows, params))
    assert len(rows) > engine.slots
    assert [one.trajectory for one in again] == [one.trajectory for one in rows]
    for one, row in zip(again, rows, strict=True):
        assert list(one.token_ids) == list(row.token_ids)
        assert list(one.loss_mask) == list(np.asarray(row.loss_mask))
        assert (one.reward, one.meta.finish) == (None, row.meta.finish)


def test_a_row_that_is_drawn_again_has_another_seed_and_every_draw_its_own(
    sampled: Sampled,
) -> None:
    rows, params, engine = sampled
    size = len(rows)
    wanted = draws(rows, 0, 2 * size + 1)
    seeds = [one.meta.seed for one in wanted]
    assert len(set(seeds)) == len(seeds)
    assert [one.trajectory for one in wanted[size:]] == [one.trajectory for one in [*rows, rows[0]]]
    assert draws(rows, size, size + 2) == wanted[size : size + 2]
    again = list(sample_again(engine, wanted, params))
    assert list(again[0].token_ids) != list(again[size].token_ids)


def test_what_the_engine_gives_up_is_no_answer(sampled: Sampled) -> None:
    row = replace(sampled[0][0])
    with pytest.raises(InvariantBroken, match=f"{row.trajectory}: the engine gave up: no room"):
        answered(row, [5], RequestFinished(request="0", reason="error", error="no room"))
