"""Writes the log of a run that never happened and holds all the same; decides how it would go.

The orchestrator is production's machine: every round, chain and state digest is its own. Workers
and trainer are played: a worker ends what it was given in order, some requests a turn; a step takes
some turns; weights are names. Trajectories are production's records, each with its own bytes. What
a run of millions of trajectories leaves behind so takes minutes to make, and audit holds for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.bench.audit_records import (
    ASSETS,
    START_NS,
    TURN_NS,
    Encoder,
    LogPlan,
    Player,
    config_of,
    role_started,
    run_started,
    weights,
    worker_joined,
    worker_ready,
)
from dora_pipe.bus.port import Append, Bus, Record, TopicSpec, Writer
from dora_pipe.core.errors import ResourceError
from dora_pipe.core.runtime import CaughtUp, Now
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    Control,
    LoggedEntry,
    StepCommitted,
    TrajectoriesLogged,
)
from dora_pipe.schemas.metrics import Cost
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Place,
    PlacedRequest,
    TakeBatch,
    decode_round,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

__all__ = ["LogPlan", "Written", "write_log"]

STEP_TURNS: Final = 2
"""Turns between a batch and its commit."""
TURNS_MAX: Final = 5_000_000
"""A run with more turns does not end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written."""

    trajectories: int
    trajectory_bytes: int
    control: int
    rounds: int
    steps: int


def write_log(bus: Bus, plan: LogPlan) -> Written:
    """Create the topics of the run and write it from beginning to end. Raises BusError."""
    topics = Topics(plan.run)
    many = {topics.trajectories: plan.partitions, topics.progress: plan.partitions}
    bus.create([TopicSpec(name=name, partitions=many.get(name, 1)) for name in topics.all()])
    writer = bus.writer()
    try:
        return _Script(writer, topics, plan).play()
    finally:
        writer.close()


class _Script:
    def __init__(self, writer: Writer, topics: Topics, plan: LogPlan) -> None:
        self._writer, self._topics, self._plan = writer, topics, plan
        config = config_of(plan)
        self._machine = OrchestratorMachine(
            state=State(),
            topics=topics,
            role_epoch=0,
            metrics={},
            timing=config.timing,
            cost=lambda: Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0),
        )
        self._encode = Encoder(plan)
        self._turns = 0
        self._heard: list[Record] = []
        """Control records that the orchestrator has not read."""
        self._told: list[Control] = []
        self._training: tuple[TakeBatch, int] | None = None
        self._taken_at = -1
        """Where the newest batch decision lies."""
        self._count = _Count()
        started = run_started(config)
        self._digest = started.policy.digest
        self._tell(started)
        self._tell(role_started("orchestrator", 0))
        self._tell(role_started("trainer", 1))
        names = [f"w{number}" for number in range(plan.workers)]
        for name in names:
            self._tell(worker_joined(name, plan.slots))
        offsets = self._flush()
        epochs = offsets[-len(names) :]
        self._players = {
            name: Player(name=name, epoch=epoch) for name, epoch in zip(names, epochs, strict=True)
        }

    def play(self) -> Written:
        """FoldedRound by turn until the run is over."""
        inputs: list[Any] = [*self._heard, CaughtUp()]
        for _ in range(TURNS_MAX):
            self._heard = []
            decisions = self._orchestrate(inputs)
            if self._machine.state.done:
                count = self._count
                return Written(
                    trajectories=count.trajectories,
                    trajectory_bytes=count.bytes,
                    control=count.control,
                    rounds=self._machine.state.rounds,
                    steps=self._machine.state.version,
                )
            for decision in decisions:
                self._obey(decision)
            self._work()
            self._flush()
            inputs = list(self._heard)
        raise ResourceError(f"{TURNS_MAX} turns and no end: the played run goes in a circle")

    def _orchestrate(self, inputs: Sequence[Any]) -> list[AnyDecision]:
        """Let the orchestrator react until it has nothing more to say; its decisions."""
        decisions: list[AnyDecision] = []
        while True:
            self._turns += 1
            now_ns = self._turns * TURN_NS
            out = self._machine.react(inputs, Now(mono_ns=now_ns, wall_ns=START_NS + now_ns))
            inputs = ()
            rounds = [one.record for one in out.publish if one.record.topic != self._topics.metrics]
            if not rounds:
                return decisions
            for one, offset in zip(rounds, self._writer.append(rounds), strict=True):
                made = decode_round(one.value).decisions
                if any(isinstance(decision, TakeBatch) for decision in made):
                    self._taken_at = offset
                decisions.extend(made)

    def _obey(self, decision: AnyDecision) -> None:
        if isinstance(decision, Place):
            self._players[decision.worker].requests.extend(decision.requests())
        elif isinstance(decision, Assign):
            player = self._players[decision.worker]
            player.version, player.digest = decision.version, decision.digest
            self._tell(worker_ready(player))
        elif isinstance(decision, TakeBatch):
            self._training = decision, self._turns + STEP_TURNS

    def _work(self) -> None:
        for player in self._players.values():
            ending = -(-int(len(player.requests) * self._plan.turn_share * 100) // 100)
            ended = [player.requests.popleft() for _ in range(max(ending, bool(player.requests)))]
            self._log(player, ended)
        if self._training is not None and self._training[1] <= self._turns:
            self._commit(self._training[0])

    def _log(self, player: Player, ended: Sequence[PlacedRequest]) -> None:
        """Append the records, then tell of them: one fact per version."""
        if not ended:
            return
        made = [self._encode(request, player) for request in ended]
        topic = self._topics.trajectories
        offsets = self._writer.append(
            [
                Append(
                    topic=topic,
                    partition=request.spec.partition,
                    key=request.spec.group.encode(),
                    value=value,
                    headers=headers,
                )
                for request, (value, headers, _) in zip(ended, made, strict=True)
            ]
        )
        entries: dict[tuple[int, str], list[LoggedEntry]] = {}
        for request, offset, (value, _, entry) in zip(ended, offsets, made, strict=True):
            self._count.trajectories += 1
            self._count.bytes += len(value)
            spec = request.spec
            placed = msgspec.structs.replace(entry, offset=offset)
            entries.setdefault((spec.version, spec.digest), []).append(placed)
        for (version, digest), found in entries.items():
            self._tell(
                TrajectoriesLogged(
                    at_ns=self._now_ns,
                    worker=player.name,
                    epoch=player.epoch,
                    version=version,
                    digest=digest,
                    trajectories=tuple(found),
                )
            )

    def _commit(self, take: TakeBatch) -> None:
        self._training = None
        after = weights(take.step + 1)
        fact = StepCommitted(
            at_ns=self._now_ns,
            step=take.step,
            attempt=take.attempt,
            role_epoch=1,
            groups=take.groups,
            batch_digest=batch_digest(take.groups),
            digest_before=self._digest,
            digest_after=after.digest,
            policy=after,
            contributions=Blob(sha256=ASSETS, bytes=0),
            figures={"loss": 0.5},
            settings=take.settings,
            numerics={},
            decisions_next=self._taken_at + 1,
            compute_s=0.1,
        )
        self._digest = after.digest
        self._tell(fact)

    @property
    def _now_ns(self) -> int:
        return START_NS + self._turns * TURN_NS

    def _tell(self, record: Control) -> None:
        self._told.append(record)

    def _flush(self) -> list[int]:
        """Append what was told, in order; the orchestrator reads it next."""
        if not self._told:
            return []
        topic = self._topics.control
        appends = [Append(topic=topic, value=encode(one)) for one in self._told]
        offsets = self._writer.append(appends)
        self._heard += [
            Record(topic=topic, partition=0, offset=offset, key=b"", value=one.value)
            for offset, one in zip(offsets, appends, strict=True)
        ]
        self._count.control += len(appends)
        self._told = []
        return offsets


@dataclass(slots=True)
class _Count:
    trajectories: int = 0
    bytes: int = 0
    control: int = 0
