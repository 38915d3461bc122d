"""Handwritten run with readable traces; times are ms after its start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from dora_pipe.ledger.account import GroupEnded, LedgerEvent, RunAccount, StepEnded
from dora_pipe.observe.traces.ids import RunFacts, run_facts
from dora_pipe.schemas.control import (
    AnyControl,
    LoggedEntry,
    RequestReleased,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    TrajectoriesLogged,
    WorkerJoined,
)
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Dispatch,
    GroupSpec,
    Migrate,
    Round,
    Schedule,
    ScheduledSample,
    TakeBatch,
)
from dora_pipe.schemas.trajectory import Segment, Times, Trajectory
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.support.orchestrator_records import (
    committed,
    joined,
    make_config,
    role_started,
    run_started,
    weights,
)

MS = 1_000_000
START_NS = 1_750_000_000 * 1000 * MS

GROUP = "g0000000007"
FIRST, SECOND = trajectory_id(GROUP, 0), trajectory_id(GROUP, 1)
W0, W1 = 2, 3


def at(ms: float) -> int:
    return START_NS + round(ms * MS)


def started() -> RunStarted:
    config = make_config(
        run__name="told",
        model__path="models/small",
        sampling__max_tokens=64,
        evaluation__sampling={"temperature": 0.0},
    )
    return msgspec.structs.replace(run_started(config), at_ns=at(0))


def spec(group: str = GROUP, *, version: int = 3, size: int = 2) -> GroupSpec:
    return GroupSpec(
        group=group,
        ordinal=int(group[1:]),
        purpose="eval" if group.startswith("e") else "train",
        version=version,
        digest=weights(version),
        deadline=-1 if group.startswith("e") else version + 2,
        partition=1,
        dataset_digest="d" * 64,
        index=41,
        data_epoch=0,
        seed=5,
        size=size,
    )


def place(
    worker: str, incarnation: int, *samples: int, attempt: int = 1, of: GroupSpec | None = None
) -> Schedule:
    return Schedule(
        reason=f"{worker} has room",
        spec=of or spec(),
        worker=worker,
        incarnation=incarnation,
        samples=tuple(ScheduledSample(sample=sample, attempt=attempt) for sample in samples),
    )


def logged(
    ms: float, worker: str, incarnation: int, trajectory: str, *, attempt: int = 1, offset: int = 9
) -> TrajectoriesLogged:
    entry = LoggedEntry(
        trajectory=trajectory,
        attempt=attempt,
        partition=1,
        offset=offset,
        sha256="ab" * 32,
        bytes=1500,
        tokens=20,
        reward=1.0,
        finish="stop",
    )
    return TrajectoriesLogged(
        at_ns=at(ms),
        worker=worker,
        incarnation=incarnation,
        version=3,
        digest=weights(3),
        trajectories=(entry,),
    )


def taken(group: str = GROUP, *samples: int) -> TakenGroup:
    trajectories = tuple(
        TakenTrajectory(
            trajectory=trajectory_id(group, entry),
            attempt=1,
            incarnation=W0,
            partition=1,
            offset=9 + entry,
            sha256="ab" * 32,
        )
        for entry in samples or (0, 1)
    )
    return TakenGroup(group=group, version=3, deadline=5, trajectories=trajectories)


def take(step: int = 4, *, attempt: int = 1, group: str = GROUP) -> TakeBatch:
    reason = "the earliest deadlines"
    return TakeBatch(reason=reason, step=step, attempt=attempt, groups=(taken(group),), settings={})


def commit(ms: float, step: int = 4, *, attempt: int = 1, group: str = GROUP) -> StepCommitted:
    fact = committed(step, (taken(group),), attempt=attempt)
    return msgspec.structs.replace(fact, at_ns=at(ms))


@dataclass
class AccountStage:
    account: RunAccount = field(default_factory=RunAccount)
    events: list[LedgerEvent] = field(default_factory=list)
    started: RunStarted | None = None
    _offset: int = 0
    _round: int = 0

    @property
    def run(self) -> RunFacts:
        assert self.started is not None
        return run_facts(self.started)

    @property
    def ended(self) -> list[GroupEnded | StepEnded]:
        return [event for event in self.events if isinstance(event, GroupEnded | StepEnded)]

    def fact(self, fact: AnyControl) -> AccountStage:
        if isinstance(fact, RunStarted):
            self.started = fact
        self.events += self.account.fact(self._offset, fact)
        self._offset += 1
        return self

    def decide(self, ms: float, *decisions: AnyDecision) -> AccountStage:
        round_ = Round(
            ordinal=self._round,
            incarnation=0,
            now_ns=at(ms),
            control_next=self._offset,
            decisions=decisions,
        )
        self.events += self.account.round(round_, 2 * self._round)
        self._round += 1
        return self


def began() -> AccountStage:
    received_fact = AccountStage().fact(started())
    trainer = role_started("trainer", 0)
    received_fact.fact(msgspec.structs.replace(trainer, at_ns=at(1)))
    for name in ("w0", "w1"):
        fact: WorkerJoined = joined(name)
        received_fact.fact(msgspec.structs.replace(fact, at_ns=at(1)))
    return received_fact


def whole() -> AccountStage:
    """Trajectory 1 moves from w1 to w0 and ends last; step 4 trains both."""
    stage = began()
    stage.decide(100, Dispatch(reason="2 slots are free", spec=spec()), place("w0", W0, 0))
    stage.decide(150, place("w1", W1, 1))
    move = Migrate(
        reason="w1 is freed for version 4",
        trajectory=SECOND,
        attempt=1,
        worker="w1",
        incarnation=W1,
        to="w0",
        to_incarnation=W0,
    )
    stage.decide(300, move)
    stage.fact(
        RequestReleased(at_ns=at(320), worker="w1", incarnation=W1, trajectory=SECOND, attempt=1)
    )
    stage.fact(logged(390, "w0", W0, FIRST))
    stage.decide(400, place("w0", W0, 1, attempt=2))
    stage.fact(logged(700, "w0", W0, SECOND, attempt=2, offset=10))
    stage.decide(750, take())
    return stage.fact(commit(1000))


def contents() -> dict[str, Trajectory]:
    return {
        FIRST: _record(
            (
                _segment("prompt", 0, 5, 110, 111),
                _segment("model", 5, 15, 120, 180, worker="w0", incarnation=W0),
                _segment("tool", 15, 17, 180, 230, tool="calculator"),
                _segment("model", 17, 27, 240, 330, turn=1, worker="w0", incarnation=W0),
            ),
            Times(
                scheduled=at(105),
                started=at(120),
                first_token=at(130),
                finished=at(330),
                rewarded=at(350),
            ),
        ),
        SECOND: _record(
            (
                _segment("prompt", 0, 5, 151, 152),
                _segment("model", 5, 12, 160, 320, worker="w1", incarnation=W1),
                _segment("model", 12, 25, 420, 640, worker="w0", incarnation=W0),
            ),
            Times(
                scheduled=at(410),
                started=at(420),
                first_token=at(170),
                finished=at(640),
                rewarded=at(660),
            ),
            migrations=1,
        ),
    }


def _record(segments: tuple[Segment, ...], times: Times, *, migrations: int = 0) -> Trajectory:
    meta = msgspec.structs.replace(
        PLAIN_TRAJECTORY.meta,
        times=times,
        prompt_tokens=5,
        migrations=migrations,
        reward_error=None,
        error=None,
    )
    return replace(PLAIN_TRAJECTORY, segments=segments, meta=meta)


def _segment(
    kind: str,
    start: int,
    end: int,
    from_ms: float,
    to_ms: float,
    *,
    turn: int = 0,
    worker: str = "",
    incarnation: int = -1,
    tool: str = "",
) -> Segment:
    return Segment(
        kind=kind,  # type: ignore[arg-type]
        start=start,
        end=end,
        turn=turn,
        start_ns=at(from_ms),
        end_ns=at(to_ms),
        worker=worker,
        incarnation=incarnation,
        version=3 if worker else -1,
        tool=tool,
    )
