"""Delivery of appended records to the checkers.

Control records are checked in offset order when a round folds them, decisions with their round,
other facts immediately.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dora_pipe.audit.round_reader import Fact, FoldedRound
from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.core.pure.machine import CaughtUp, Machine, Now, Outputs
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.state import State
from dora_pipe.producers.tasks.calls import Forget
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.status import AVERAGED_NS
from dora_pipe.schemas.control import (
    REPLAY_DIFFERS,
    RequestFailed,
    RoleStarted,
    WorkerJoined,
    WorkerLeft,
    decode_control,
)
from dora_pipe.schemas.metrics import (
    OrchestratorStatus,
    TrainerStatus,
    WorkerStatus,
    decode_metrics,
    merged,
)
from dora_pipe.schemas.rounds import (
    GENESIS_CHAIN,
    Dispatch,
    Fence,
    LeaseExpired,
    Migrate,
    Round,
    StopRun,
    chain_of,
    decode_round,
    fold_bytes,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.call_checks import CallChecks
from dora_pipe.sim.checks import LiveLedger
from dora_pipe.sim.role import NEVER_NS, ORCHESTRATOR, TRAINER, Role

GAP_HEARTBEATS: Final = 2
"""Heartbeats between reactions up to which the orchestrator counts as listening."""

LEASE_SLACK_NS: Final = 150_000_000
"""Delay until an appended record may be processed, for example by the next poll."""

ROUNDED: Final = 0.499
_LEASE: Final = b'"lease-expired"'
_DIGEST: Final = b'"state_digest"'
_SPEAKERS: Final[dict[type, str]] = {OrchestratorStatus: ORCHESTRATOR, TrainerStatus: TRAINER}


class InvariantMonitor:
    """Checker of a log; raises InvariantBroken."""

    def __init__(self, topics: Topics, *, heartbeat_ns: int, lease_ns: int) -> None:
        self.ledger = LiveLedger(topics.run, self.wrong)
        self.calls = CallChecks(self.wrong)
        self.kinds: Counter[str] = Counter()
        self.on_move: Callable[[str, str], None] = lambda source, target: None
        """Called with the source and target of a move."""
        self.exists: Callable[[str], bool] = lambda digest: True
        self.records = 0
        self.waits: dict[str, str] = {}
        self.stopped = False
        self._topics = topics
        self._gap_ns = GAP_HEARTBEATS * heartbeat_ns
        self._lease_ns = lease_ns
        self._control: deque[Record] = deque()
        self._round: Round | None = None
        self._control_next = 0
        self._left: set[tuple[str, int]] = set()
        self._said_by: dict[tuple[str, int], set[bytes]] = {}
        """Records of each incarnation; it repeats one after an unknown outcome."""
        self._newest: Counter[str] = Counter()
        self._heard_by: dict[int, _Heard] = {}
        self._heard = _Heard()
        """Inputs of the orchestrator that appended the current round."""

    def wrong(self, check: str, what: str) -> None:
        """Raise InvariantBroken."""
        raise InvariantBroken(f"{check}: {what}")

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        self.records += len(records)
        for record in records:
            if record.topic == self._topics.decisions:
                self._heard = self._heard_by.get(-1 if role is None else role.number, self._heard)
                self._on_round(record)
            elif record.topic == self._topics.control:
                self._control.append(record)
                self._on_fact(record)
            elif record.topic == self._topics.metrics:
                self._status(record)
            else:
                self.kinds[record.topic.rpartition(".")[2]] += 1
                self.calls.landed(record, -1 if role is None else role.number)

    def wrap(self, role: Role, machine: Machine[Any, Any]) -> Machine[Any, Any]:
        """Wrap the orchestrator and workers with agents."""
        if isinstance(machine, OrchestratorMachine):
            heard = self._heard_by[role.number] = _Heard()
            return _ObservedOrchestrator(machine, self, heard)
        agents = [port for port in role.ports if isinstance(port, Agents)]
        if isinstance(machine, WorkerMachine) and agents:
            return _ObservedWorker(machine, self, agents[0])
        return machine

    def at_end(self) -> None:
        """Check that every group has an outcome."""
        ledger = self.ledger
        for name in ledger.accounts.open:
            self.wrong("outcome", f"{name} has none")
        in_force = ledger.legality.in_force
        if in_force is not None and ledger.committed < in_force.steps:
            self.wrong("live", f"{ledger.committed} steps were committed")

    def _decoded(self, record: Record | Append) -> Any:
        decode = decode_control if record.topic == self._topics.control else decode_metrics
        try:
            return decode(record.value)
        except SchemaError:
            return None

    def _is_known(self, topic: str, value: Any) -> bool:
        if value is None or isinstance(value, Unknown):
            self.kinds[f"{topic} {'unreadable' if value is None else 'unknown'}"] += 1
            return False
        self.kinds[f"{topic} {type(value).__struct_config__.tag}"] += 1
        return True

    def _on_fact(self, record: Record) -> None:
        fact = self._decoded(record)
        if not self._is_known("control", fact):
            return
        if isinstance(fact, RoleStarted):
            if self._newest[fact.role] != fact.incarnation:
                what = f"{fact.role} takes incarnation {fact.incarnation}"
                self.wrong("incarnations", f"{what}, {self._newest[fact.role]} comes next")
            self._newest[fact.role] += 1
        if isinstance(fact, RequestFailed) and fact.error == REPLAY_DIFFERS:
            self.wrong("replay", f"{fact.trajectory}: {fact.message}")
        worker = getattr(fact, "worker", None)
        if worker is None:
            return
        incarnation = record.offset if isinstance(fact, WorkerJoined) else fact.incarnation
        earlier = self._said_by.setdefault((worker, incarnation), set())
        if (worker, incarnation) in self._left and record.value not in earlier:
            self.wrong(
                "retired",
                f"{worker} of incarnation {incarnation} speaks after it left: {fact!r:.80}",
            )
        earlier.add(record.value)
        if isinstance(fact, WorkerLeft):
            self._left.add((worker, incarnation))

    def _status(self, record: Record) -> None:
        status = self._decoded(record)
        if self._is_known("metrics", status):
            name = getattr(status, "worker", "") or _SPEAKERS[type(status)]
            self.waits[name] = status.waits_for
            if isinstance(status, TrainerStatus):
                self.kinds[f"trainer {status.phase.partition(' ')[0]}"] += 1

    def _on_round(self, record: Record) -> None:
        round_, moves = decode_round(record.value), list[Migrate]()
        facts = self._facts(round_)
        self._links(round_, facts)
        for observation in round_.observations:
            self.kinds[f"observed {type(observation).__struct_config__.tag}"] += 1
            if isinstance(observation, LeaseExpired):
                self._lease(observation)
        for decision in round_.decisions:
            self.kinds[f"decided {type(decision).__struct_config__.tag}"] += 1
            if isinstance(decision, Dispatch):
                self.calls.dispatched(decision.spec)
            elif isinstance(decision, Fence):
                self._expect_progress(decision)
            elif isinstance(decision, Migrate):
                moves.append(decision)
            elif isinstance(decision, StopRun):
                self.stopped = True
            if not decision.reason:
                self.wrong("rounds", f"round {round_.ordinal} decides without a reason")
        self.ledger.apply(FoldedRound(offset=record.offset, round=round_, facts=facts))
        self._kept(round_)
        for move in moves:
            self.on_move(move.worker, move.to)
        self._round, self._control_next = round_, round_.control_next

    def _kept(self, round_: Round) -> None:
        ledger = self.ledger
        if ledger.config is None or not ledger.config.store.keep_every:
            return
        for version, who in ledger.needed().items():
            if not self.exists(ledger.versions[version].digest):
                what = f"version {version} is gone from the store, and {who} needs it"
                self.wrong("kept", f"{what} (round {round_.ordinal})")

    def _facts(self, round_: Round) -> tuple[Fact, ...]:
        facts: list[Fact] = []
        while self._control and self._control[0].offset < round_.control_next:
            stored = self._control.popleft()
            decoded = self._decoded(stored)
            facts.append(
                Fact(offset=stored.offset, key=stored.key, value=stored.value, record=decoded)
            )
        return tuple(facts)

    def _links(self, round_: Round, facts: Sequence[Fact]) -> None:
        last, who = self._round, f"round {round_.ordinal}"
        ordinal = 0 if last is None else last.ordinal + 1
        if self.stopped:
            self.wrong("rounds", f"{who} comes after the end of the run")
        if round_.ordinal != ordinal:
            self.wrong("rounds", f"{who} comes where round {ordinal} was expected")
        if round_.incarnation != self._newest[ORCHESTRATOR] - 1:
            newest = self._newest[ORCHESTRATOR] - 1
            self.wrong(
                "incarnations", f"{who} is of incarnation {round_.incarnation}, {newest} is newest"
            )
        if last is not None and (
            round_.now_ns < last.now_ns or round_.control_next < last.control_next
        ):
            self.wrong("rounds", f"{who} decreases")
        chain = GENESIS_CHAIN if last is None else last.chain
        folded = b"".join(fold_bytes(fact.offset, fact.value) for fact in facts)
        if chain_of(chain, folded, round_) != round_.chain:
            self.wrong("rounds", f"{who}: the chain is broken")

    def reacts(self, heard: _Heard, inputs: Sequence[Any], now: Now) -> None:
        if heard.last_ns is not None and now.mono_ns - heard.last_ns <= self._gap_ns:
            heard.listened_ns += now.mono_ns - heard.last_ns
        heard.last_ns = now.mono_ns
        for event in inputs:
            if isinstance(event, CaughtUp):
                heard.since_ns = heard.listened_ns
            elif isinstance(event, Record):
                self._hears(heard, event)

    def _hears(self, heard: _Heard, record: Record) -> None:
        fact = self._decoded(record)
        worker = getattr(fact, "worker", None)
        if worker is None:
            return
        key = (worker, record.offset if isinstance(fact, WorkerJoined) else fact.incarnation)
        heard.of[key] = heard.listened_ns
        if isinstance(fact, WorkerStatus):
            heard.said[key] = merged(heard.said.get(key), fact)

    def decides(self, heard: _Heard, outputs: Outputs[Any]) -> None:
        """Judge silence by what the orchestrator had read when it decided."""
        for publication in outputs.publish:
            if (
                publication.record.topic == self._topics.decisions
                and _LEASE in publication.record.value
            ):
                for observed in decode_round(publication.record.value).observations:
                    if isinstance(observed, LeaseExpired):
                        key = (observed.worker, observed.incarnation)
                        since_ns = max(heard.of.get(key, 0), heard.since_ns)
                        heard.silent_ns[key] = heard.listened_ns - since_ns
                        if (status := heard.said.get(key)) is not None:
                            progress = status.progress.items()
                            heard.progress[key] = {name: resume.tokens for name, resume in progress}

    def digests(self, outputs: Outputs[Any], state: State) -> None:
        """Compare the digest with one from scratch."""
        topic = self._topics.decisions
        rounds = [
            publication.record.value
            for publication in outputs.publish
            if publication.record.topic == topic
        ]
        if rounds and _DIGEST in rounds[-1]:
            round_ = decode_round(rounds[-1])
            if round_.state_digest != digest_of(state):
                self.wrong("digest", f"round {round_.ordinal} says another state than there is")

    def says(self, outputs: Outputs[Any], idle: Mapping[str, int], now_ns: int) -> bool:
        """Check the reported average of requests without a slot, except those just released;
        return whether the worker has sampled a token."""
        records = (publication.record for publication in outputs.publish)
        statuses = [
            self._decoded(record) for record in records if record.topic == self._topics.metrics
        ]
        given_up = {effect.request for effect in outputs.effects if isinstance(effect, Forget)}
        spans = [now_ns - since for name, since in idle.items() if name not in given_up]
        least = int(sum(-math.expm1(-span / AVERAGED_NS) for span in spans) + ROUNDED)
        for status in statuses:
            if status.tokens_total and status.off_engine < least:
                what = f"{status.off_engine} requests need no slot, the agents of {least} think"
                self.wrong("waiting", f"{status.worker} says that {what}")
        return any(status.tokens_total for status in statuses)

    def _lease(self, expired: LeaseExpired) -> None:
        silent_ns = self._heard.silent_ns.get((expired.worker, expired.incarnation), 0)
        if silent_ns < self._lease_ns - LEASE_SLACK_NS:
            what = f"the lease of {expired.worker} ends after {silent_ns / 1e9:.3f} s of silence"
            self.wrong("lease", f"{what}, it is {self._lease_ns / 1e9:.3f} s")

    def _expect_progress(self, fence: Fence) -> None:
        known_tokens = self._heard.progress.get((fence.worker, fence.incarnation), {})
        for name in known_tokens.keys() & set(self.ledger.placed_on(fence.incarnation)):
            self.ledger.known(name, known_tokens[name])


class _Heard:
    def __init__(self) -> None:
        self.last_ns: int | None = None
        self.listened_ns = 0
        """Own time without gaps."""
        self.since_ns = 0
        self.of: dict[tuple[str, int], int] = {}
        self.said: dict[tuple[str, int], WorkerStatus] = {}
        self.silent_ns: dict[tuple[str, int], int] = {}
        """Silence of incarnations whose lease it let expire."""
        self.progress: dict[tuple[str, int], dict[str, int]] = {}
        """Their known progress at that time."""


class _Observed:
    def __init__(self, machine: Machine[Any, Any]) -> None:
        self._machine = machine

    def positions(self) -> Mapping[TopicPartition, int]:
        return self._machine.positions()

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs[Any]:
        return self._machine.react(inputs, now)

    def wake_at(self) -> int:
        return self._machine.wake_at()

    @property
    def finished(self) -> bool:
        return self._machine.finished


class _ObservedOrchestrator(_Observed):
    def __init__(
        self, machine: OrchestratorMachine, monitor: InvariantMonitor, heard: _Heard
    ) -> None:
        super().__init__(machine)
        self._orchestrator = machine
        self._monitor = monitor
        self._heard = heard

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs[Any]:
        self._monitor.reacts(self._heard, inputs, now)
        outputs = super().react(inputs, now)
        self._monitor.decides(self._heard, outputs)
        self._monitor.digests(outputs, self._orchestrator.state)
        return outputs


class _ObservedWorker(_Observed):
    def __init__(self, machine: WorkerMachine, monitor: InvariantMonitor, agents: Agents) -> None:
        super().__init__(machine)
        self._monitor = monitor
        self._agents = agents
        self._since_ns = NEVER_NS
        """No request counts before the first token."""

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs[Any]:
        outputs = super().react(inputs, now)
        now_ns = now.mono_ns
        since_ns = min(now_ns, self._since_ns)
        idle = {name: max(idle_ns, since_ns) for name, idle_ns in self._agents.idle().items()}
        if self._monitor.says(outputs, idle, now_ns):
            self._since_ns = since_ns
        return outputs
