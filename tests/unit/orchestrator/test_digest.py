"""A digest that is kept in step is the one that is made from nothing, after every single change."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.orchestrator import digest as digests
from dora_pipe.orchestrator.apply_control import apply_control, read_control
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.digest import TABLES, digest_of
from dora_pipe.orchestrator.fold import apply_observation, close_round
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY
from dora_pipe.schemas.wire import canonical
from tests.golden.state import FOLDER, content, golden_state
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.orchestrator_world import Chances, World

FAULTS = Chances(
    invalid=0.1,
    failure=0.1,
    crash=0.03,
    freeze=0.02,
    refusal=0.2,
    trainer_restart=0.1,
    restart=0.05,
    command=0.2,
    equal_rewards=0.2,
    moves=True,
    kv_tokens=300,
)


def faulty(seed: int) -> World:
    """A run with all faults at once, over; a third of the seeds with resident versions."""
    config = records.make_config(
        run__steps=8,
        groups__size=3,
        groups__per_step=2,
        groups__filter_zero_advantage=True,
        staleness__max_staleness=2,
        evaluation__prompts=2,
    )
    world = World(
        seed=seed,
        config=config,
        workers={"w0": (4, 2), "w1": (3, 0), "w2": (2, 1)},
        versions={"w1": 3} if seed % 3 == 0 else {},
        chances=FAULTS,
    )
    world.run(seconds=60.0)
    world.heal()
    world.run(seconds=5000.0)
    assert world.machine.state.done
    return world


@pytest.mark.parametrize("seed", range(9))
def test_kept_in_step_equals_made_from_nothing_after_every_operation(seed: int) -> None:
    world, state = faulty(seed), State()
    kinds = set()

    def same(what: object) -> None:
        kinds.add(type(what).__name__)
        assert state.digest() == digest_of(state), what

    for at in read_rounds(world.bus, world.topics):
        for record in at.control:
            found = read_control(record.value)
            apply_control(state, record.offset, found)
            same(found)
        for observation in at.round.observations:
            apply_observation(state, observation)
            same(observation)
        state.now_ns = at.round.now_ns
        for decision in at.round.decisions:
            apply_decision(state, decision)
            same(decision)
        close_round(state, at.round)
        same(at.round)
    assert {"Place", "TakeBatch", "End", "StepCommitted", "TrajectoriesLogged", "Assign"} <= kinds


def test_operations_of_all_kinds_were_compared() -> None:
    seen: set[str] = set()
    for seed in range(9):
        world = faulty(seed)
        for at in read_rounds(world.bus, world.topics):
            found = [read_control(one.value) for one in at.control]
            together = [*found, *at.round.observations, *at.round.decisions]
            seen.update(type(one).__name__ for one in together)
    wanted = {"Fence", "Move", "Cancel", "Drain", "LeaseExpired", "Progressed", "BatchRefused"}
    assert wanted | {"RequestReleased", "WorkerLeft", "Command", "KvPressure"} <= seen


def test_slices_of_any_size_lead_to_the_same_digest() -> None:
    world = faulty(1)
    one, other, chance = State(), State(), random.Random(3)
    from dora_pipe.orchestrator.fold import fold_round

    for at in read_rounds(world.bus, world.topics):
        fold_round(one, at.round, at.folded())
        fold_round(other, at.round, at.folded())
        other.leaves.settle(other, chance.randrange(STATE_DIGEST_EVERY))
        if chance.random() < 0.1:
            assert one.digest() == other.digest() == digest_of(one)


def test_slice_leaves_the_rest_to_the_rounds_before_the_next_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(groups__size=8, groups__per_step=8).begin()
    stage.worker("w0", slots=64)
    state = stage.state
    state.digest()
    encoded: list[Any] = []

    def count(value: Any) -> bytes:
        encoded.append(value)
        return canonical(value)

    monkeypatch.setattr(digests, "canonical", count)
    monkeypatch.setattr(digests, "SHARE_BYTES", 0)
    names = sorted(state.requests)[:64]
    for name in names:
        state.leaves.touch("request", name)
    sizes = []
    for rounds in reversed(range(4)):
        before = len(encoded)
        state.leaves.settle(state, rounds)
        sizes.append(len(encoded) - before)
    assert sizes == [16, 16, 16, 16]
    state.digest()
    assert len(encoded) == 65, "nothing is encoded but the rest"


def test_bytes_bound_what_a_round_hashes_while_the_digest_is_far() -> None:
    stage = Stage(groups__size=8, groups__per_step=8).begin()
    stage.worker("w0", slots=64)
    state = stage.state
    state.digest()
    names = sorted(state.requests)[:64]
    for name in names * 100:
        state.leaves.touch("request", name)
    state.leaves.settle(state, 60)
    assert state.leaves.unsettled <= 64, "few leaves are hashed at once, their buckets later"
    for number in range(10_000):
        state.leaves.touch("request", f"gone-{number}")
    before = state.leaves.unsettled
    state.leaves.settle(state, 60)
    assert before - 2 * digests.SHARE_BYTES / digests.LEAF_BYTES < state.leaves.unsettled


def test_round_of_a_digest_finds_little_more_to_hash_than_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, chance = Stage().begin(), random.Random(1)
    state, hashed, sizes = stage.state, [0], []
    state.digest()

    def count(data: bytes = b"") -> Any:
        hashed[0] += 1
        return sha256(data)

    monkeypatch.setattr(digests, "sha256", count)
    for rounds in reversed(range(STATE_DIGEST_EVERY)):
        for _ in range(400):  # That are gone have no leaf to hash, but a bucket.
            state.leaves.touch("request", f"gone-{chance.random()}")
        hashed[0] = 0
        state.leaves.settle(state, rounds)
        sizes.append(hashed[0])
    assert set(sizes[: -digests.NEAR_ROUNDS]) == {0}
    assert 300 < sizes[-1] <= max(sizes) < 700, "of some four thousand"
    assert state.digest() == digest_of(state)


def test_copy_goes_its_own_way() -> None:
    stage = Stage(groups__size=2, groups__per_step=2).begin()
    stage.worker("w0", slots=4)
    before = stage.state.digest()
    copied = copy.deepcopy(stage.state)
    stage.finish_all()
    assert copied.digest() == before == digest_of(copied)
    assert stage.state.digest() == digest_of(stage.state) != before


def by_a_stranger(leaves: Sequence[bytes], rest: bytes) -> str:
    """The documented formula, with nothing but the standard library."""
    buckets: list[list[bytes]] = [[] for _ in range(4096)]
    for leaf in leaves:
        _, name, _ = json.loads(leaf)
        buckets[crc32(name.encode()) % 4096].append(sha256(leaf).digest())
    whole = sha256(rest).digest()
    for bucket in buckets:
        whole += sha256(b"".join(sorted(bucket))).digest()
    return sha256(whole).hexdigest()


def written(value: Any) -> str:
    """Canonical JSON as reference/records.md has it, of an object whose names are in order."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, float) and "e" in repr(value):
        digits, exponent = repr(value).split("e")
        if -5 <= int(exponent) < 0:
            return "0." + "0" * (-int(exponent) - 1) + digits.replace(".", "")
        return f"{digits}e{int(exponent)}"
    return json.dumps(value, ensure_ascii=False)


