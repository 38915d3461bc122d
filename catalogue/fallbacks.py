"""Files of versions that were lost or damaged on their way to a worker or to the trainer; decides
which were lost.

A store cannot tell a patch that was lost from one that never was (of version 0, of a step that
changed nothing). The commit of a version says what there was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dora_pipe.catalogue.tables import FallbackRow
from dora_pipe.schemas.control import StepCommitted, WorkerReady
from dora_pipe.schemas.policy import Fallback


class FallbackAccount:
    """Hears commits and workers that are ready, in the order of the log."""

    def __init__(self) -> None:
        self._patched: set[str] = set()
        self._not_whole: set[str] = set()
        self._versions: dict[str, int] = {}

    def committed(self, fact: StepCommitted) -> Iterator[FallbackRow]:
        """A version is in the store, in these forms; what the trainer says with it."""
        self._versions.setdefault(fact.policy.digest, fact.step + 1)
        if fact.patch is not None:
            self._patched.add(fact.policy.digest)
        if not fact.whole:
            self._not_whole.add(fact.policy.digest)
        who, at_ns = {"worker": "trainer", "incarnation": fact.role_epoch}, fact.at_ns
        for one in fact.fallbacks:
            version = self._versions.get(one.digest, 0)
            yield from self._rows(one, **who, version=version, at_ns=at_ns)

    def ready(self, fact: WorkerReady) -> Iterator[FallbackRow]:
        """What a worker says with a version, without what never was there."""
        who, at_ns = {"worker": fact.worker, "incarnation": fact.epoch}, fact.at_ns
        for one in fact.fallbacks:
            yield from self._rows(one, **who, version=fact.version, at_ns=at_ns)

    def _rows(self, one: Fallback, **of: Any) -> Iterator[FallbackRow]:
        if not one.absent or self._was_there(one):
            yield FallbackRow(why=one.why, taken=one.taken, bytes=one.bytes, **of)

    def _was_there(self, one: Fallback) -> bool:
        """Whether the form of the version that the store does not have was published once."""
        if one.taken.startswith("weights/"):
            return one.digest in self._patched
        return one.digest not in self._not_whole
