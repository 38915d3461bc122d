"""Decides which groups are traced: a share by chance of their ids, and always what is remarkable.

Always: groups of which something failed or changed its worker, and slow ones. It is decided when a
group has ended, from the log alone, so a trace is whole or not there, and another look at the same
log decides the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.catalogue.account import GroupEnded
from dora_pipe.observe.traces.ids import TRACE_HEX, RunFacts, group_trace

Why = Literal["", "all", "ratio", "slow", "failed", "moved"]
"""Why a group is traced; empty: it is not."""

RECENT: Final = 64
"""A group is slow beside so many that ended before it."""

RECENT_MIN: Final = 8
"""Before so many have ended, nobody knows what slow is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """What is asked for. `ratio` 1 traces everything."""

    ratio: float = 1.0
    slow: float = 2.0
    """Times the median of the last groups of the same purpose."""


class TailSampler:
    """Asked about every group of a run, in the order in which they end."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._recent: dict[str, deque[int]] = {}

    def why(self, run: RunFacts, ended: GroupEnded) -> Why:
        lasted_ns = ended.ended_ns - ended.group.dispatched_ns
        slow = self._slow(ended.group.spec.purpose, lasted_ns)
        if self._policy.ratio >= 1:
            return "all"
        requests = ended.group.requests.values()
        if ended.fate == "failed" or any(
            attempt.outcome in ("failed", "fenced")
            for request in requests
            for attempt in request.attempts
        ):
            return "failed"
        if any(request.moved for request in requests):
            return "moved"
        if slow:
            return "slow"
        return "ratio" if self._drawn(run, ended.group.spec.group) else ""

    def _slow(self, purpose: str, lasted_ns: int) -> bool:
        recent = self._recent.setdefault(purpose, deque(maxlen=RECENT))
        known = sorted(recent)
        recent.append(lasted_ns)
        return len(known) >= RECENT_MIN and lasted_ns > self._policy.slow * known[len(known) // 2]

    def _drawn(self, run: RunFacts, group: str) -> bool:
        """OpenTelemetry's rule for ratios: by the lower half of the trace id."""
        bits = int(group_trace(run.key, group)[TRACE_HEX // 2 :], 16)
        return bits < self._policy.ratio * 2**64
