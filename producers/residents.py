"""The versions of a worker that hosts several at once; the orchestrator decides which those are.

Every request runs under its own version, and goes on under it while another one is loaded. A
version that a decision drops has no request here any more; were there one, it would be handed back.
"""

from __future__ import annotations

from dora_pipe.producers.rows import Hosted


class Residents:
    """What is resident. A worker with one version at a time never has any here."""

    def __init__(self, most: int) -> None:
        self.several = most > 1
        self._held: dict[int, str] = {}

    @property
    def versions(self) -> list[int]:
        """Those that requests may run under, ascending."""
        return sorted(self._held)

    def has(self, version: int, digest: str) -> bool:
        """Whether these weights are resident as this version."""
        return self._held.get(version) == digest

    def loaded(self, hosted: Hosted) -> None:
        """One more is resident."""
        if self.several:
            self._held[hosted.version] = hosted.digest

    def drop(self, versions: tuple[int, ...]) -> tuple[int, ...]:
        """Forget versions; answers with those that were here."""
        return tuple(one for one in versions if self._held.pop(one, None) is not None)
