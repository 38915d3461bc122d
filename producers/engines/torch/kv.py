"""The KV cache of the torch engine.

Rows of similar length share a pool, which reads a fixed number of keys (32, 64, ... up to the
context): the shape of a row's products depends only on its position. Full rows move to the next
pool. Rows are dense, so a pool's attention is one batch. Memory is allocated once, twice slots x
context; unused pages stay untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dora_pipe.producers.engines.slots import Integers
from dora_pipe.producers.engines.torch.causal_lm import CausalLM

KEYS_MIN = 32
"""Keys of the first pool; all pools have a multiple."""
HOLE = -1


def pool_keys(context_tokens: int) -> list[int]:
    """Return each pool's keys, doubling up to the rounded context."""
    longest = -(-context_tokens // KEYS_MIN) * KEYS_MIN
    sizes = [KEYS_MIN]
    while sizes[-1] < longest:
        sizes.append(min(2 * sizes[-1], longest))
    return sizes


@dataclass(slots=True)
class Pool:
    """Rows with `keys` keys; the last row stages a long prompt."""

    keys: int
    capacity: int
    base: int
    """First storage line."""
    data: torch.Tensor  # [layers, 2, capacity, kv_heads, keys, head_dim]
    slots: list[int] = field(default_factory=list)
    """Slot per row, or HOLE."""


class KvCache:
    """Keys and values of all slots.

    A slot is absent, dense in a pool, staged (at most one), or adopted: waiting to enter.
    """

    def __init__(self, model: CausalLM, *, slots: int, context_tokens: int) -> None:
        self.model = model
        sizes = pool_keys(context_tokens)
        capacity = slots + 1
        lines = [2 * capacity * model.kv_heads * keys for keys in sizes]
        # Untouched pages; torch.zeros would write them.
        storage = np.zeros((model.layers, sum(lines), model.head_dim), dtype=np.float32)
        self.storage = torch.from_numpy(storage)
        self.pools: list[Pool] = []
        for number, keys in enumerate(sizes):
            base = sum(lines[:number])
            data = self.storage[:, base : base + lines[number]].view(
                model.layers, 2, capacity, model.kv_heads, keys, model.head_dim
            )
            self.pools.append(Pool(keys=keys, capacity=capacity, base=base, data=data))
        self._pool_of = np.repeat(np.arange(len(sizes)), np.diff([0, *sizes]))
        self._dense: dict[int, tuple[int, int]] = {}
        self._staged: tuple[int, int] | None = None
        self._adopted: dict[int, torch.Tensor] = {}
        self._keys = np.array(sizes)
        self._bases = np.array([pool.base for pool in self.pools])
        self.order: Integers = np.zeros(0, np.int64)
        """Slots of the dense rows, by pool."""
        self.room: Integers = np.zeros(0, np.int64)
        """Keys of each row's pool."""
        self.first_lines: Integers = np.zeros((0, 2 * model.kv_heads), np.int64)
        """`lines` of each row."""

    def pool_of(self, position: int) -> int:
        return int(self._pool_of[position])

    def is_dense(self, slot: int) -> bool:
        return slot in self._dense

    def is_staged(self, slot: int) -> bool:
        """Return whether the prompt is prefilled over several steps."""
        return self._staged is not None and self._staged[0] == slot

    def stage(self, slot: int, last_position: int) -> None:
        """Move the slot, with adopted keys, to a staging row."""
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
        """Give an absent slot keys and values, as from `copied`."""
        assert slot not in self._dense and not self.is_staged(slot)
        self._adopted[slot] = data

    def copied(self, slot: int, end: int, start: int = 0) -> torch.Tensor:
        """Copy positions [start, end): [layers, 2, kv_heads, end - start, head_dim]."""
        adopted = self._adopted.get(slot)
        if adopted is None:
            pool, row = self.place(slot)
            adopted = self.pools[pool].data[:, :, row]
        return adopted[:, :, :, start:end].clone(memory_format=torch.contiguous_format)

    def release(self, slot: int) -> None:
        self._leave(slot)

    def settle(self, entering: Sequence[tuple[int, int]], used: Integers) -> None:
        """Move slots to the pools of (slot, position), with `used[slot]` keys; close all holes."""
        # Longest first: rows from below fill the holes.
        for slot, position in sorted(entering, key=lambda entry: (-entry[1], entry[0])):
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
        # Masked keys must still be finite: the mask does not cancel infinity.
        pool.data[:, :, row, :, used:].zero_()
        if source is not None:
            pool.data[:, :, row, :, :used].copy_(source[:, :, :, :used])

    def _leave(self, slot: int) -> torch.Tensor | None:
        """Free a slot; return its data [layers, 2, kv_heads, keys, head_dim]."""
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
        """Return (pool, row) of a dense or staged slot."""
        if self.is_staged(slot):
            assert self._staged is not None
            return self._staged[1], self.pools[self._staged[1]].capacity - 1
        return self._dense[slot]

    def lines(self, pools: Integers, rows: Integers) -> Integers:
        """Return storage lines of position 0: [rows, 2 * kv_heads], keys first."""
        heads = self.model.kv_heads
        which = np.arange(2 * heads)
        planes = (which // heads) * self.pools[0].capacity + rows[:, None]
        keys, bases = self._keys[pools][:, None], self._bases[pools][:, None]
        lines: Integers = bases + (planes * heads + which % heads) * keys
        return lines
