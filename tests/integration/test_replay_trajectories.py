"""Trajectories generated again from seed, settings and weights: equal, or the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.config.model import Config
from dora_pipe.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.history.audit import build_ledger
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.regenerate import (
    Regenerated,
    engines_of,
    pick,
    raise_if_different,
    regenerate,
    stays_of,
)
from dora_pipe.producers.engines.port import SamplingParams
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine, long_tailed_length
from dora_pipe.producers.role import sampling_params
from dora_pipe.schemas.identity import Purpose
from tests.support import damage
from tests.support.batches import make_trajectory
from tests.support.cluster import Cluster, make_config
from tests.support.inline_tasks import episode_tasks
from tests.support.recorded_run import RecordedRun, recorded_in
from tests.support.tamper import Tamper


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


def test_trajectories_are_told_apart_by_engine_and_mixed_ones_named(recorded: RecordedRun) -> None:
    bus = recorded.open()
    try:
        ledger = build_ledger(bus, recorded.topics)
        names = pick(ledger, 20, 5)
        assert engines_of(bus, recorded.topics, ledger, names) == {"simulated": names}
        moved = next(
            entry
            for group in ledger.accounts.groups.values()
            for entry in group.requests.values()
            if entry.bound is not None and entry.placements[-1].resume is not None
        )
        worker = ledger.accounts.workers[moved.placements[-1].epoch]
        worker.joined = msgspec.structs.replace(worker.joined, engine="another")
        with pytest.raises(UsageError, match="another, simulated"):
            engines_of(bus, recorded.topics, ledger, [moved.trajectory])
    finally:
        bus.close()


def _params(config: Config) -> dict[Purpose, SamplingParams]:
    return {
        "train": sampling_params(config.sampling, (END_TOKEN,)),
        "eval": sampling_params(config.evaluation.sampling, (END_TOKEN,)),
    }


def _again(run: RecordedRun, wanted: Sequence[str] | int, *, slots: int = 6) -> list[Regenerated]:
    bus = run.open()
    try:
        ledger = build_ledger(bus, run.topics)
        assert ledger.config is not None
        names = pick(ledger, wanted, 3) if isinstance(wanted, int) else wanted
        engine = SimulatedEngine(slots=slots, context_tokens=256, lengths=long_tailed_length)
        params = _params(ledger.config)
        return list(regenerate(bus, run.topics, run.store, ledger, engine, names, params))
    finally:
        bus.close()


def _ledger(run: RecordedRun) -> Ledger:
    bus = run.open()
    try:
        return build_ledger(bus, run.topics)
    finally:
        bus.close()


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_random_trajectories_come_out_bit_for_bit(recorded: RecordedRun, slots: int) -> None:
    found = _again(recorded, 60, slots=slots)
    assert len(found) == 60
    assert [one for one in found if not one.equal] == []
    assert len({one.version for one in found}) > 5


def test_request_that_went_on_elsewhere_follows_its_prefill_points(recorded: RecordedRun) -> None:
    moved = [
        entry.trajectory
        for group in _ledger(recorded).accounts.groups.values()
        for entry in group.requests.values()
        if entry.placements[-1].resume is not None
    ]
    assert moved, "the recorded run has requests that went on from a progress record"
    found = _again(recorded, moved)
    assert all(one.equal and one.stays > 1 for one in found), found


def test_choice_is_a_function_of_the_seed(recorded: RecordedRun) -> None:
    ledger = _ledger(recorded)
    assert pick(ledger, 5, 1) == pick(ledger, 5, 1)
    assert pick(ledger, 5, 1) != pick(ledger, 5, 2)
    bound = [one for one in ledger.accounts.logged.values() if one.standing == "bound"]
    assert len(pick(ledger, 10_000, 1)) == len(bound)


def test_other_token_is_named_with_its_place(recorded: RecordedRun, tmp_path: Path) -> None:
    copy = recorded.copy(tmp_path / "copy")
    with Tamper(copy) as log:
        name = damage.change_token_and_record(log)
    (found,) = _again(copy, [name])
    assert not found.equal
    with pytest.raises(ReplayDiverged, match=rf"{name}: token \d+ is \d+, recorded is \d+"):
        raise_if_different(found)


def test_other_logprob_is_named_with_its_place(recorded: RecordedRun, tmp_path: Path) -> None:
    copy = recorded.copy(tmp_path / "copy")
    with Tamper(copy) as log:
        name = damage.change_logprob(log)
    (found,) = _again(copy, [name])
    assert found.difference.startswith("logprobs[")
    assert found.difference.endswith("recorded is -0.125")


def test_unknown_trajectory_is_refused(recorded: RecordedRun) -> None:
    with pytest.raises(UsageError, match="has no record that counts"):
        _again(recorded, ["g0000009999-000"])


def test_environments_are_fed_back_as_recorded(tmp_path: Path) -> None:
    config = make_config(run__steps=2, run__name="turns", evaluation__prompts=0)
    with Cluster(tmp_path / "run", config, tasks=lambda: episode_tasks(3)) as cluster:
        cluster.run()
    run = RecordedRun(directory=tmp_path / "run", run="turns")
    found = _again(run, 20)
    assert [one for one in found if not one.equal] == []
    assert max(one.stays for one in found) == 3


def test_stays_follow_mask_and_prefill_points() -> None:
    turns = _stays([0, 0, 1, 1, 0, 1, 1, 1], prefills=(2, 5))
    assert turns == [(2, 4, True), (5, 8, True)]
    moved = _stays([0, 0, 1, 1, 1, 1], prefills=(2, 4))
    assert moved == [(2, 4, False), (4, 6, True)]
    twice_at_once = _stays([0, 0, 1, 1, 1, 1], prefills=(2, 2, 4))
    assert twice_at_once == moved


def test_prefill_points_that_leave_tokens_over_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="do not lead to 4 sampled tokens"):
        _stays([0, 0, 1, 1, 1, 1], prefills=(3,))


def _stays(mask: list[int], prefills: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    one = make_trajectory("g0000000001-000", sampled=(7,) * (len(mask) - 3))
    meta = msgspec.structs.replace(one.meta, prefills=prefills)
    found = stays_of(replace(one, loss_mask=mask, meta=meta))
    return [(stay.start, stay.end, stay.whole) for stay in found]
