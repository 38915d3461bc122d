"""Synthetic log of a run that passes an audit.

The orchestrator is production's machine; workers and trainer are scripted, weights are names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
import numpy as np

from dora_pipe.bench import records
from dora_pipe.bus.bus import Bus, TopicSpec, Writer
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ResourceError
from dora_pipe.core.pure.machine import CaughtUp, Now
from dora_pipe.core.pure.records import Append, Record, stored
from dora_pipe.orchestrator.machine import OrchestratorMachine
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    Control,
    LoggedEntry,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    WorkerReady,
)
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.metrics import Cost
from dora_pipe.schemas.policy import Blob, Manifest, Tensor, weights_digest
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Schedule,
    ScheduledRequest,
    TakeBatch,
    decode_round,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Meta, Segment, Times, Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode, sha256_hex

ASSETS: Final = sha256_hex(b"assets")
TURN_NS: Final = 100_000_000
START_NS: Final = 1_790_000_000_000_000_000
POOL_TOKENS: Final = 1 << 20
"""Trajectories are slices of this many random tokens."""
VOCABULARY: Final = 32_000
ROWS: Final = 100_000
DECLARED: Final = ("counter_sampling", "batch_invariant", "prefill_exact", "kv_export")
PROMPT_SHARE: Final = 4
"""Inverse share of prompt tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlan:
    """Run to write. Example: ``LogPlan(trajectories=20_000, tokens=2048)``

    `trajectories` is rounded up to whole steps; `tokens` are per sequence.
    """

    trajectories: int
    tokens: int
    run: str = "synthetic"
    group_size: int = 8
    per_step: int = 16
    partitions: int = 4
    workers: int = 4
    slots: int = 64
    max_staleness: int = 2
    turn_share: float = 0.5
    """Requests ending per turn."""

    @property
    def steps(self) -> int:
        batch = self.group_size * self.per_step
        return -(-self.trajectories // batch)


@dataclass(slots=True, kw_only=True)
class Player:
    name: str
    incarnation: int
    version: int = -1
    digest: str = ""
    requests: deque[ScheduledRequest] = field(default_factory=deque)

    def ready(self) -> WorkerReady:
        given = (self.name, self.incarnation, self.version, self.digest)
        return records.worker_ready(*given, load_ms=1.0)


class Encoder:
    """Encoder of distinct trajectories of equal length."""

    def __init__(self, plan: LogPlan) -> None:
        self._plan = plan
        chance = np.random.default_rng(20)
        ids = np.minimum(chance.zipf(1.3, POOL_TOKENS), VOCABULARY - 1)
        self._ids = ids.astype(np.int32)
        self._logprobs = -chance.exponential(0.7, POOL_TOKENS).astype(np.float32)
        prompt = plan.tokens // PROMPT_SHARE
        self._prompt = prompt
        self._mask = [0] * prompt + [1] * (plan.tokens - prompt)

    def __call__(
        self, request: ScheduledRequest, player: Player
    ) -> tuple[bytes, tuple[tuple[str, bytes], ...], LoggedEntry]:
        """Return value, headers, and entry without offset."""
        trajectory = self._trajectory(request, player)
        value, headers = encode_trajectory(trajectory)
        entry = LoggedEntry(
            trajectory=request.trajectory,
            attempt=request.attempt,
            partition=request.spec.partition,
            offset=-1,
            sha256=headers.sha256,
            bytes=len(value),
            tokens=headers.sampled,
            reward=trajectory.reward,
            finish="stop",
        )
        return value, header_pairs(headers), entry

    def _trajectory(self, request: ScheduledRequest, player: Player) -> Trajectory:
        spec, tokens, prompt = request.spec, self._plan.tokens, self._prompt
        start = (spec.ordinal * 7919 + request.sample * 104729) % (POOL_TOKENS - tokens)
        logprobs = self._logprobs[start : start + tokens].copy()
        logprobs[:prompt] = np.nan
        at_ns = START_NS + spec.ordinal
        generated = Segment(
            kind="model",
            start=prompt,
            end=tokens,
            turn=0,
            start_ns=at_ns + 1,
            end_ns=at_ns + 2,
            worker=player.name,
            incarnation=player.incarnation,
            version=spec.version,
        )
        asked = Segment(kind="prompt", start=0, end=prompt, turn=0, start_ns=at_ns, end_ns=at_ns)
        return Trajectory(
            trajectory=request.trajectory,
            version=spec.version,
            digest=spec.digest,
            token_ids=cast("Sequence[int]", self._ids[start : start + tokens]),
            logprobs=cast("Sequence[float | None]", logprobs),
            sampler_logprobs=cast("Sequence[float | None]", logprobs),
            loss_mask=self._mask,
            reward=float((spec.ordinal + request.sample) % 2),
            segments=[asked, generated] if prompt else [generated],
            meta=self._meta(request, player, at_ns),
        )

    def _meta(self, request: ScheduledRequest, player: Player, at_ns: int) -> Meta:
        spec = request.spec
        return Meta(
            run=self._plan.run,
            schema_version=SCHEMA_VERSION,
            group=spec.group,
            group_size=spec.size,
            sample=request.sample,
            attempt=request.attempt,
            purpose=spec.purpose,
            deadline=spec.deadline,
            dataset_digest=spec.dataset_digest,
            index=spec.index,
            data_epoch=spec.data_epoch,
            seed=trajectory_seed(spec.seed, request.sample),
            prompt_tokens=self._prompt,
            worker=player.name,
            incarnation=player.incarnation,
            finish="stop",
            times=Times(scheduled=at_ns, started=at_ns, first_token=at_ns, finished=at_ns),
            prefills=(self._prompt,),
        )


def config_of(plan: LogPlan) -> Config:
    plain = {
        "run": {"name": plan.run, "steps": plan.steps},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "rollout": {
            "group_size": plan.group_size,
            "prompts_per_step": plan.per_step,
            "filter_zero_advantage": False,
        },
        "staleness": {"max_staleness": plan.max_staleness},
        "evaluation": {"prompts": 0},
        "bus": {"partitions": plan.partitions},
    }
    return msgspec.convert(plain, Config)


def weights(version: int) -> Manifest:
    """Return a manifest with one dummy tensor."""
    tensor = Tensor(
        name="weight", dtype="float32", shape=(4,), sha256=sha256_hex(f"weights {version}".encode())
    )
    return Manifest(digest=weights_digest([tensor]), bytes=16, tensors=(tensor,))


def run_started(config: Config) -> RunStarted:
    return msgspec.structs.replace(
        records.run_started(config, rows=ROWS),
        at_ns=START_NS,
        schema_version=SCHEMA_VERSION,
        policy=weights(0),
    )


STEP_TURNS: Final = 2
"""Turns between a batch and its commit."""
TURNS_MAX: Final = 5_000_000
"""Turns of a stuck run."""


@dataclass(slots=True)
class Written:
    trajectories: int = 0
    trajectory_bytes: int = 0
    control: int = 0
    rounds: int = 0
    steps: int = 0


def write_log(bus: Bus, plan: LogPlan) -> Written:
    """Write the whole run. Raises BusError."""
    topics = Topics(plan.run)
    many = {topics.trajectories: plan.partitions, topics.progress: plan.partitions}
    bus.create([TopicSpec(name=name, partitions=many.get(name, 1)) for name in topics.all()])
    with closing(bus.writer()) as writer:
        return _Script(writer, topics, plan).play()


class _Script:
    def __init__(self, writer: Writer, topics: Topics, plan: LogPlan) -> None:
        self._writer, self._topics, self._plan = writer, topics, plan
        config = config_of(plan)
        self._machine = OrchestratorMachine(
            state=State(),
            topics=topics,
            incarnation=0,
            metrics={},
            timing=config.timing,
            cost=lambda: Cost(total_s=0, bus_s=0, control_s=0, codec_s=0, rss_bytes=0),
        )
        self._encode = Encoder(plan)
        self._turns = 0
        self._heard: list[Record] = []
        """Unread control records."""
        self._facts: list[Control] = []
        self._training: tuple[TakeBatch, int] | None = None
        self._taken_at = -1
        """Offset of the last batch."""
        self._written = Written()
        started = run_started(config)
        self._digest = started.policy.digest
        self._say(started)
        self._say(records.role_started("orchestrator"))
        trainer = records.role_started("trainer")
        self._say(msgspec.structs.replace(trainer, incarnation=1))
        names = [f"w{number}" for number in range(plan.workers)]
        for name in names:
            self._say(records.worker_joined(name, plan.slots, declares=DECLARED))
        offsets = self._flush()
        incarnations = offsets[-len(names) :]
        self._players = {
            name: Player(name=name, incarnation=incarnation)
            for name, incarnation in zip(names, incarnations, strict=True)
        }

    def play(self) -> Written:
        inputs: list[Any] = [*self._heard, CaughtUp()]
        for _ in range(TURNS_MAX):
            self._heard = []
            decisions = self._orchestrate(inputs)
            if self._machine.state.done:
                self._written.rounds = self._machine.state.rounds
                self._written.steps = self._machine.state.version
                return self._written
            for decision in decisions:
                self._obey(decision)
            self._work()
            self._flush()
            inputs = list(self._heard)
        raise ResourceError(f"{TURNS_MAX} turns without an end: the played run loops")

    def _orchestrate(self, inputs: Sequence[Any]) -> list[AnyDecision]:
        decisions: list[AnyDecision] = []
        while True:
            self._turns += 1
            now_ns = self._turns * TURN_NS
            out = self._machine.react(inputs, Now(mono_ns=now_ns, wall_ns=START_NS + now_ns))
            inputs = ()
            rounds = [
                publication.record
                for publication in out.publish
                if publication.record.topic != self._topics.metrics
            ]
            if not rounds:
                return decisions
            for record, offset in zip(rounds, self._writer.append(rounds), strict=True):
                decided = decode_round(record.value).decisions
                if any(isinstance(decision, TakeBatch) for decision in decided):
                    self._taken_at = offset
                decisions.extend(decided)

    def _obey(self, decision: AnyDecision) -> None:
        if isinstance(decision, Schedule):
            self._players[decision.worker].requests.extend(decision.requests())
        elif isinstance(decision, Assign):
            player = self._players[decision.worker]
            player.version, player.digest = decision.version, decision.digest
            self._say(player.ready())
        elif isinstance(decision, TakeBatch):
            self._training = decision, self._turns + STEP_TURNS

    def _work(self) -> None:
        for player in self._players.values():
            ending = -(-int(len(player.requests) * self._plan.turn_share * 100) // 100)
            ended = [player.requests.popleft() for _ in range(max(ending, bool(player.requests)))]
            self._log(player, ended)
        if self._training is not None and self._training[1] <= self._turns:
            self._commit(self._training[0])

    def _log(self, player: Player, ended: Sequence[ScheduledRequest]) -> None:
        if not ended:
            return
        encoded = [self._encode(request, player) for request in ended]
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
                for request, (value, headers, _) in zip(ended, encoded, strict=True)
            ]
        )
        entries: dict[tuple[int, str], list[LoggedEntry]] = {}
        for request, offset, (value, _, entry) in zip(ended, offsets, encoded, strict=True):
            self._written.trajectories += 1
            self._written.trajectory_bytes += len(value)
            spec = request.spec
            placed = msgspec.structs.replace(entry, offset=offset)
            entries.setdefault((spec.version, spec.digest), []).append(placed)
        for (version, digest), group_entries in entries.items():
            self._say(
                TrajectoriesLogged(
                    at_ns=self._now_ns,
                    worker=player.name,
                    incarnation=player.incarnation,
                    version=version,
                    digest=digest,
                    trajectories=tuple(group_entries),
                )
            )

    def _commit(self, take: TakeBatch) -> None:
        self._training = None
        after = weights(take.step + 1)
        fact = StepCommitted(
            at_ns=self._now_ns,
            step=take.step,
            attempt=take.attempt,
            incarnation=1,
            groups=take.groups,
            batch_digest=batch_digest(take.groups),
            digest_before=self._digest,
            digest_after=after.digest,
            policy=after,
            contributions=Blob(sha256=ASSETS, bytes=0),
            metrics={"loss": 0.5},
            settings=take.settings,
            numerics={},
            decisions_next=self._taken_at + 1,
            compute_s=0.1,
        )
        self._digest = after.digest
        self._say(fact)

    @property
    def _now_ns(self) -> int:
        return START_NS + self._turns * TURN_NS

    def _say(self, record: Control) -> None:
        self._facts.append(record)

    def _flush(self) -> list[int]:
        if not self._facts:
            return []
        topic = self._topics.control
        appends = [Append(topic=topic, value=encode(fact)) for fact in self._facts]
        offsets = self._writer.append(appends)
        self._heard += [
            stored(append, offset) for offset, append in zip(offsets, appends, strict=True)
        ]
        self._written.control += len(appends)
        self._facts = []
        return offsets
