"""Says what a worker waits for: for a first version, for weights, or for what a request is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dora_pipe.producers.rows import Phase, Row
from dora_pipe.schemas.metrics import Blocker
from dora_pipe.waiting import Found

NAMES: Final[Mapping[Phase, str]] = {
    Phase.RUNNING: "tokens",
    Phase.ENVIRONMENT: "environment",
    Phase.REWARDING: "reward",
    Phase.PROMPTING: "prompt",
    Phase.RESUMING: "progress",
    Phase.FETCHING: "kv",
    Phase.WAITING: "slot",
    Phase.ENCODING: "codec",
    Phase.LOGGING: "append",
    Phase.LEAVING: "leaving",
    Phase.EXPORTING: "export",
    Phase.RELEASING: "handover",
}
"""Phases by urgency, with the name of the wait. A worker that samples waits for no other."""

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


def waits(rows: Iterable[Row], at: Situation) -> list[Found]:
    """What the worker waits for; with requests that get tokens, only what takes its time."""
    phases: dict[Phase, list[Row]] = {}
    for row in rows:
        phases.setdefault(row.phase, []).append(row)
    if at.loading is not None:
        words, key = f"the weights of version {at.loading}", str(at.loading)
        first = [_still("weights", words, key, at.loading_ns, Blocker("version", key))]
    else:
        first = _standing(phases, at)
    said = {one.name for one in first}
    for phase, of_phase in phases.items():
        late = [row for row in of_phase if at.now_ns - row.since_ns >= at.heartbeat_ns]
        if late and NAMES[phase] not in said and phase not in _ENDLESS:
            first.append(_of_phase(phase, late, still=False))
    return first


_ENDLESS: Final = (Phase.RUNNING, Phase.WAITING)
"""Sampling takes its time, and a wait for a slot ends when others have finished."""


def _standing(phases: Mapping[Phase, list[Row]], at: Situation) -> list[Found]:
    if Phase.RUNNING in phases:
        if at.now_ns - at.tokens_ns <= TOKENS_QUIET_NS:
            return []
        rows = phases[Phase.RUNNING]
        return [_of_phase(Phase.RUNNING, rows, still=True, since_ns=at.tokens_ns)]
    for phase in NAMES:
        if phase in phases:
            return [_of_phase(phase, phases[phase], still=True)]
    orchestrator = Blocker("role", "orchestrator")
    if at.hosted < 0:
        return [_still("version", "a first version to host", "", None, orchestrator)]
    words = f"requests of version {at.hosted}"
    return [_still("requests", words, str(at.hosted), None, orchestrator)]


def _of_phase(phase: Phase, rows: list[Row], *, still: bool, since_ns: int | None = None) -> Found:
    oldest = sorted(rows, key=lambda row: (row.since_ns, row.key))
    return Found(
        name=NAMES[phase],
        words=f"{phase.value} ({len(rows)})",
        key=oldest[0].key,
        still=still,
        since_ns=oldest[0].since_ns if since_ns is None else since_ns,
        blockers=[Blocker("trajectory", row.place.trajectory) for row in oldest],
    )


def _still(name: str, words: str, key: str, since_ns: int | None, blocker: Blocker) -> Found:
    return Found(
        name=name,
        words=words,
        key=key,
        limit="work",
        still=True,
        since_ns=since_ns,
        blockers=[blocker],
    )
