"""One request on its way through a worker: its state; decides nothing. What is logged of it is made
in `request_records`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

from dora_pipe.core.runtime import Now
from dora_pipe.core.wait_tracker import DEFAULT_LIMITS, Limits
from dora_pipe.producers.engines.port import EngineRequest, Kv, SamplingParams
from dora_pipe.producers.worker.sequence import Exchange, TokenSequence
from dora_pipe.producers.worker.session import OpenCall, Session
from dora_pipe.schemas.control import FinishReason, Resume
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import PlacedRequest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import AnyProgress

ANY_VERSION: Final = -2
"""What a request waits for that goes on under any version from its own on."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A version with its weights digest (hex)."""

    version: int
    digest: str


NOTHING: Final = Hosted(-1, "")
"""What a worker hosts before its first assignment."""


EPISODE_RESTARTS_MAX: Final = 3
"""Times a request starts again here because its environment died; then it fails."""

STARTED_AGAIN: Final = "episodes started again"
"""What is counted of an environment that was lost with all its turns."""


class Phase(StrEnum):
    """Where a request is; the value says in words what it waits for, for all in it."""

    PROMPTING = "prompts"
    RESUMING = "progress records"
    FETCHING = "KV caches"
    WAITING = "slots"
    RUNNING = "tokens"
    ENVIRONMENT = "environments"
    AGENT = "agents"
    ANSWERING = "calls to be durable"
    REWARDING = "rewards"
    ENCODING = "the codec"
    LOGGING = "the trajectories topic"
    LEAVING = "the progress topic"
    EXPORTING = "the engine to let go"
    RELEASING = "the handover"


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
"""Phases that still need the engine: a version is kept until none of its requests is in one."""

WAITING_PHASES = (Phase.PROMPTING, Phase.RESUMING, Phase.FETCHING, Phase.WAITING)
"""Phases of a request that has not come to a slot yet."""

MOVING = frozenset({Phase.EXPORTING, Phase.RELEASING})
"""Phases of a request that goes on elsewhere; see `Requests.move`."""

UNFINISHED = GENERATING | MOVING | {Phase.LEAVING, Phase.REWARDING}
"""Phases in which a cancellation does not come too late: a reward may never come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker incarnation is told once.

    Example: ``WorkerSetup(topics=Topics("demo"), worker="w0", epoch=7, slots=64, prefetch=16,
    context_tokens=1024, checkpoint_tokens=128, turns_max={...}, heartbeat_ns=500_000_000,
    stop_timeout_ns=30_000_000_000, decisions_from=12, digests={...}, params={...})``. What differs
    between tasks and evaluations is keyed by `GroupSpec.source`.
    """

    topics: Topics
    worker: str
    epoch: int
    """Offset of this incarnation's `worker joined`."""
    slots: int
    prefetch: int
    context_tokens: int
    checkpoint_tokens: int
    turns_max: Mapping[str, int]
    heartbeat_ns: int
    stop_timeout_ns: int
    """How long finished requests may still wait for rewards after a stop was asked."""
    decisions_from: int
    """Position in the decisions topic, taken before joining."""
    digests: Mapping[str, str]
    """Of the data sets."""
    params: Mapping[str, SamplingParams]
    """Sampling settings, stop token ids included."""
    agents: frozenset[str] = frozenset()
    """Sources whose requests are sessions of an agent."""
    interruptible: bool = False
    """Training requests go on under every version that is loaded; see
    `Requests.weights_replaced`."""
    versions_resident: int = 1
    """Versions that it hosts at the same time."""
    limits: Limits = DEFAULT_LIMITS
    """Of its waits."""
    quiet_ns: int = 0
    """Without news, statuses are so far apart (`core.status_schedule`)."""
    transfers: str = ""
    """Address at which other workers get the weights that this one hosts; empty: nowhere."""

    @property
    def requests_max(self) -> int:
        """Requests held at once, whatever they wait for; a placement beyond is refused.

        More than the orchestrator places (`OPEN_TIMES`): who was cancelled too late is here still.
        """
        return 8 * (self.slots + self.prefetch)


