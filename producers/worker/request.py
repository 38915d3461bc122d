"""State of one request in a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Final, Literal

from dora_pipe.core.pure.machine import Now
from dora_pipe.core.pure.wait_tracker import DEFAULT_LIMITS, Limits
from dora_pipe.producers.engines.engine import EngineRequest, Kv, SamplingParams
from dora_pipe.producers.worker.sequence import Exchange, TokenSequence
from dora_pipe.producers.worker.session import OpenCall, Session
from dora_pipe.schemas.control import FinishReason, Resume
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import ScheduledRequest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import AnyProgress

ANY_VERSION: Final = -2
"""Pin of a request that may mix versions."""


@dataclass(frozen=True, slots=True)
class Served:
    """A version with its weights digest (hex)."""

    version: int
    digest: str


NOTHING: Final = Served(-1, "")


class Phase(StrEnum):
    """State of a request; the value names its wait."""

    PROMPTING = "prompts"
    RESUMING = "progress records"
    FETCHING = "KV caches"
    WAITING = "slots"
    RUNNING = "tokens"
    ENVIRONMENT = "environments"
    AGENT = "agents"
    ANSWERING = "calls to be durable"
    REWARDING = "rewards"
    LOGGING = "the trajectories topic"
    LEAVING = "the progress topic"
    EXPORTING = "the engine to let go"
    RELEASING = "the handover"


class Kind(Enum):
    """Kind of a request, which selects its transitions."""

    PLAIN = "plain"
    REPLAYABLE = "replayable episode"
    SESSION = "session of an agent"
    CALL = "call of a session"


GENERATING = frozenset(
    {
        Phase.PROMPTING,
        Phase.RESUMING,
        Phase.FETCHING,
        Phase.WAITING,
        Phase.RUNNING,
        Phase.ENVIRONMENT,
        Phase.AGENT,
    }
)
"""Phases that need the engine and keep their version loaded."""

WAITING_PHASES = (Phase.PROMPTING, Phase.RESUMING, Phase.FETCHING, Phase.WAITING)

MOVING = frozenset({Phase.EXPORTING, Phase.RELEASING})

UNFINISHED = GENERATING | MOVING | {Phase.LEAVING, Phase.REWARDING}
"""Phases that can be cancelled; a reward may never arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Constants of a worker incarnation. Mappings are keyed by `GroupSpec.source`."""

    topics: Topics
    worker: str
    incarnation: int
    """Offset of this incarnation's `worker joined`."""
    slots: int
    prefetch: int
    context_tokens: int
    checkpoint_tokens: int
    max_turns: Mapping[str, int]
    heartbeat_ns: int
    stop_timeout_ns: int
    """Limit of waits for rewards after a stop."""
    decisions_from: int
    digests: Mapping[str, str]
    params: Mapping[str, SamplingParams]
    agents: frozenset[str] = frozenset()
    partial_rollout: bool = False
    """Training requests may mix versions."""
    max_resident_versions: int = 1
    limits: Limits = DEFAULT_LIMITS
    quiet_ns: int = 0
    """Interval of statuses without news."""
    transfers: str = ""
    """Address of the weights served to others; empty: none."""

    @property
    def requests_max(self) -> int:
        """Limit of open requests, above `OPEN_TIMES` since some are cancelled too late."""
        return 8 * (self.slots + self.prefetch)


@dataclass(slots=True)
class EpisodeTurn:
    asked_ns: int = 0
    """When the environment received it."""
    finish: FinishReason | None = None
    """Replayable episodes: its end, None while it continues."""
    replay: deque[Exchange] = field(default_factory=deque)
    """Turns that a fresh environment has not received."""


@dataclass(slots=True)
class ProgressChain:
    resume: Resume | None = None
    """The last acknowledged one."""
    end: int = 0
    """Sampled tokens in the records, including an open one."""
    open: bool = False
    """A record is not yet acknowledged."""


@dataclass(slots=True)
class MovedCache:
    """KV cache of a request that moves."""

    blob: Blob | None = None
    """Its location: the one it came with or leaves."""
    kv: Kv | None = None
    """Fetched, not yet in the engine."""
    offered: bool = False
    """It is being handed over."""


@dataclass(slots=True)
class Score:
    """Reward of a request, or why it has none."""

    reward: float | None = None
    raw: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    error: str | None = None
    by: Literal["task", "agent"] = "task"
    agent_answer: str | None = None
    at_ns: int | None = None


_NO_TOKENS: Final = TokenSequence([], at_ns=0)


