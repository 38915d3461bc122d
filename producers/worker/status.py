"""What a worker's status says: what it waits for, and which progress has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from dora_pipe.core.status_schedule import WHOLE_EVERY
from dora_pipe.core.wait_tracker import PendingWait
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
    Phase.ENCODING: "codec",
    Phase.LOGGING: "append",
    Phase.LEAVING: "leaving",
    Phase.EXPORTING: "export",
    Phase.RELEASING: "handover",
}
"""Phases by urgency, with the name of the wait. A worker that samples waits for no other. An agent
that thinks, or begins beside many others, works: its limit is that of work."""

TOKENS_QUIET_NS: Final = 5_000_000_000
"""An engine with requests that reports no token for so long is waited for. A slow one reports every
few seconds, because it gathers tokens before it reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a worker's waits depend on beside its requests. Times are monotonic ns."""

    hosted: int
    """-1 for none."""
    loading: int | None
    loading_ns: int
    """When loading began."""
    tokens_ns: int
    """When the last token came, or when there was nothing to sample."""
    now_ns: int
    heartbeat_ns: int
    """What is younger is not worth a word, unless the worker does nothing else."""


def waits(requests: Iterable[RequestState], at: Situation) -> list[PendingWait]:
    """What the worker waits for; with requests that get tokens, only what takes its time."""
    phases: dict[Phase, list[RequestState]] = {}
    for request in requests:
        if request.session is None or not request.session.open:
            phases.setdefault(request.phase, []).append(request)
    if at.loading is not None:
        sleeps = at.loading == NO_VERSION
        words = "its engine to let go" if sleeps else f"the weights of version {at.loading}"
        key = str(at.loading)
        first = [_still("weights", words, key, at.loading_ns, Blocker("version", key))]
    else:
        first = _standing(phases, at)
    said = {one.name for one in first}
    for phase, of_phase in phases.items():
        late = [request for request in of_phase if at.now_ns - request.since_ns >= at.heartbeat_ns]
        if late and NAMES[phase] not in said and phase not in _ENDLESS:
            first.append(_of_phase(phase, late, still=False))
    return first


_ENDLESS: Final = (Phase.RUNNING, Phase.WAITING)
"""Sampling takes its time, and a wait for a slot ends when others have finished."""


def _standing(phases: Mapping[Phase, list[RequestState]], at: Situation) -> list[PendingWait]:
    if Phase.RUNNING in phases:
        if at.now_ns - at.tokens_ns <= TOKENS_QUIET_NS:
            return []
        requests = phases[Phase.RUNNING]
        return [_of_phase(Phase.RUNNING, requests, still=True, since_ns=at.tokens_ns)]
    for phase in NAMES:
        if phase in phases:
            return [_of_phase(phase, phases[phase], still=True)]
    orchestrator = Blocker("role", "orchestrator")
    if at.hosted < 0:
        return [_still("version", "a version to host", "", None, orchestrator)]
    words = f"requests of version {at.hosted}"
    return [_still("requests", words, str(at.hosted), None, orchestrator)]


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
    """Progress as the statuses of one incarnation have said it so far."""

    def __init__(self) -> None:
        self._whole: dict[str, Resume] = {}
        self._statuses = 0

    def shorten(self, status: WorkerStatus) -> WorkerStatus:
        """What the next status says, when this one is whole; `schemas.metrics.merged` undoes it."""
        whole = status.progress
        before, self._whole = self._whole, whole
        since = self._statuses % WHOLE_EVERY > 0
        self._statuses += 1
        if not since:
            return status
        newer = {name: one for name, one in whole.items() if before.get(name) != one}
        ended = tuple(sorted(before.keys() - whole.keys()))
        return msgspec.structs.replace(status, progress=newer, since=True, ended=ended)
