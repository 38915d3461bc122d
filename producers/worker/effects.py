"""What the worker's machine asks of its ports, and the events that they answer with.

    effect            port          answers with                                   done by
    PromptCall        TaskPort      PromptReady, TaskFailed, EpisodeLost           a task process
    EnvStep           TaskPort      EnvObserved, TaskFailed, EpisodeLost           a task process
    RewardCall        TaskPort      Rewarded, TaskFailed, EpisodeLost              a task process
    GroupCall         TaskPort      GroupRewarded, TaskFailed                      a task process
    AgentCall         TaskPort      AgentEnded, TaskFailed, EpisodeLost            a task process
    Forget            TaskPort      -                                              a task process
    OpenSession       SessionPort   CallAsked, EpisodeLost                         the endpoint
    AnswerCall        SessionPort   -                                              the endpoint
    RefuseCall        SessionPort   -                                              the endpoint
    CloseSession      SessionPort   -                                              the endpoint
    EngineAdd         EnginePort    EngineStarted, TokensSampled, RequestFinished  the engine
    EngineCancel      EnginePort    -                                              the engine
    EngineExport      EnginePort    TokensSampled, EngineExported                  the engine
    LoadWeights       EnginePort    WeightsLoaded, LoadFailed                      a thread
    DropWeights       EnginePort    -                                              the engine
    Sleep             EnginePort    WeightsLoaded                                  the engine
    PutKv             HandoverPort  KvPut                                          a thread
    FetchKv           HandoverPort  KvFetched                                      a thread
    DropKv            HandoverPort  -                                              a thread
    FetchProgress     ProgressPort  ProgressFetched                                the loop
    FetchGroup        GroupPort     GroupFetched                                   the loop
    EncodeTrajectory  CodecPort     TrajectoryEncoded, EncodeFailed                the loop
    EncodeProgress    CodecPort     ProgressEncoded, EncodeFailed                  the loop

EngineFailed may take the place of any event of the engine. A request is named by its key (see
`request.key_of`): trajectory and attempt, so that what belongs to an attempt that was given up can
never be taken for the next one's. Calls and events of tasks have the names of `tasks.calls`; where
those carry text, token ids stand here, for the machine knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dora_pipe.producers.engines.port import (
    EngineRequest,
    Kv,
    RequestFinished,
    TokensSampled,
)
from dora_pipe.producers.tasks.calls import EpisodeLost, Forget, PromptCall, Rewarded, TaskFailed
from dora_pipe.producers.tasks.port import Split
from dora_pipe.producers.worker.kv_handover import KvLabel
from dora_pipe.schemas.control import FinishReason, Resume, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import AnyProgress


class OfRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An effect or event of one request."""

    request: str


# Tasks


class PromptReady(OfRequest, frozen=True, kw_only=True):
    """The prompt of a request; with `episode`, its turns go to an environment."""

    token_ids: Sequence[int]
    episode: bool
    replayable: bool = False
    """See `tasks.port.Task.replayable`."""


class EnvStep(OfRequest, frozen=True, kw_only=True):
    """Hand a model turn to the request's episode."""

    token_ids: Sequence[int]
    source: str = ""


class EnvObserved(OfRequest, frozen=True, kw_only=True):
    """What the environment answered; see `tasks.port.Observation`."""

    token_ids: Sequence[int]
    done: bool
    tool: str
    ok: bool
    error: str = ""


class RewardCall(OfRequest, frozen=True, kw_only=True):
    """Ask for the reward of a finished trajectory."""

    split: Split
    index: int
    answer: Sequence[int]
    """Token ids of the last model turn."""
    turns: Sequence[Sequence[int]]
    """Token ids of every turn but the prompt, in order."""
    before: Sequence[int] = ()
    """Of an agent: what the model saw when it said `answer`."""
    text: str | None = None
    """What an agent says is the answer, in place of the text of `answer`."""
    source: str = ""


