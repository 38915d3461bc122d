"""Effects that the worker's machine starts, and the events that its ports report.

`EngineFailed` may replace any engine event. A request key (`request.key_of`) includes the attempt,
so events of an abandoned attempt never match the next one. `tasks.calls` defines those of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dora_pipe.producers.engines.engine import (
    EngineRequest,
    Kv,
    RequestFinished,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.tasks.calls import EpisodeLost, TaskEffect, TaskEvent
from dora_pipe.producers.worker.kv_handover import KvLabel
from dora_pipe.schemas.control import FinishReason, Resume, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import AnyProgress


class OfRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Effect or event of one request."""

    request: str


# Sessions of agents: requests whose source is one (`WorkerSetup.agents`)


class OpenSession(OfRequest, frozen=True, kw_only=True, tag=True):
    """Open a session before its `AgentCall`; the SessionPort returns `CallAsked` for each call."""

    source: str = ""


class CallAsked(OfRequest, frozen=True, kw_only=True, tag=True):
    """Model call, ended by `AnswerCall`, `RefuseCall` or `CloseSession`."""

    call: int
    """Unique within a request."""
    token_ids: Sequence[int]
    max_tokens: int | None = None
    """Requested limit; None: the limit of the run."""
    api: str = ""
    caller: str = ""
    asked: dict[str, Any] = {}
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """See `schemas.contexts.Call` for these five."""


class AnswerCall(OfRequest, frozen=True, kw_only=True, tag=True):
    """Send the model's answer, which is durable in the log."""

    call: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: FinishReason
    prompt_tokens: int


class RefuseCall(OfRequest, frozen=True, kw_only=True, tag=True):
    """Reject a call; `status` and `code` follow HTTP and OpenAI errors."""

    call: int
    status: int
    code: str
    message: str


class CloseSession(OfRequest, frozen=True, kw_only=True, tag=True):
    """Reject open and later calls with 410."""

    source: str = ""


# The engine


class EngineAdd(msgspec.Struct, frozen=True, kw_only=True):
    """Put a request into the next free slot."""

    request: EngineRequest


class EngineStarted(OfRequest, frozen=True, kw_only=True):
    """A request has its slot; `at_ns` is the wall clock."""

    at_ns: int
    imported: bool = False
    """False: it is prefilled."""
    why: str = ""


class EngineCancel(OfRequest, frozen=True, kw_only=True):
    """Drop a running or queued request."""


class EngineExport(OfRequest, frozen=True, kw_only=True):
    """Remove a running request from its slot: a last `TokensSampled`, then `EngineExported`."""


class EngineExported(OfRequest, frozen=True, kw_only=True):
    """A request has left its slot, with its KV cache if available."""

    kv: Kv | None


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine raised during work; it is not used again and its worker leaves."""

    message: str


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Load a version. Without `keep`, no slot may be in use on a single-version engine."""

    version: int
    digest: str
    keep: bool = False
    """Running requests continue; their earlier tokens come before `WeightsLoaded`."""


class DropWeights(msgspec.Struct, frozen=True, kw_only=True):
    versions: tuple[int, ...]


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Release weights and KV memory while idle. The answer has version -1."""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True):
    """Loading failed; the engine keeps its previous weights or is unusable."""

    version: int
    message: str
    local: bool = False
    """Another worker may succeed."""
    hint: str | None = None


# KV caches of requests that move


class PutKv(OfRequest, frozen=True, kw_only=True):
    """Offer a KV cache to the worker that continues its request."""

    label: KvLabel
    kv: Kv


class KvPut(OfRequest, frozen=True, kw_only=True):
    """Reference to the offered KV cache; None with the reason in `why`."""

    blob: Blob | None
    why: str = ""


class FetchKv(OfRequest, frozen=True, kw_only=True):
    """Fetch the KV cache that another worker offered."""

    label: KvLabel
    blob: Blob


class KvFetched(OfRequest, frozen=True, kw_only=True):
    """KV cache with verified digest and label; None with the reason in `why`."""

    kv: Kv | None
    why: str = ""


class DropKv(msgspec.Struct, frozen=True, kw_only=True):
    """Delete a KV cache that no request will use."""

    blob: Blob


# Records


class FetchProgress(OfRequest, frozen=True, kw_only=True):
    """Read the chain of progress records that ends at `resume`."""

    resume: Resume


class ProgressFetched(OfRequest, frozen=True, kw_only=True):
    """Chain, oldest record first; empty with the reason in `why` if it was unreadable."""

    chunks: Sequence[AnyProgress]
    why: str = ""


class FetchGroup(OfRequest, frozen=True, kw_only=True):
    """Read these records of a group; at least one."""

    trajectories: tuple[TakenTrajectory, ...]


class GroupFetched(OfRequest, frozen=True, kw_only=True):
    """Verified records, in order; empty with the reason in `why` if one is invalid."""

    trajectories: Sequence[Trajectory]
    why: str = ""


SessionEffect = OpenSession | AnswerCall | RefuseCall | CloseSession
EngineEffect = EngineAdd | EngineCancel | EngineExport | LoadWeights | DropWeights | Sleep
HandoverEffect = PutKv | FetchKv | DropKv
RecordEffect = FetchProgress | FetchGroup
WorkerEffect = TaskEffect | SessionEffect | EngineEffect | HandoverEffect | RecordEffect

SessionEvent = CallAsked | EpisodeLost
HandoverEvent = KvPut | KvFetched
RecordEvent = ProgressFetched | GroupFetched
StepEvent = EngineStarted | TokensSampled | RequestFinished | EngineExported
EnginePortEvent = StepEvent | WeightsLoaded | LoadFailed | EngineFailed
RequestEvent = TaskEvent | SessionEvent | StepEvent | HandoverEvent | RecordEvent
"""Events of one request or of the scoring of a group."""

WorkerEvent = RequestEvent | EnginePortEvent