@dataclass(slots=True, kw_only=True)
class RequestState:
    """State of a request; changed only by `requests.Requests`."""

    key: str
    place: ScheduledRequest
    params: SamplingParams
    max_turns: int
    seed: int
    placed_ns: int
    phase: Phase = Phase.PROMPTING
    since_ns: int = 0
    """Start of its phase or end of its last call (monotonic)."""
    pin: int
    """Required version, or ANY_VERSION."""
    served: Served
    """Version that samples its current or next tokens."""
    weights: dict[int, str] = field(default_factory=dict)
    sequence: TokenSequence = _NO_TOKENS
    episode: bool = False
    replayable: bool = False
    turn: EpisodeTurn = field(default_factory=EpisodeTurn)
    session: Session | None = None
    call: OpenCall | None = None
    chain: ProgressChain = field(default_factory=ProgressChain)
    cache: MovedCache = field(default_factory=MovedCache)
    started_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    finish: FinishReason = "stop"
    error: str | None = None
    score: Score = field(default_factory=Score)
    tool_error: str = ""
    sha256: str = ""
    value_bytes: int = 0

    def under(self, served: Served) -> None:
        if self.pin == ANY_VERSION:
            self.served = served
            self.weights[served.version] = served.digest

    @property
    def kind(self) -> Kind:
        if self.call is not None:
            return Kind.CALL
        if self.session is not None:
            return Kind.SESSION
        return Kind.REPLAYABLE if self.replayable else Kind.PLAIN

    @property
    def own(self) -> Served:
        return Served(self.place.spec.version, self.place.spec.digest)

    def finish_of(self, context_tokens: int) -> FinishReason | None:
        """Return how a resumed request has already ended."""
        if self.sequence.token_ids[-1] in self.params.stop_ids:
            return "stop"
        full = len(self.sequence) >= context_tokens
        if full or self.sequence.sampled_tokens >= self.params.max_tokens:
            return "length"
        return None

    @property
    def source(self) -> str:
        return self.place.spec.source

    @property
    def recorded(self) -> bool:
        return self.call is None and (self.replayable or not self.episode)

    def continue_from(self, sequence: TokenSequence, chunks: Sequence[AnyProgress]) -> None:
        """Continue from a recorded sequence and its chunks."""
        assert self.chain.resume is not None
        self.sequence = sequence
        self.weights |= {chunk.version: chunk.digest for chunk in chunks}
        self.first_token_ns = chunks[0].started_ns
        self.chain.end = self.chain.resume.tokens


def pin_of(scheduled: ScheduledRequest, setup: WorkerSetup) -> int:
    """Return the required version; evaluations and sessions never mix versions."""
    mixes = setup.partial_rollout and scheduled.spec.source not in setup.agents
    if mixes and scheduled.spec.purpose == "train":
        return ANY_VERSION
    return scheduled.spec.version


def state_of(scheduled: ScheduledRequest, setup: WorkerSetup, now: Now) -> RequestState:
    """Return the initial state of a placed request."""
    spec = scheduled.spec
    return RequestState(
        key=key_of(scheduled.trajectory, scheduled.attempt),
        place=scheduled,
        pin=pin_of(scheduled, setup),
        served=Served(spec.version, spec.digest),
        weights={spec.version: spec.digest},
        params=setup.params[spec.source],
        max_turns=setup.max_turns[spec.source],
        seed=seed_of(scheduled),
        placed_ns=now.wall_ns,
        since_ns=now.mono_ns,
        chain=ProgressChain(resume=scheduled.resume),
        cache=MovedCache(blob=scheduled.kv),
    )


def key_of(trajectory: str, attempt: int) -> str:
    """Return a key such as ``g0000000042-003/2``."""
    return f"{trajectory}/{attempt}"


def seed_of(scheduled: ScheduledRequest) -> int:
    """Return the seed, independent of attempt and worker."""
    return trajectory_seed(scheduled.spec.seed, scheduled.sample)


def engine_request_of(request: RequestState, emit_every: int) -> EngineRequest:
    """Return the engine request; in an episode, of the current turn."""
    sequence, params, sampled = request.sequence, request.params, request.sequence.sampled_tokens
    if request.episode:
        before, sampled = sampled - sequence.turn_tokens, sequence.turn_tokens
        params = replace(params, max_tokens=params.max_tokens - before)
        emit_every = emit_every if request.recorded else 0
    return EngineRequest(
        request=request.key,
        token_ids=list(sequence.token_ids),
        sampled=sampled,
        seed=request.seed,
        params=params,
        emit_every=emit_every,
        kv=request.cache.kv,
        version=request.served.version,
        keep=request.episode or request.call is not None,
        routed=sequence.routes.known,
    )
