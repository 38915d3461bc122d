"""The KV cache: decides where the keys and values of a row lie and with which shapes they are read.

Rows of similar length lie together in a pool, and a pool reads its own number of keys: 32, 64,
128, ... up to the context. So a step reads little more than it needs, and the shape of a row's
products is a function of its position alone. A row moves to the next pool when it has outgrown its
own. Rows of a pool are dense (a hole is filled by the next entrant, or by the last row), so that
the attention of a pool is one batch of products without gathering.

Memory is taken once, when the engine opens: twice slots x context. The pages of pools that are
never reached stay untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dora_pipe.producers.engines.slots import Integers
from dora_pipe.producers.engines.torch.causal_lm import CausalLM

KEYS_MIN = 32
"""Keys of the first pool; every pool has a multiple of this."""
HOLE = -1


def pool_keys(context_tokens: int) -> list[int]:
    """Keys of each pool: doubling, the last one as long as the context (rounded up)."""
    longest = -(-context_tokens // KEYS_MIN) * KEYS_MIN
    sizes = [KEYS_MIN]
    while sizes[-1] < longest:
        sizes.append(min(2 * sizes[-1], longest))
    return sizes


@dataclass(slots=True)
class Pool:
    """Rows with room for `keys` keys; row `capacity - 1` is where a long prompt is staged."""

    keys: int
    capacity: int
    base: int
    """First line of the pool in the cache's storage."""
    data: torch.Tensor  # [layers, kept, capacity, kv_heads, keys, head_dim]
    slots: list[int] = field(default_factory=list)
    """The slot in each dense row, or HOLE."""


