"""One request on its way through a worker: its state, and the sequence that its pieces become;
decides nothing. What is logged of it is made in `request_records`.

Tokens are kept as they were sampled and never made again from text. What an environment says is
appended behind them, with mask 0. Every stretch of tokens that one worker sampled in one go is a
segment of its own, so that a request that went on elsewhere shows where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from dora_pipe.core.runtime import Now
from dora_pipe.core.wait_tracker import DEFAULT_LIMITS, Limits
from dora_pipe.producers.engines.port import EngineRequest, Kv, SamplingParams
from dora_pipe.schemas.control import FinishReason, Resume
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import PlacedRequest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import (
    Progress,
    Segment,
    SegmentKind,
    turns_of,
)

ANY_VERSION: Final = -2
"""What a request waits for that goes on under any version from its own on."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A version with its weights digest (hex)."""

    version: int
    digest: str


NOTHING: Final = Hosted(-1, "")
"""What a worker hosts before its first assignment."""


class Phase(StrEnum):
    """Where a request is; the value says in words what it waits for, for all in it."""

    PROMPTING = "prompts"
    RESUMING = "progress records"
    FETCHING = "KV caches"
    WAITING = "slots"
    RUNNING = "tokens"
    ENVIRONMENT = "environments"
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
    }
)
"""Phases that still need the engine: a version is kept until none of its requests is in one."""

WAITING_PHASES = (Phase.PROMPTING, Phase.RESUMING, Phase.FETCHING, Phase.WAITING)
"""Phases of a request that has not come to a slot yet."""

MOVING = frozenset({Phase.EXPORTING, Phase.RELEASING})
"""Phases of a request that goes on elsewhere; see `Requests.move`."""

UNFINISHED = GENERATING | MOVING | {Phase.LEAVING}
"""Phases in which a cancellation does not come too late."""


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
    calls_max: Mapping[str, int] = field(default_factory=dict)
    """Calls of one session to the model, of every source in `agents`."""
    calls_open_max: Mapping[str, int] = field(default_factory=dict)
    """Of these, at the same time."""
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


