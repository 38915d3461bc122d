"""What the worker's machine asks of its ports and what they answer; decides nothing.

A request is named by its key (see `rows.key_of`): trajectory and attempt, so that what belongs to
an attempt that was given up can never be taken for the next one's. The task pool's own calls and
events (`tasks.calls`) are used as they are wherever they carry no text; the machine knows token ids
only, text stays in the ports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dora_pipe.producers.engines.port import EngineRequest, Kv
from dora_pipe.producers.handover import KvLabel
from dora_pipe.producers.tasks.port import Split
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.trajectory import Trajectory


class EngineAdd(msgspec.Struct, frozen=True, kw_only=True):
    """Take a request into a slot, as soon as one is free: `EngineStarted`, then the engine's own
    events."""

    request: EngineRequest


class EngineStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A request has its slot; `at_ns` is the wall clock."""

    request: str
    at_ns: int
    imported: bool = False
    """It goes on from the KV cache that it came with; else it is prefilled."""
    why: str = ""
    """Why the KV cache that it came with was not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCancel:
    """Let go of a request, in its slot or ahead of it; no event follows."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExport:
    """Take a running request out of its slot: a last `TokensSampled`, then `EngineExported`."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExported:
    """A request has left its slot; None: its KV cache is not to be had."""

    request: str
    kv: Kv | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutKv:
    """Hand a KV cache over to whoever goes on with its request: `KvPut`."""

    request: str
    label: KvLabel
    kv: Kv


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPut:
    """Where the KV cache can be fetched; None when it was not kept, and `why`."""

    request: str
    blob: Blob | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchKv:
    """Get the KV cache that another worker handed over: `KvFetched`."""

    request: str
    label: KvLabel
    blob: Blob


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetched:
    """The KV cache, its digest and label checked; None when there is none, and `why`."""

    request: str
    kv: Kv | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropKv:
    """Nobody will go on from this KV cache any more; no event follows."""

    blob: Blob


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Load a version: `WeightsLoaded` or `LoadFailed`.

    Without `keep` no slot may be taken, unless it becomes resident beside others.
    """

    version: int
    digest: str
    keep: bool = False
    """Running requests go on under it: what they had sampled is emitted before `WeightsLoaded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWeights:
    """Forget these resident versions; nothing runs under them. No event follows."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """The engine keeps the weights it had, or is gone."""

    version: int
    message: str
    here: bool = False
    """What failed is this process or machine and not the version: another may host it."""


class Prompted(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request as token ids; with `episode`, its turns go to an environment."""

    request: str
    token_ids: Sequence[int]
    episode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvironment:
    """Hand a model turn to the request's episode: `Observed`, `TaskFailed` or `EpisodeLost`."""

    request: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the environment answered, as token ids; see `tasks.port.Observation`."""

    request: str
    token_ids: Sequence[int]
    done: bool
    tool: str
    ok: bool


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the reward of a finished trajectory: `Rewarded`, `TaskFailed` or `EpisodeLost`."""

    request: str
    split: Split
    index: int
    answer: Sequence[int]
    """Token ids of the last model turn."""
    turns: Sequence[Sequence[int]]
    """Token ids of every turn but the prompt, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Read the chain of progress records that ends at `resume`: `ProgressFetched`."""

    request: str
    resume: Resume


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFetched:
    """The chain as it was found, oldest first; empty when it could not be read, and `why`."""

    request: str
    chunks: Sequence[Progress]
    why: str = ""


class EncodeTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Make the value and headers of a trajectory: `TrajectoryEncoded` or `EncodeFailed`."""

    request: str
    trajectory: Trajectory


class TrajectoryEncoded(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as the bus takes it."""

    request: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeProgress:
    """Make the value of a progress record: `ProgressEncoded` or `EncodeFailed`."""

    request: str
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEncoded:
    """A progress record as the bus takes it."""

    request: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFailed:
    """The record broke a rule of its schema, so nothing may be logged of this request."""

    request: str
    message: str