class SampledTurns(msgspec.Struct, frozen=True, kw_only=True):
    """What one sibling of a `GroupCall` said, as token ids."""

    answer: Sequence[int]
    """Of the last model turn."""
    turns: Sequence[Sequence[int]]
    """Of every turn but the prompt, in order."""
    before: Sequence[int]
    """What stands before the last model turn."""


class GroupCall(OfRequest, frozen=True, kw_only=True):
    """Ask what the siblings of a group deserve beside each other."""

    split: Split
    index: int
    completions: Sequence[SampledTurns]
    source: str = ""


# Agents: requests whose source is one (`WorkerSetup.agents`)


class AgentCall(OfRequest, frozen=True, kw_only=True):
    """Run the agent on its row, until it returns: the TaskPort answers with `AgentEnded`,
    `TaskFailed` or `EpisodeLost`. `Forget` stops it. It is called again for the same request where
    its process was lost; then its calls are answered from the record as long as they are the
    same."""

    split: Split
    index: int
    source: str = ""
    start: int = 0
    """As its `OpenSession` has it: each start has an address of its own."""


class AgentEnded(OfRequest, frozen=True, kw_only=True):
    """The agent has returned, and will call no more."""

    rewarded: Rewarded | None = None
    """Its reward, where it gave one; else a `RewardCall` follows."""
    text: str | None = None
    """What it says is the answer; None: what the model said last."""


class OpenSession(OfRequest, frozen=True, kw_only=True):
    """From now on the agent of this request may call the model: the SessionPort tells `CallAsked`,
    any number of times. Said before its `AgentCall`."""

    source: str = ""
    start: int = 0
    """Of the agent's starts here: which."""


class CallAsked(OfRequest, frozen=True, kw_only=True):
    """An agent calls the model. Answered by exactly one `AnswerCall` or `RefuseCall`, or by the
    request's `CloseSession`. Several choices are as many calls with the same prompt."""

    call: int
    """The endpoint's own number of it, never given twice for a request."""
    token_ids: Sequence[int]
    """The whole prompt."""
    max_tokens: int | None = None
    """As asked for; None: as many as the run allows."""
    api: str = ""
    caller: str = ""
    asked: dict[str, Any] = {}
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """See `schemas.contexts.Call` for these five."""


class AnswerCall(OfRequest, frozen=True, kw_only=True):
    """What the model said. It is durable in the log."""

    call: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: FinishReason
    prompt_tokens: int


class RefuseCall(OfRequest, frozen=True, kw_only=True):
    """The call gets no answer; `status` and `code` as HTTP and OpenAI's errors have them."""

    call: int
    status: int
    code: str
    message: str
    """A sentence that says what to wait for."""


class CloseSession(OfRequest, frozen=True, kw_only=True):
    """The agent may call no more: open calls and later ones are answered with 410. The same key may
    be opened again: what was asked before is not told then."""

    source: str = ""


# The engine


class EngineAdd(msgspec.Struct, frozen=True, kw_only=True):
    """Take a request into a slot, as soon as one is free."""

    request: EngineRequest


class EngineStarted(OfRequest, frozen=True, kw_only=True):
    """A request has its slot; `at_ns` is the wall clock."""

    at_ns: int
    imported: bool = False
    """It goes on from the KV cache that it came with; else it is prefilled."""
    why: str = ""
    """Why the KV cache that it came with was not taken."""


class EngineCancel(OfRequest, frozen=True, kw_only=True):
    """Let go of a request, in its slot or ahead of it."""


class EngineExport(OfRequest, frozen=True, kw_only=True):
    """Take a running request out of its slot: a last `TokensSampled`, then `EngineExported`."""


class EngineExported(OfRequest, frozen=True, kw_only=True):
    """A request has left its slot; None: its KV cache is not to be had."""

    kv: Kv | None


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine raised while it worked: it is not used any more, and its worker leaves."""

    message: str


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Load a version. Without `keep` no slot may be taken, unless it becomes resident beside
    others."""

    version: int
    digest: str
    keep: bool = False
    """Running requests go on under it: what they had sampled is emitted before `WeightsLoaded`."""


class DropWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Forget these resident versions; nothing runs under them."""

    versions: tuple[int, ...]


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Let go of the weights, and of the memory for what runs under them: nothing does. The answer
    is of version -1."""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine keeps the weights it had, or is gone."""

    version: int
    message: str
    here: bool = False
    """What failed is this process or machine and not the version: another may host it."""
    hint: str | None = None
    """What to do about it."""


# KV caches of requests that move


class PutKv(OfRequest, frozen=True, kw_only=True):
    """Hand a KV cache over to whoever goes on with its request."""

    label: KvLabel
    kv: Kv


class KvPut(OfRequest, frozen=True, kw_only=True):
    """Where the KV cache can be fetched; None when it was not kept, and `why`."""

    blob: Blob | None
    why: str = ""


class FetchKv(OfRequest, frozen=True, kw_only=True):
    """Get the KV cache that another worker handed over."""

    label: KvLabel
    blob: Blob


class KvFetched(OfRequest, frozen=True, kw_only=True):
    """The KV cache, its digest and label checked; None when there is none, and `why`."""

    kv: Kv | None
    why: str = ""


class DropKv(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody will go on from this KV cache any more."""

    blob: Blob


# Records


class FetchProgress(OfRequest, frozen=True, kw_only=True):
    """Read the chain of progress records that ends at `resume`."""

    resume: Resume


class ProgressFetched(OfRequest, frozen=True, kw_only=True):
    """The chain as it was found, oldest first; empty when it could not be read, and `why`."""

    chunks: Sequence[AnyProgress]
    why: str = ""


class FetchGroup(OfRequest, frozen=True, kw_only=True):
    """Read these records of a group; at least one."""

    trajectories: tuple[TakenTrajectory, ...]


class GroupFetched(OfRequest, frozen=True, kw_only=True):
    """The records, in order, checked down to their bytes; empty where one is not as it should be,
    and `why`."""

    trajectories: Sequence[Trajectory]
    why: str = ""


class EncodeTrajectory(OfRequest, frozen=True, kw_only=True):
    """Make the value and headers of a trajectory."""

    trajectory: Trajectory


class TrajectoryEncoded(OfRequest, frozen=True, kw_only=True):
    """A trajectory as the bus takes it."""

    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    sha256: str


class EncodeProgress(OfRequest, frozen=True, kw_only=True):
    """Make the value of a progress record."""

    progress: AnyProgress


class ProgressEncoded(OfRequest, frozen=True, kw_only=True):
    """A progress record as the bus takes it."""

    value: bytes


class EncodeFailed(OfRequest, frozen=True, kw_only=True):
    """The record broke a rule of its schema, so nothing may be logged of this request."""

    message: str


Effect = (
    PromptCall
    | EnvStep
    | RewardCall
    | GroupCall
    | AgentCall
    | Forget
    | OpenSession
    | AnswerCall
    | RefuseCall
    | CloseSession
    | EngineAdd
    | EngineCancel
    | EngineExport
    | LoadWeights
    | DropWeights
    | Sleep
    | PutKv
    | FetchKv
    | DropKv
    | FetchProgress
    | FetchGroup
    | EncodeTrajectory
    | EncodeProgress
)

RequestEvent = (
    PromptReady
    | EnvObserved
    | AgentEnded
    | CallAsked
    | Rewarded
    | TaskFailed
    | EpisodeLost
    | EngineStarted
    | TokensSampled
    | RequestFinished
    | EngineExported
    | KvPut
    | KvFetched
    | ProgressFetched
    | TrajectoryEncoded
    | ProgressEncoded
    | EncodeFailed
)
"""What becomes of one request; the machine takes what concerns the engine as a whole."""
