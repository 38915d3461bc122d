"""Keeps the keys and values of sequences that have left their slot; decides which are forgotten.

A tree per version: an edge is a stretch of token ids with what was computed of it, and sequences
that begin alike share its first edges. What a key is depends on the tokens before it and on the
weights alone, so whoever begins with the same ids under the same weights may go on from it. Sizes
are bounded in tokens; what was not used for longest goes first, ends before beginnings. (The radix
tree of SGLang, Zheng et al. 2023, here over copies instead of pages.) Without torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dora_pipe.producers.engines.port import Array
from dora_pipe.producers.engines.slots import Integers

Ids = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

Copied = Callable[[int, int], Array]
"""(start, end) -> a copy of what was computed of these positions: [..., tokens, head_dim]."""


@dataclass(slots=True, eq=False)
class _Edge:
    """A stretch of tokens behind its `parent`; a root has none of either."""

    ids: Integers
    data: Array
    parent: _Edge | None
    children: dict[int, _Edge] = field(default_factory=dict)
    """By the first token of each."""


def _root() -> _Edge:
    return _Edge(np.zeros(0, np.int64), np.zeros(0), None)


class KeptPrefixes:
    """See the module.

    Example: ``kept.keep("ab12", ids, copied)``, then ``kept.longest("ab12", longer_ids)`` is what
    was computed of the common beginning.
    """

    def __init__(self, *, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.tokens = 0
        """Held now; at most `tokens_max`."""
        self._roots: dict[str, _Edge] = {}
        """By weights digest."""
        self._edges: OrderedDict[_Edge, None] = OrderedDict()
        """The least recently used first; an edge always stands behind those that follow on it."""

    def known(self, weights: str, ids: Integers) -> int:
        """How many of the first tokens are held."""
        return sum(used for _, used in self._path(weights, ids))

    def longest(self, weights: str, ids: Integers) -> Array | None:
        """What is held of the longest beginning, which counts as used; None without any."""
        path = self._path(weights, ids)
        self._use([edge for edge, _ in path])
        found = [edge.data[..., :used, :] for edge, used in path]
        return np.concatenate(found, axis=-2) if found else None

    def keep(self, weights: str, ids: Integers, copied: Copied) -> None:
        """Hold a sequence, unless it is too long; only what is not held yet is copied."""
        if len(ids) > self.tokens_max:
            return
        path = self._path(weights, ids)
        start, edges = sum(used for _, used in path), [edge for edge, _ in path]
        if start < len(ids):
            if path and path[-1][1] < len(edges[-1].ids):
                edges[-1] = self._split(*path[-1])
            parent = edges[-1] if edges else self._roots.setdefault(weights, _root())
            edges.append(self._add(parent, ids[start:].copy(), copied(start, len(ids))))
        self._use(edges)
        self._shrink()

    def retain(self, weights: Collection[str]) -> None:
        """Forget what was computed under other weights than these."""
        for gone in set(self._roots) - set(weights):
            left = list(self._roots.pop(gone).children.values())
            while left:
                edge = left.pop()
                left += edge.children.values()
                self._forget(edge)

    def _path(self, weights: str, ids: Integers) -> list[tuple[_Edge, int]]:
        """The edges that a sequence begins with, and how many tokens of each."""
        edge, at, found = self._roots.get(weights), 0, []
        while edge is not None and at < len(ids):
            edge = edge.children.get(int(ids[at]))
            if edge is None:
                break
            used = common_prefix(edge.ids, ids[at:])
            found.append((edge, used))
            at += used
            if used < len(edge.ids):
                break
        return found

    def _use(self, path: list[_Edge]) -> None:
        """These edges, from a root on, were used now."""
        for edge in reversed(path):
            self._edges.move_to_end(edge)

    def _add(self, parent: _Edge, ids: Integers, data: Array) -> _Edge:
        edge = parent.children[int(ids[0])] = _Edge(ids, data, parent)
        self._edges[edge] = None
        self.tokens += len(ids)
        return edge

    def _split(self, edge: _Edge, used: int) -> _Edge:
        """Cut an edge in two; the first half, which is new. Copies, so that each can be freed."""
        first = _Edge(edge.ids[:used].copy(), edge.data[..., :used, :].copy(), edge.parent)
        assert edge.parent is not None
        edge.parent.children[int(first.ids[0])] = first
        edge.ids, edge.data = edge.ids[used:].copy(), edge.data[..., used:, :].copy()
        edge.parent = first
        first.children[int(edge.ids[0])] = edge
        self._edges[first] = None
        return first

    def _shrink(self) -> None:
        while self.tokens > self.tokens_max:
            edge = next(iter(self._edges))
            assert edge.parent is not None and not edge.children
            del edge.parent.children[int(edge.ids[0])]
            self._forget(edge)

    def _forget(self, edge: _Edge) -> None:
        del self._edges[edge]
        self.tokens -= len(edge.ids)


def common_prefix(one: Ids, other: Ids) -> int:
    """How many first tokens are equal."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size
