"""Remembers which files of versions were lost or damaged, and what was taken in their place.

It decides how many are kept until somebody asks: the newest. A worker asks with every version that
it has loaded, and says them in `worker ready`, the trainer in `step committed`.
"""

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
"""So many are kept."""


class Fallbacks:
    """Those of a store's user since it asked last.

    Example: ``store.weights(digest)``, then ``store.fallbacks.take()``
    """

    def __init__(self) -> None:
        self._noted: deque[Fallback] = deque(maxlen=FALLBACKS_MAX)
        self._fetched = 0

    def fetched(self, path: Path) -> None:
        """A file has come, from a store elsewhere or a peer."""
        self._fetched += path.stat().st_size

    def note(self, digest: str, error: PolicyError, taken: str, *, absent: bool = False) -> None:
        """A file of the version of this digest is not to be had, and `taken` is had instead."""
        LOG.warning("version %s...: %s; %s is taken", digest[:12], error.message, taken)
        fetched = -self._fetched  # what comes from now on is added
        self._noted.append(
            Fallback(digest=digest, why=error.message, taken=taken, bytes=fetched, absent=absent)
        )

    def take(self) -> tuple[Fallback, ...]:
        """The newest, in order, with what has been fetched since; they are forgotten."""
        noted, self._noted = self._noted, deque(maxlen=FALLBACKS_MAX)
        return tuple(replace(one, bytes=one.bytes + self._fetched) for one in noted)