_NO_TOKENS: Final = TokenSequence([], at_ns=0)
"""The sequence of a request that has no prompt yet; never changed."""


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request. Changed by `requests.Requests` alone."""

    key: str
    place: PlacedRequest
    params: SamplingParams
    turns_max: int
    seed: int
    placed_ns: int
    phase: Phase = Phase.PROMPTING
    since_ns: int = 0
    """When it entered its phase, or the last call of its session ended (monotonic)."""
    pin: int
    """The version it needs, or ANY_VERSION."""
    hosted: Hosted
    """What samples its present tokens, or samples its next ones."""
    weights: dict[int, str] = field(default_factory=dict)
    """Weights digest of every version that has sampled for it, its own among them."""
    sequence: TokenSequence = _NO_TOKENS
    episode: bool = False
    """It has an environment: several turns."""
    replayable: bool = False
    """That environment, or another one, can be told again what the model has said; see
    `episodes`."""
    replay: deque[Exchange] = field(default_factory=deque)
    """What a fresh environment has not been told of it yet."""
    turn_finish: FinishReason | None = None
    """How the last turn of a replayable episode has ended; None while it goes on."""
    session: Session | None = None
    """It is a session of an agent: its calls are requests of their own."""
    call: OpenCall | None = None
    """It is a call of a session, from when it is asked until its answer is durable."""
    restarts: int = 0
    """How often its episode was lost and began again from its prompt."""
    retellings: int = 0
    """How often it was lost and told again."""
    resume: Resume | None = None
    """Its newest durable progress record."""
    chunk_end: int = 0
    """Sampled tokens that progress records cover, the one under way included."""
    chunk_open: bool = False
    """A progress record is under way: encoded, or appended and not yet acknowledged."""
    blob: Blob | None = None
    """Where its KV cache lies: the one it came with until it is used, or the one it leaves."""
    kv: Kv | None = None
    """Its KV cache, fetched and not yet in the engine."""
    kv_open: bool = False
    """Its KV cache is being handed over."""
    asked_ns: int = 0
    """When the environment was asked."""
    started_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    rewarded_ns: int | None = None
    finish: FinishReason = "stop"
    error: str | None = None
    reward: float | None = None
    reward_raw: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_answer: str = ""
    rewarded_by: Literal["task", "agent"] = "task"
    agent_answer: str | None = None
    reward_error: str | None = None
    tool_error: str = ""
    """First error of a tool since the request began here."""
    sha256: str = ""
    value_bytes: int = 0

    def under(self, hosted: Hosted) -> None:
        """What samples its next tokens, if that may be another version than its own."""
        if self.pin == ANY_VERSION:
            self.hosted = hosted
            self.weights[hosted.version] = hosted.digest

    @property
    def own(self) -> Hosted:
        """The version it was dispatched under."""
        return Hosted(self.place.spec.version, self.place.spec.digest)

    def finish_of(self, context_tokens: int) -> FinishReason | None:
        """How a resumed request had ended already, so that no slot may sample behind its end."""
        if self.sequence.token_ids[-1] in self.params.stop_ids:
            return "stop"
        full = len(self.sequence) >= context_tokens
        if full or self.sequence.sampled_tokens >= self.params.max_tokens:
            return "length"
        return None

    @property
    def source(self) -> str:
        """Which task processes serve it: `GroupSpec.source`."""
        return self.place.spec.source

    @property
    def recorded(self) -> bool:
        """Whether what is sampled for it goes to the progress topic."""
        return self.call is None and (self.replayable or not self.episode)

    def continues(self, chunks: Sequence[AnyProgress]) -> None:
        """It goes on from these records, whose tokens are in its sequence."""
        assert self.resume is not None
        self.weights |= {chunk.version: chunk.digest for chunk in chunks}
        self.first_token_ns = chunks[0].started_ns
        self.chunk_end = self.resume.tokens

    def start_over(self) -> None:
        """Forget all that was sampled."""
        self.sequence = _NO_TOKENS
        self.started_ns = self.first_token_ns = self.finished_ns = None


def pin_of(place: PlacedRequest, setup: WorkerSetup) -> int:
    """The version that a request needs. Evaluations and sessions are of one version, whatever the
    run does."""
    mixes = setup.interruptible and place.spec.source not in setup.agents
    if mixes and place.spec.purpose == "train":
        return ANY_VERSION
    return place.spec.version


def state_of(place: PlacedRequest, setup: WorkerSetup, now: Now) -> RequestState:
    spec = place.spec
    return RequestState(
        key=key_of(place.trajectory, place.attempt),
        place=place,
        pin=pin_of(place, setup),
        hosted=Hosted(spec.version, spec.digest),
        weights={spec.version: spec.digest},
        params=setup.params[spec.source],
        turns_max=setup.turns_max[spec.source],
        seed=seed_of(place),
        placed_ns=now.wall_ns,
        since_ns=now.mono_ns,
        resume=place.resume,
        blob=place.kv,
    )


def key_of(trajectory: str, attempt: int) -> str:
    """The name of a request inside its worker: ``key_of("g0000000042-003", 2)``."""
    return f"{trajectory}/{attempt}"


def seed_of(place: PlacedRequest) -> int:
    """The seed of the request's random stream: neither attempt nor worker enters it."""
    return trajectory_seed(place.spec.seed, place.sibling)


def engine_request_of(request: RequestState, emit_every: int) -> EngineRequest:
    """What the engine is told of a request: of several turns the present one, in which only what is
    left may be sampled."""
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
        kv=request.kv,
        version=request.hosted.version,
        keep=request.episode or request.call is not None,
        routed=sequence.routes.known,
    )
