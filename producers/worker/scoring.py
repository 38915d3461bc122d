"""Scoring of groups: the task scores their logged trajectories together.

Unreadable records and failures outside the task's code are retryable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dora_pipe.core.pure.machine import Now
from dora_pipe.core.pure.wait_tracker import PendingWait
from dora_pipe.producers.tasks.calls import (
    Forget,
    GroupCall,
    GroupRewarded,
    SampledTurns,
    TaskFailed,
    message_line,
)
from dora_pipe.producers.worker.effects import FetchGroup, GroupFetched
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.schemas.control import (
    ERROR_CHARACTERS_MAX,
    INFRASTRUCTURE,
    GroupScored,
    ScoredSample,
)
from dora_pipe.schemas.metrics import Blocker
from dora_pipe.schemas.rounds import ScoreGroup
from dora_pipe.schemas.trajectory import Trajectory, turns_of
from dora_pipe.schemas.wire import REWARD_MAX

ScoringEvent = GroupFetched | GroupRewarded | TaskFailed


def key_of(decision: ScoreGroup) -> str:
    return f"{decision.spec.group}/{decision.attempt}"


@dataclass(slots=True, kw_only=True)
class _Open:
    decision: ScoreGroup
    since_ns: int
    trajectories: Sequence[Trajectory] = ()


class Scorings:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._setup = requests.setup
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def ask(self, decision: ScoreGroup, now: Now) -> None:
        spec, key = decision.spec, key_of(decision)
        self._open[key] = _Open(decision=decision, since_ns=now.mono_ns)
        mine = self._setup.digests.get(spec.source, "none")
        if spec.dataset_digest != mine:
            error = f"OtherDataset: {spec.dataset_digest[:12]}, this worker has {mine[:12]}"
            self._answer(key, now, error=error)
            return
        fetch = FetchGroup(request=key, trajectories=decision.trajectories)
        self._requests.ask(fetch)

    def handle(self, event: ScoringEvent, now: Now) -> None:
        key, scoring = event.request, self._open[event.request]
        match event:
            case GroupFetched() if not event.why:
                scoring.trajectories = event.trajectories
                self._requests.ask(call_of(key, scoring.decision, event.trajectories))
            case GroupFetched():
                self._answer(key, now, error=f"NotRead: {event.why}", retryable=True)
            case GroupRewarded():
                self._rewarded(key, scoring, event, now)
            case TaskFailed():
                retryable = event.error in INFRASTRUCTURE
                self._answer(key, now, error=f"{event.error}: {event.message}", retryable=retryable)

    def drop_all(self) -> None:
        for key, scoring in self._open.items():
            self._requests.ask(Forget(request=key, source=scoring.decision.spec.source))
        self._open.clear()

    def wait(self, now_ns: int, patience_ns: int) -> PendingWait | None:
        """Return the wait for the oldest scoring, unless it is short."""
        oldest = min(self._open.values(), key=lambda scoring: scoring.since_ns, default=None)
        if oldest is None or now_ns - oldest.since_ns < patience_ns:
            return None
        groups = [scoring.decision.spec.group for scoring in self._open.values()]
        return PendingWait(
            name="group-score",
            words=f"the task to score the trajectories of a group together ({len(groups)})",
            key=oldest.decision.spec.group,
            since_ns=oldest.since_ns,
            blockers=[Blocker("group", group) for group in groups],
        )

    def _rewarded(self, key: str, scoring: _Open, event: GroupRewarded, now: Now) -> None:
        both = zip(scoring.trajectories, event.rewards, event.parts, strict=True)
        samples = tuple(
            ScoredSample(
                trajectory=trajectory.trajectory,
                reward=(trajectory.reward or 0.0) + added,
                parts=dict(parts),
            )
            for trajectory, added, parts in both
        )
        beyond = [sample for sample in samples if abs(sample.reward) > REWARD_MAX]
        if beyond:
            error = f"NoAnswer: the reward of {beyond[0].trajectory} is beyond {REWARD_MAX:g}"
            self._answer(key, now, error=error)
        else:
            self._answer(key, now, samples=samples)

    def _answer(
        self,
        key: str,
        now: Now,
        *,
        samples: tuple[ScoredSample, ...] = (),
        error: str = "",
        retryable: bool = False,
    ) -> None:
        decision = self._open.pop(key).decision
        answer = GroupScored(
            at_ns=now.wall_ns,
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            group=decision.spec.group,
            attempt=decision.attempt,
            samples=samples,
            error=message_line(error)[:ERROR_CHARACTERS_MAX],
            retryable=retryable,
        )
        self._requests.publish_control(self._setup.worker, answer)


def call_of(key: str, decision: ScoreGroup, trajectories: Sequence[Trajectory]) -> GroupCall:
    spec = decision.spec
    return GroupCall(
        request=key,
        split=spec.purpose,
        index=spec.index,
        sampled=tuple(map(turns_said, trajectories)),
        source=spec.source,
    )


def turns_said(trajectory: Trajectory) -> SampledTurns:
    """Return the turns of a record and the tokens before the last one."""
    turns = turns_of(trajectory.segments, trajectory.token_ids)
    answers = [ids for kind, ids in turns if kind == "model"]
    last = max((part.turn for part in trajectory.segments if part.kind == "model"), default=0)
    starts = [
        part.start for part in trajectory.segments if (part.kind, part.turn) == ("model", last)
    ]
    return SampledTurns(
        answer=answers[-1] if answers else [],
        turns=[ids for _, ids in turns],
        before=trajectory.token_ids[: min(starts, default=len(trajectory.token_ids))],
    )
