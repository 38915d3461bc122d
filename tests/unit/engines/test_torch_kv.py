"""Tests of the KV cache against a simple model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.engine import MODEL
from dora_pipe.producers.engines.torch.attention import Piece, split_pieces
from dora_pipe.producers.engines.torch.kv import KEYS_MIN, KvCache, pool_keys

SLOTS, CONTEXT = 5, 300


@pytest.mark.parametrize(
    ("context", "sizes"),
    [
        (1, [32]),
        (32, [32]),
        (33, [32, 64]),
        (256, [32, 64, 128, 256]),
        (300, [32, 64, 128, 256, 320]),
    ],
)
def test_pools_double_up_to_the_context(context: int, sizes: list[int]) -> None:
    assert pool_keys(context) == sizes


def test_positions_read_the_keys_of_the_smallest_pool_that_holds_them() -> None:
    kv = KvCache(MODEL, slots=1, context_tokens=CONTEXT)
    for position in range(CONTEXT):
        keys = [pool.keys for pool in kv.pools]
        assert keys[kv.pool_of(position)] == min(size for size in keys if size > position)


class Twin:
    def __init__(self) -> None:
        self.kv = KvCache(MODEL, slots=SLOTS, context_tokens=CONTEXT)
        self.length = np.zeros(SLOTS, np.int64)
        self.tags: dict[int, int] = {}
        self.staged: int | None = None
        self.fresh = 0

    def write(self, slot: int, start: int, end: int) -> None:
        number, row = self.kv.place(slot)
        lines = self.kv.lines(np.array([number]), np.array([row]))[0]
        for position in range(start, end):
            for layer in range(MODEL.layers):
                for which, line in enumerate(lines):
                    self.kv.storage[layer, int(line) + position] = self._value(
                        slot, layer, which, position
                    )
        self.length[slot] = end

    def _value(self, slot: int, layer: int, which: int, position: int) -> float:
        return float(self.tags[slot] * 1e4 + position * 16 + layer * 8 + which)

    def settle(self, entering: list[tuple[int, int]]) -> None:
        self.kv.settle(entering, self.length)

    def check(self) -> None:
        kv = self.kv
        dense = [slot for slot in self.tags if slot != self.staged]
        assert sorted(kv.order.tolist()) == sorted(dense)
        position = 0
        for pool in kv.pools:
            assert kv.order[position : position + len(pool.slots)].tolist() == pool.slots
            assert (kv.room[position : position + len(pool.slots)] == pool.keys).all()
            position += len(pool.slots)
        for slot in self.tags:
            number, row = kv.place(slot)
            length = int(self.length[slot])
            data = kv.pools[number].data[:, :, row, :, :length, 0]
            heads = MODEL.kv_heads
            expected = [
                [
                    [
                        [self._value(slot, layer, plane * heads + head, p) for p in range(length)]
                        for head in range(heads)
                    ]
                    for plane in range(2)
                ]
                for layer in range(MODEL.layers)
            ]
            assert torch.equal(data, torch.tensor(expected).reshape(data.shape))
        for row, slot in enumerate(kv.order):
            number, location = kv.place(int(slot))
            lines = kv.lines(np.array([number]), np.array([location]))[0]
            assert kv.first_lines[row].tolist() == lines.tolist()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "grow", "grow", "leave", "stage"]), st.integers(0, 10**6)),
    max_size=25,
)


@given(ACTIONS)
def test_rows_keep_their_keys_wherever_they_are_moved(actions: list[tuple[str, int]]) -> None:
    twin = Twin()
    for action, number in actions:
        free = [slot for slot in range(SLOTS) if slot not in twin.tags]
        dense = [slot for slot in twin.tags if slot != twin.staged]
        entering: list[tuple[int, int]] = []
        if action == "enter" and free:
            slot = free[number % len(free)]
            twin.fresh += 1
            twin.tags[slot], twin.length[slot] = twin.fresh, 0
            size = 1 + number % 140
            twin.settle([(slot, size)])
            twin.write(slot, 0, size)
        elif action == "grow" and dense:
            for slot in dense[: 1 + number % len(dense)]:
                length = int(twin.length[slot])
                target = min(CONTEXT - 1, length + 1 + number % 60)
                if twin.kv.pool_of(target) != twin.kv.place(slot)[0]:
                    entering.append((slot, target))
            twin.settle(entering)
            for slot, target in entering:
                twin.write(slot, int(twin.length[slot]), target)
        elif action == "leave" and twin.tags:
            slot = sorted(twin.tags)[number % len(twin.tags)]
            twin.kv.release(slot)
            del twin.tags[slot]
            twin.staged = None if twin.staged == slot else twin.staged
            twin.settle([])
        elif action == "stage":
            _stage(twin, free, number)
        twin.check()


def _stage(twin: Twin, free: list[int], number: int) -> None:
    if twin.staged is not None:
        slot, twin.staged = twin.staged, None
        twin.settle([(slot, 200)])
        twin.write(slot, int(twin.length[slot]), 200)
    elif free:
        twin.staged = slot = free[number % len(free)]
        twin.fresh += 1
        twin.tags[slot] = twin.fresh
        twin.kv.stage(slot, 200)
        twin.write(slot, 0, 1 + number % 150)


def test_nothing_of_a_row_is_left_for_the_next_one() -> None:
    used = np.zeros(2, np.int64)
    kv = KvCache(MODEL, slots=2, context_tokens=64)
    kv.storage.fill_(torch.nan)
    kv.settle([(0, 5), (1, 40)], used)
    assert torch.isfinite(kv.pools[0].data[:, :, 0]).all()
    assert torch.isfinite(kv.pools[1].data[:, :, 0]).all()
    kv.release(1)
    used[0] = 32
    kv.pools[1].data.fill_(torch.nan)
    kv.settle([(0, 32)], used)
    assert torch.isfinite(kv.pools[1].data[:, :, 0]).all()
    kv.stage(1, 40)
    assert torch.isfinite(kv.pools[1].data[:, :, kv.pools[1].capacity - 1]).all()
    kv.release(0)
    kv.release(0)
    kv.settle([], used)
    assert len(kv.order) == 0


def test_a_prompt_is_split_where_its_positions_read_other_keys() -> None:
    kv = KvCache(MODEL, slots=3, context_tokens=256)
    kv.settle([(0, 100), (1, 5), (2, 200)], np.zeros(3, np.int64))
    pieces = [Piece(slot=2, start=0, end=200), Piece(slot=0, start=30, end=100)]
    runs = split_pieces(kv, [*pieces, Piece(slot=1, start=0, end=5)])
    spans = {slot: sorted((r.start, r.end) for r in runs if r.slot == slot) for slot in range(3)}
    assert spans == {
        0: [(30, 32), (32, 64), (64, 100)],
        1: [(0, 5)],
        2: [(0, 32), (32, 64), (64, 128), (128, 200)],
    }
    gathered = [run.gathered for run in runs]
    assert gathered == sorted(gathered, reverse=True)
    assert all(run.keys == kv.pools[kv.pool_of(run.end - 1)].keys for run in runs)
    assert {run.keys % KEYS_MIN for run in runs} == {0}
