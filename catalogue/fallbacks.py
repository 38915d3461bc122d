"""Files of versions that were lost or damaged on their way to a worker; decides which were lost.

A store cannot tell a patch that was lost from one that never was (of version 0, of a step that
changed nothing). The commit of a version says what there was.
"""

from __future__ import annotations

from dora_pipe.catalogue.tables import FallbackRow
from dora_pipe.schemas.control import StepCommitted, WorkerReady
from dora_pipe.schemas.policy import Fallback


class FallbackAccount:
    """Hears commits and workers that are ready, in the order of the log."""

    def __init__(self) -> None:
        self._patched: set[str] = set()
        self._not_whole: set[str] = set()

    def committed(self, fact: StepCommitted) -> None:
        """A version is in the store, in these forms."""
        if fact.patch is not None:
            self._patched.add(fact.policy.digest)
        if not fact.whole:
            self._not_whole.add(fact.policy.digest)

    def ready(self, fact: WorkerReady) -> list[FallbackRow]:
        """What a worker says with a version, without what never was there."""
        return [
            FallbackRow(
                worker=fact.worker,
                incarnation=fact.epoch,
                version=fact.version,
                at_ns=fact.at_ns,
                why=one.why,
                taken=one.taken,
                bytes=one.bytes,
            )
            for one in fact.fallbacks
            if not one.absent or self._was_there(one)
        ]

    def _was_there(self, one: Fallback) -> bool:
        """Whether the form of the version that the store does not have was published once."""
        if one.taken.startswith("weights/"):
            return one.digest in self._patched
        return one.digest not in self._not_whole