class KvCache:
    """See the module.

    A slot is in no pool, dense in one, staged (one slot at a time), or adopted: on its way in.
    """

    def __init__(self, model: CausalLM, *, slots: int, context_tokens: int) -> None:
        self.model = model
        sizes = pool_keys(context_tokens)
        capacity = slots + 1
        lines = [model.kept * capacity * model.kv_heads * keys for keys in sizes]
        # numpy's zeros are untouched pages of memory, torch's would be written.
        storage = np.zeros((model.layers, sum(lines), model.head_dim), dtype=np.float32)
        self.storage = torch.from_numpy(storage)
        self.pools: list[Pool] = []
        for number, keys in enumerate(sizes):
            base = sum(lines[:number])
            data = self.storage[:, base : base + lines[number]].view(
                model.layers, model.kept, capacity, model.kv_heads, keys, model.head_dim
            )
            self.pools.append(Pool(keys=keys, capacity=capacity, base=base, data=data))
        self._pool_of = np.repeat(np.arange(len(sizes)), np.diff([0, *sizes]))
        self._dense: dict[int, tuple[int, int]] = {}
        self._staged: tuple[int, int] | None = None
        self._adopted: dict[int, torch.Tensor] = {}
        self._keys = np.array(sizes)
        self._bases = np.array([pool.base for pool in self.pools])
        self.order: Integers = np.zeros(0, np.int64)
        """Slots of the dense rows, pool by pool: the order of their token rows."""
        self.room: Integers = np.zeros(0, np.int64)
        """Keys of the pool of each row of `order`."""
        self.first_lines: Integers = np.zeros((0, model.kept * model.kv_heads), np.int64)
        """`lines` of each row of `order`."""

    def pool_of(self, position: int) -> int:
        """The pool whose rows hold keys up to this position."""
        return int(self._pool_of[position])

    def is_dense(self, slot: int) -> bool:
        """Whether the slot has a row in a pool."""
        return slot in self._dense

    def is_staged(self, slot: int) -> bool:
        """Whether the prompt in this slot is being prefilled over several steps."""
        return self._staged is not None and self._staged[0] == slot

    def stage(self, slot: int, last_position: int) -> None:
        """Give the slot the staging row of its pool, unless it has it already. What it has adopted
        it takes along."""
        if self.is_staged(slot):
            return
        assert self._staged is None and slot not in self._dense
        pool = self.pools[self.pool_of(last_position)]
        row = pool.data[:, :, pool.capacity - 1].zero_()
        adopted = self._adopted.pop(slot, None)
        if adopted is not None:
            row[:, :, :, : adopted.shape[3]].copy_(adopted)
        self._staged = (slot, self.pool_of(last_position))

    def adopt(self, slot: int, data: torch.Tensor) -> None:
        """Give a slot that is nowhere keys and values from position 0 on, as `copied` gave them.

        They are copied into a row when the slot enters a pool.
        """
        assert slot not in self._dense and not self.is_staged(slot)
        self._adopted[slot] = data

    def copied(self, slot: int, end: int, start: int = 0) -> torch.Tensor:
        """A copy of the keys and values of positions [start, end):
        [layers, kept, kv_heads, end - start, head_dim]."""
        whole = self._adopted.get(slot)
        if whole is None:
            pool, row = self.place(slot)
            whole = self.pools[pool].data[:, :, row]
        return whole[:, :, :, start:end].clone(memory_format=torch.contiguous_format)

    def release(self, slot: int) -> None:
        """Take the slot out, if it is in."""
        self._leave(slot)

    def settle(self, entering: Sequence[tuple[int, int]], used: Integers) -> None:
        """Bring slots into the pool of their position, (slot, position); then close every hole.

        A slot that was staged or dense elsewhere takes its keys along; `used[slot]` says how many.
        """
        # Longest first: the hole that a row leaves is then filled by one that comes from below.
        for slot, position in sorted(entering, key=lambda one: (-one[1], one[0])):
            self._enter(slot, self.pool_of(position), int(used[slot]))
        for number, pool in enumerate(self.pools):
            for row in range(len(pool.slots) - 1, -1, -1):
                if pool.slots[row] == HOLE:
                    self._fill_from_end(number, row)
        sizes = [len(pool.slots) for pool in self.pools]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        self.order = np.array([slot for pool in self.pools for slot in pool.slots], np.int64)
        self.room = self._keys[numbers]
        self.first_lines = self.lines(numbers, np.concatenate([np.arange(n) for n in sizes]))

    def _enter(self, slot: int, number: int, used: int) -> None:
        source = self._leave(slot)
        pool = self.pools[number]
        row = pool.slots.index(HOLE) if HOLE in pool.slots else len(pool.slots)
        if row == len(pool.slots):
            assert row < pool.capacity - 1
            pool.slots.append(slot)
        pool.slots[row] = slot
        self._dense[slot] = (number, row)
        # A key behind the position of a row is masked, but infinity would not be masked away.
        pool.data[:, :, row, :, used:].zero_()
        if source is not None:
            pool.data[:, :, row, :, :used].copy_(source[:, :, :, :used])

    def _leave(self, slot: int) -> torch.Tensor | None:
        """What a slot has [layers, kept, kv_heads, keys, head_dim]; its row is free."""
        if self.is_staged(slot):
            assert self._staged is not None
            pool = self.pools[self._staged[1]]
            self._staged = None
            return pool.data[:, :, pool.capacity - 1]
        if slot not in self._dense:
            return self._adopted.pop(slot, None)
        number, row = self._dense.pop(slot)
        self.pools[number].slots[row] = HOLE
        return self.pools[number].data[:, :, row]

    def _fill_from_end(self, number: int, row: int) -> None:
        pool = self.pools[number]
        slot = pool.slots.pop()
        if row == len(pool.slots):
            return
        pool.data[:, :, row].copy_(pool.data[:, :, len(pool.slots)])
        pool.slots[row] = slot
        self._dense[slot] = (number, row)

    def place(self, slot: int) -> tuple[int, int]:
        """(pool, row) of a slot that is dense or staged."""
        if self.is_staged(slot):
            assert self._staged is not None
            return self._staged[1], self.pools[self._staged[1]].capacity - 1
        return self._dense[slot]

    def lines(self, pools: Integers, rows: Integers) -> Integers:
        """Storage lines of position 0 of rows of pools: [rows, kept * kv_heads], keys first."""
        heads = self.model.kv_heads
        which = np.arange(self.model.kept * heads)
        planes = (which // heads) * self.pools[0].capacity + rows[:, None]
        keys, bases = self._keys[pools][:, None], self._bases[pools][:, None]
        lines: Integers = bases + (planes * heads + which % heads) * keys
        return lines
