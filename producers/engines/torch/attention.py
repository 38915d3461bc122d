"""The attention of one step.

A row has two products per key-value head, [group, head_dim] x [head_dim, keys] and [group, keys] x
[keys, head_dim]; `keys` depends only on its position. Decode reads a pool in place; prompt tokens
read a gathered copy at low positions, else one row in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from dora_pipe.producers.engines.slots import Integers
from dora_pipe.producers.engines.torch.kv import KvCache, Pool

GATHER_KEYS_MAX = 128
"""A gathered copy saves calls but is read once."""
GATHER_TOKENS_MAX = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions [start, end) of a slot to prefill."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Positions of a piece with equal `keys`."""

    slot: int
    start: int
    end: int
    keys: int
    pool: int
    row: int

    @property
    def gathered(self) -> bool:
        return self.keys <= GATHER_KEYS_MAX and self.end - self.start <= GATHER_TOKENS_MAX


def split_pieces(kv: KvCache, pieces: Sequence[Piece]) -> list[Run]:
    """Return the runs in the order of their token rows."""
    runs = [run for piece in pieces for run in _runs(kv, piece)]
    return sorted(runs, key=lambda run: (not run.gathered, run.pool, run.keys))


def _runs(kv: KvCache, piece: Piece) -> Iterator[Run]:
    number, row = kv.place(piece.slot)
    start = piece.start
    while start < piece.end:
        keys = kv.pools[kv.pool_of(start)].keys
        end = min(piece.end, keys)
        yield Run(slot=piece.slot, start=start, end=end, keys=keys, pool=number, row=row)
        start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Token rows [start, end); `mask` is [batch, 1, keys]."""

    start: int
    end: int
    keys: int
    pool: Pool
    mask: torch.Tensor
    rows: torch.Tensor | None = None
    """Rows to gather; None: the first rows in place."""
    row: int = 0
    """Row of a prompt read in place."""


class StepAttention:
    """Attention of the dense rows, followed by `runs`.

    Create after `KvCache.settle`: token row i is `kv.order[i]`.
    """

    def __init__(self, kv: KvCache, positions: Integers, runs: Sequence[Run]) -> None:
        self._model = kv.model
        self._storage = kv.storage
        self._scale = 1.0 / math.sqrt(kv.model.head_dim)
        self._lines = torch.from_numpy(_lines(kv, positions, runs))
        self._batches: list[_Part] = []
        self._in_place: list[_Part] = []
        self._plan_dense(kv, positions)
        self._plan_runs(kv, len(positions), runs)

    def __call__(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        model = self._model
        heads, group, width = model.kv_heads, model.group, model.head_dim
        rows = len(self._lines) // (2 * heads)
        queries = qkv[:, : model.heads * width].view(-1, heads, group, width)
        fresh = qkv[:rows, model.heads * width :].reshape(-1, width)
        self._storage[layer].index_copy_(0, self._lines, fresh)
        for part in self._batches:
            q = queries[part.start : part.end].reshape(-1, group, width)
            k, v = self._keys_and_values(part, layer)
            out[part.start : part.end] = self._attend(q, k, v, part.mask).view(
                part.end - part.start, -1
            )
        outputs = out.view(-1, heads, group, width)
        for run in self._in_place:
            for head in range(heads):
                row = run.pool.data[layer, :, run.row, head, : run.keys]
                k, v = row.unsqueeze(1).expand(-1, run.end - run.start, -1, -1)
                q = queries[run.start : run.end, head]
                outputs[run.start : run.end, head] = self._attend(q, k, v, run.mask)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if len(q) == 1:  # A single product may use another kernel than a batch.
            q, k, v, mask = (tensor.expand(2, -1, -1) for tensor in (q, k, v, mask))
            return self._attend(q, k, v, mask)[:1]
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), v)

    def _keys_and_values(self, part: _Part, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = part.pool.data[layer]
        if part.rows is None:
            both = data[:, : part.end - part.start]
        else:
            both = data[:, :, :, : part.keys].index_select(1, part.rows)
        k, v = both.flatten(1, 2)
        return k, v

    def _plan_dense(self, kv: KvCache, positions: Integers) -> None:
        start = 0
        for pool in kv.pools:
            end = start + len(pool.slots)
            if end > start:
                mask = _mask(positions[start:end], pool.keys, kv.model.kv_heads)
                self._batches.append(
                    _Part(start=start, end=end, keys=pool.keys, pool=pool, mask=mask)
                )
            start = end

    def _plan_runs(self, kv: KvCache, start: int, runs: Sequence[Run]) -> None:
        for (pool, keys), members in groupby(
            (run for run in runs if run.gathered), lambda run: (run.pool, run.keys)
        ):
            group = list(members)
            positions = _positions(group)
            rows = np.repeat([run.row for run in group], [run.end - run.start for run in group])
            self._batches.append(
                _Part(
                    start=start,
                    end=start + len(positions),
                    keys=keys,
                    pool=kv.pools[pool],
                    mask=_mask(positions, keys, kv.model.kv_heads),
                    rows=torch.from_numpy(rows),
                )
            )
            start += len(positions)
        for run in runs:
            if not run.gathered:
                end = start + run.end - run.start
                mask = _mask(np.arange(run.start, run.end), run.keys, 1)
                self._in_place.append(
                    _Part(
                        start=start,
                        end=end,
                        keys=run.keys,
                        pool=kv.pools[run.pool],
                        mask=mask,
                        row=run.row,
                    )
                )
                start = end


def _lines(kv: KvCache, positions: Integers, runs: Sequence[Run]) -> Integers:
    written = kv.first_lines + positions[:, None]
    if runs:
        first = kv.lines(np.array([run.pool for run in runs]), np.array([run.row for run in runs]))
        first = np.repeat(first, [run.end - run.start for run in runs], axis=0)
        behind = first + _positions(runs)[:, None]
        written = np.concatenate([written, behind])
    return written.reshape(-1)


def _positions(runs: Sequence[Run]) -> Integers:
    return np.concatenate([np.arange(run.start, run.end) for run in runs])


def _mask(positions: Integers, keys: int, heads: int) -> torch.Tensor:
    """Return 0 for keys up to each position, else -inf: float32 [positions * heads, 1, keys]."""
    visible = np.arange(keys) <= np.repeat(positions, heads)[:, None]
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None]
