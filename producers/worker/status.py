"""Waits, progress and requests off the engine in a worker's status.

The number off the engine is an average: a plain count swings between all and none if turns end
together, and a minimum duration would miss short waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from dora_pipe.core.pure.machine import BUS_TURN_NS
from dora_pipe.core.pure.status_schedule import WHOLE_EVERY
from dora_pipe.core.pure.wait_tracker import PendingWait
from dora_pipe.producers.worker.request import Phase, RequestState
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.metrics import Blocker, WorkerStatus
from dora_pipe.schemas.rounds import NO_VERSION

NAMES: Final[Mapping[Phase, str]] = {
    Phase.RUNNING: "tokens",
    Phase.ENVIRONMENT: "environment",
    Phase.REWARDING: "reward",
    Phase.PROMPTING: "prompt",
    Phase.RESUMING: "progress",
    Phase.FETCHING: "kv",
    Phase.WAITING: "slot",
    Phase.ANSWERING: "call",
    Phase.AGENT: "agent",
    Phase.LOGGING: "append",
    Phase.LEAVING: "leaving",
    Phase.EXPORTING: "export",
    Phase.RELEASING: "handover",
}
"""Names of waits, most urgent first. An agent works while it thinks."""

TOKENS_QUIET_NS: Final = 5_000_000_000
"""Time without a token that counts as a wait; slow engines report every few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """State that determines a worker's waits. Times are monotonic ns."""

    served: int
    """-1 for none."""
    loading: int | None
    loading_ns: int
    tokens_ns: int
    """Last token, or last time without running requests."""
    now_ns: int
    heartbeat_ns: int
    """Shorter waits are omitted unless the worker is idle."""


def waits(requests: Iterable[RequestState], situation: Situation) -> list[PendingWait]:
    phases: dict[Phase, list[RequestState]] = {}
    for request in requests:
        if request.session is None or not request.session.open:
            phases.setdefault(request.phase, []).append(request)
    if situation.loading is not None:
        sleeps = situation.loading == NO_VERSION
        words = "its engine to let go" if sleeps else f"the weights of version {situation.loading}"
        key = str(situation.loading)
        first = [_still("weights", words, key, situation.loading_ns, Blocker("version", key))]
    else:
        first = _standing(phases, situation)
    named = {wait.name for wait in first}
    for phase, of_phase in phases.items():
        late = [
            request
            for request in of_phase
            if situation.now_ns - request.since_ns >= situation.heartbeat_ns
        ]
        if late and NAMES[phase] not in named and phase not in _ENDLESS:
            first.append(_of_phase(phase, late, still=False))
    return first


_ENDLESS: Final = (Phase.RUNNING, Phase.WAITING)
"""Phases that are normal waits."""


def _standing(
    phases: Mapping[Phase, list[RequestState]], situation: Situation
) -> list[PendingWait]:
    if Phase.RUNNING in phases:
        if situation.now_ns - situation.tokens_ns <= TOKENS_QUIET_NS:
            return []
        requests = phases[Phase.RUNNING]
        return [_of_phase(Phase.RUNNING, requests, still=True, since_ns=situation.tokens_ns)]
    for phase in NAMES:
        if phase in phases:
            return [_of_phase(phase, phases[phase], still=True)]
    orchestrator = Blocker("role", "orchestrator")
    if situation.served < 0:
        return [_still("version", "a version to host", "", None, orchestrator)]
    words = f"requests of version {situation.served}"
    return [_still("requests", words, str(situation.served), None, orchestrator)]


def _of_phase(
    phase: Phase, requests: list[RequestState], *, still: bool, since_ns: int | None = None
) -> PendingWait:
    oldest = sorted(requests, key=lambda request: (request.since_ns, request.key))
    return PendingWait(
        name=NAMES[phase],
        words=f"{phase.value} ({len(requests)})",
        key=oldest[0].key,
        limit="work" if phase is Phase.AGENT else "short",
        still=still,
        since_ns=oldest[0].since_ns if since_ns is None else since_ns,
        blockers=[Blocker("trajectory", request.place.trajectory) for request in oldest],
    )


def _still(name: str, words: str, key: str, since_ns: int | None, blocker: Blocker) -> PendingWait:
    return PendingWait(
        name=name,
        words=words,
        key=key,
        limit="work",
        still=True,
        since_ns=since_ns,
        blockers=[blocker],
    )


class ProgressDelta:
    """Reduces the progress in statuses to changes."""

    def __init__(self) -> None:
        self._whole: dict[str, Resume] = {}
        self._statuses = 0

    def shorten(self, status: WorkerStatus) -> WorkerStatus:
        """Return a status with changed progress; `schemas.metrics.merged` reverses this."""
        progress = status.progress
        before, self._whole = self._whole, progress
        since = self._statuses % WHOLE_EVERY > 0
        self._statuses += 1
        if not since:
            return status
        newer = {name: resume for name, resume in progress.items() if before.get(name) != resume}
        ended = tuple(sorted(before.keys() - progress.keys()))
        return msgspec.structs.replace(status, progress=newer, since=True, ended=ended)


AVERAGED_NS: Final = 10 * BUS_TURN_NS
"""Time constant: a value this old has weight 1/e."""


class OffEngine:
    """Requests that need no slot, with their average number.

    Example: 4 requests that are off the engine half of the time: ``mean(now_ns) == 2``.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._mean = 0.0
        self._at_ns = 0

    def begin(self, now_ns: int) -> None:
        self._mean, self._at_ns = 0.0, now_ns

    def add(self, key: str, now_ns: int) -> None:
        self._advance(now_ns)
        self._keys.add(key)

    def discard(self, key: str, now_ns: int) -> None:
        self._advance(now_ns)
        self._keys.discard(key)

    def mean(self, now_ns: int, most: int) -> int:
        self._advance(now_ns)
        self._mean = min(self._mean, float(most))
        return int(self._mean + 0.5)

    def _advance(self, now_ns: int) -> None:
        kept = math.exp((self._at_ns - now_ns) / AVERAGED_NS)
        self._mean = len(self._keys) + kept * (self._mean - len(self._keys))
        self._at_ns = now_ns