class TokenSequence:
    """The growing sequence of one request.

    Example: ``s = TokenSequence([5, 6], at_ns=1)``, then per stay in a slot ``s.start_stay(2)``,
    ``s.sampled([7], [-0.5], [-0.5])``, ``s.end_stay(3, worker="w0", epoch=4, version=1)``.
    """

    __slots__ = (
        "_stay_start",
        "_stay_start_ns",
        "_turn",
        "logprobs",
        "loss_mask",
        "prefills",
        "prompt_tokens",
        "sampled_tokens",
        "sampler_logprobs",
        "segments",
        "token_ids",
    )

    def __init__(self, prompt: Sequence[int], *, at_ns: int) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.sampler_logprobs: list[float | None] = []
        self.loss_mask: list[int] = []
        self.segments: list[Segment] = []
        self.prefills: list[int] = []
        """Lengths of the sequence at which a KV cache was filled by prefill."""
        self.sampled_tokens = 0
        self.prompt_tokens = len(prompt)
        self._turn = 0
        self._stay_start = 0
        self._stay_start_ns = 0
        self._given("prompt", prompt, at_ns, at_ns)

    def __len__(self) -> int:
        return len(self.token_ids)

    def resume(self, chunks: Sequence[Progress]) -> None:
        """Take over what earlier stays sampled; `chunks` are a whole chain, oldest first.

        Their segments end where they started, in time: a chunk does not say when it ended.
        """
        assert self.sampled_tokens == 0 and chunks[0].start == 0
        for chunk in chunks:
            start = len(self.token_ids)
            self.sampled(chunk.token_ids, chunk.logprobs, chunk.sampler_logprobs)
            last = self.segments[-1]
            made_by = (chunk.worker, chunk.epoch, chunk.version)
            if last.kind == "model" and (last.worker, last.epoch, last.version) == made_by:
                start = self.segments.pop().start
            self._segment(
                "model",
                start,
                chunk.started_ns,
                chunk.started_ns,
                worker=chunk.worker,
                epoch=chunk.epoch,
                version=chunk.version,
            )
        self.prefills = list(chunks[-1].prefills)

    def start_stay(self, at_ns: int, *, imported: bool = False) -> None:
        """The sequence goes into a slot: everything so far is prefilled, or was `imported`."""
        self._stay_start = len(self.token_ids)
        self._stay_start_ns = at_ns
        if not imported:
            self.prefills.append(self._stay_start)

    def sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        sampler_logprobs: Sequence[float],
    ) -> None:
        """Append tokens that the policy sampled; the three arrays are of equal length."""
        assert len(token_ids) == len(logprobs) == len(sampler_logprobs)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.sampler_logprobs.extend(sampler_logprobs)
        self.loss_mask.extend([1] * len(token_ids))
        self.sampled_tokens += len(token_ids)

    def end_stay(self, at_ns: int, *, worker: str, epoch: int, version: int) -> None:
        """The sequence left its slot."""
        self._segment(
            "model",
            self._stay_start,
            self._stay_start_ns,
            at_ns,
            worker=worker,
            epoch=epoch,
            version=version,
        )

    def reload(self, at_ns: int, *, worker: str, epoch: int, version: int) -> None:
        """The weights change under the stay; `version` has sampled it so far."""
        if len(self.token_ids) > self._stay_start:  # else it is prefilled again at the same place
            self.end_stay(at_ns, worker=worker, epoch=epoch, version=version)
            self.start_stay(at_ns)

    def observed(
        self, token_ids: Sequence[int], *, asked_ns: int, at_ns: int, tool: str, ok: bool
    ) -> None:
        """Append what the environment or a tool answered; the next turn begins behind it."""
        kind: SegmentKind = "tool" if tool else "environment"
        self._given(kind, token_ids, asked_ns, at_ns, tool=tool, ok=ok)
        self._turn += 1

    @property
    def moves(self) -> int:
        """How often a stay began with the KV cache of the one before it: without a prefill."""
        prefilled = set(self.prefills)
        return sum(one.kind == "model" and one.start not in prefilled for one in self.segments)

    @property
    def turns_taken(self) -> int:
        """Turns of the model that an environment has answered."""
        return self._turn

    def answer(self) -> list[int]:
        """Token ids of the last turn of the model; empty before the first."""
        turns = [ids for kind, ids in turns_of(self.segments, self.token_ids) if kind == "model"]
        return turns[-1] if turns else []

    def turns(self) -> list[list[int]]:
        """Token ids of every turn but the prompt, in order; stays of one turn are one."""
        return [ids for _, ids in turns_of(self.segments, self.token_ids)]

    @property
    def versions(self) -> list[int]:
        """The versions that have sampled it, in order, each once."""
        return list(dict.fromkeys(one.version for one in self.segments if one.kind == "model"))

    def stretch(self, start: int, *, now: int) -> tuple[int, int]:
        """(version, end): one version has sampled [start, end), counted after the prompt.

        `now` is the version of the present stay. Only for sequences of a single turn.
        """
        at, version, end = self.prompt_tokens + start, now, len(self.token_ids)
        for segment in reversed(self.segments):
            if segment.kind != "model" or segment.end <= at:
                break
            if segment.version != version:
                version, end = segment.version, segment.end
        return version, end - self.prompt_tokens

    def sampled_from(self, start: int, end: int) -> tuple[list[int], list[float], list[float]]:
        """Sampled tokens [start, end), counted after the prompt, with both log-probs.

        Only for sequences of a single turn, whose tokens after the prompt are all sampled.
        """
        at = slice(self.prompt_tokens + start, self.prompt_tokens + end)
        logprobs = [one for one in self.logprobs[at] if one is not None]
        sampler = [one for one in self.sampler_logprobs[at] if one is not None]
        assert len(logprobs) == end - start
        return self.token_ids[at], logprobs, sampler

    def _given(
        self,
        kind: SegmentKind,
        token_ids: Sequence[int],
        start_ns: int,
        end_ns: int,
        *,
        tool: str = "",
        ok: bool = True,
    ) -> None:
        start = len(self.token_ids)
        nothing: list[float | None] = [None] * len(token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(nothing)
        self.sampler_logprobs.extend(nothing)
        self.loss_mask.extend([0] * len(token_ids))
        self._segment(kind, start, start_ns, end_ns, tool=tool, ok=ok)

    def _segment(
        self,
        kind: SegmentKind,
        start: int,
        start_ns: int,
        end_ns: int,
        *,
        worker: str = "",
        epoch: int = -1,
        version: int = -1,
        tool: str = "",
        ok: bool = True,
    ) -> None:
        self.segments.append(
            Segment(
                kind=kind,
                start=start,
                end=len(self.token_ids),
                turn=self._turn,
                start_ns=start_ns,
                end_ns=end_ns,
                worker=worker,
                epoch=epoch,
                version=version,
                tool=tool,
                ok=ok,
            )
        )


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
    """When it entered its phase (monotonic)."""
    pin: int
    """The version it needs, or ANY_VERSION."""
    hosted: Hosted
    """What samples its present tokens, or samples its next ones."""
    weights: dict[int, str] = field(default_factory=dict)
    """Weights digest of every version that has sampled for it, its own among them."""
    sequence: TokenSequence = _NO_TOKENS
    episode: bool = False
    """It has an environment: several turns, no progress records."""
    restarts: int = 0
    """How often its episode was lost."""
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
    reward_error: str | None = None
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

    def start_over(self) -> None:
        """Forget all that was sampled."""
        self.sequence = _NO_TOKENS
        self.started_ns = self.first_token_ns = self.finished_ns = None


def pin_of(place: PlacedRequest, setup: WorkerSetup) -> int:
    """The version that a request needs. Evaluations are of one version, whatever the run does."""
    if setup.interruptible and place.spec.purpose == "train":
        return ANY_VERSION
    return place.spec.version


def state_of(place: PlacedRequest, setup: WorkerSetup, now: Now) -> RequestState:
    """A request that was just placed."""
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
    """What the engine is told of a request; of several turns only what is left may be sampled."""
    sequence, params, sampled = request.sequence, request.params, request.sequence.sampled_tokens
    if request.episode:
        params = replace(params, max_tokens=params.max_tokens - sampled)
        sampled = emit_every = 0
    return EngineRequest(
        request=request.key,
        token_ids=list(sequence.token_ids),
        sampled=sampled,
        seed=request.seed,
        params=params,
        emit_every=emit_every,
        kv=request.kv,
        version=request.hosted.version,
        keep=request.episode,
    )
