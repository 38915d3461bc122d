"""Lost or damaged files and their substitutes, for `worker ready` and `step committed`."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Fallback

LOG = logging.getLogger(__name__)

FALLBACKS_MAX: Final = 8


class Fallbacks:
    """Fallbacks since the last `take`.

    Example: ``store.weights(digest)``, then ``store.fallbacks.take()``
    """

    def __init__(self) -> None:
        self._noted: deque[Fallback] = deque(maxlen=FALLBACKS_MAX)
        self._fetched = 0

    def fetched(self, path: Path) -> None:
        self._fetched += path.stat().st_size

    def note(self, digest: str, error: PolicyError, taken: str, *, absent: bool = False) -> None:
        """Record that `taken` replaces an unavailable file."""
        LOG.warning("version %s...: %s; %s is taken", digest[:12], error.message, taken)
        fetched = -self._fetched  # later fetches are added
        self._noted.append(
            Fallback(digest=digest, why=error.message, taken=taken, bytes=fetched, absent=absent)
        )

    def take(self) -> tuple[Fallback, ...]:
        """Return and clear the entries, with the bytes fetched since each."""
        noted, self._noted = self._noted, deque(maxlen=FALLBACKS_MAX)
        return tuple(replace(one, bytes=one.bytes + self._fetched) for one in noted)
