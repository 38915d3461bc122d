"""Prefix cache of keys and values, over finished sequences and prompts; without torch.

A radix tree per weights digest, as in SGLang (Zheng et al. 2023) but over copies: an edge holds
token ids and their data. Bounded in tokens; evicts least recently used edges, leaves first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dora_pipe.producers.engines.engine import Array
from dora_pipe.producers.engines.slots import Integers

Ids = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

Copied = Callable[[int, int], Array]
"""(start, end) -> copied data of these positions: [..., tokens, head_dim]."""


@dataclass(slots=True, eq=False)
class _Edge:
    ids: Integers
    data: Array
    parent: _Edge | None
    children: dict[int, _Edge] = field(default_factory=dict)
    """Children by first token."""


def _root() -> _Edge:
    return _Edge(np.zeros(0, np.int64), np.zeros(0), None)


class KeptPrefixes:
    """Cached prefixes by weights digest.

    Example: ``kept.keep("ab12", ids, copied)``, then ``kept.longest("ab12", longer_ids)`` returns
    the data of the common prefix.
    """

    def __init__(self, *, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.tokens = 0
        self._roots: dict[str, _Edge] = {}
        """Roots by weights digest."""
        self._edges: OrderedDict[_Edge, None] = OrderedDict()
        """Least recently used first; a parent is always after its children."""

    def known(self, weights: str, ids: Integers) -> int:
        """Return the number of cached first tokens."""
        return sum(used for _, used in self._path(weights, ids))

    def longest(self, weights: str, ids: Integers) -> Array | None:
        """Return the data of the longest cached prefix and mark it used; None if empty."""
        path = self._path(weights, ids)
        self._use([edge for edge, _ in path])
        parts = [edge.data[..., :used, :] for edge, used in path]
        return np.concatenate(parts, axis=-2) if parts else None

    def keep(self, weights: str, ids: Integers, copied: Copied) -> None:
        """Cache a sequence unless it is too long; copies only what is new."""
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
        """Forget prefixes of other weights."""
        for removed in set(self._roots) - set(weights):
            edges = list(self._roots.pop(removed).children.values())
            while edges:
                edge = edges.pop()
                edges += edge.children.values()
                self._forget(edge)

    def _path(self, weights: str, ids: Integers) -> list[tuple[_Edge, int]]:
        """Return the edges of the cached prefix, and the tokens used of each."""
        edge, offset, edges = self._roots.get(weights), 0, []
        while edge is not None and offset < len(ids):
            edge = edge.children.get(int(ids[offset]))
            if edge is None:
                break
            used = common_prefix(edge.ids, ids[offset:])
            edges.append((edge, used))
            offset += used
            if used < len(edge.ids):
                break
        return edges

    def _use(self, path: list[_Edge]) -> None:
        for edge in reversed(path):
            self._edges.move_to_end(edge)

    def _add(self, parent: _Edge, ids: Integers, data: Array) -> _Edge:
        edge = parent.children[int(ids[0])] = _Edge(ids, data, parent)
        self._edges[edge] = None
        self.tokens += len(ids)
        return edge

    def _split(self, edge: _Edge, used: int) -> _Edge:
        """Split an edge and return the first half; copies let each half be freed."""
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


def common_prefix(ids: Ids, other: Ids) -> int:
    size = min(len(ids), len(other))
    differing = np.flatnonzero(ids[:size] != other[:size])
    return int(differing[0]) if len(differing) else size