def test_formula_is_the_documented_one() -> None:
    state = golden_state()
    made = content(state)
    leaves = made["leaves.jsonl"].splitlines()
    assert len(leaves) == sum(len(getattr(state, table)) for table in TABLES.values()) > 10
    assert {json.loads(one)[0] for one in leaves} == set(TABLES) - {"row"}
    assert by_a_stranger(leaves, made["rest.json"]) == state.digest() == digest_of(state)


def test_example_of_the_documentation_has_its_digest() -> None:
    read = {name: (FOLDER / name).read_bytes() for name in content(golden_state())}
    leaves = read["leaves.jsonl"].splitlines()
    assert by_a_stranger(leaves, read["rest.json"]) == read["digest.txt"].decode().strip()
    for line in (*leaves, read["rest.json"]):
        assert written(json.loads(line)).encode() == line


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_numbers_are_written_as_documented(value: float) -> None:
    assert canonical(value).decode() == written(value)


def test_same_id_under_another_kind_is_another_leaf() -> None:
    stage = Stage(groups__size=1, groups__per_step=1).begin()
    stage.worker("g0000000000", slots=1)
    assert "g0000000000" in stage.state.groups
    assert stage.state.digest() == digest_of(stage.state)
    stage.lose("g0000000000")
    stage.settle()
    assert "g0000000000" not in stage.state.workers
    assert stage.state.digest() == digest_of(stage.state)
