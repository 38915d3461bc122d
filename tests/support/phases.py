"""A request of a worker in every phase, and every event that a port may bring."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from dora_pipe.core.runtime import Now, Published
from dora_pipe.producers.engines.port import Kv, RequestFinished, TokensSampled
from dora_pipe.producers.tasks.calls import EpisodeLost, Rewarded, TaskFailed
from dora_pipe.producers.worker.effects import (
    EncodeFailed,
    EngineExported,
    EngineStarted,
    EnvObserved,
    KvFetched,
    KvPut,
    ProgressEncoded,
    ProgressFetched,
    PromptReady,
    TrajectoryEncoded,
)
from dora_pipe.producers.worker.request import RequestState
from dora_pipe.producers.worker.requests import VALUE_BYTES_MAX, Requests
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import PlacedRequest
from dora_pipe.schemas.trajectory import Progress
from tests.support.worker import digest_of, setup_of, spec_of

NOW = Now(mono_ns=5, wall_ns=10**18)
TRAJECTORY = trajectory_id(spec_of(0).group, 0)
KEY = f"{TRAJECTORY}/1"
RESUME = Resume(tokens=2, partition=0, offset=3)

CHUNK = Progress(
    trajectory=TRAJECTORY,
    attempt=1,
    version=0,
    digest=digest_of(0),
    worker="w9",
    epoch=3,
    start=0,
    token_ids=[7, 8],
    logprobs=[-1.0, -1.0],
    sampler_logprobs=[-1.0, -1.0],
    prefills=(2,),
    previous=-1,
    started_ns=1,
)
BLOB = Blob(sha256="a" * 64, bytes=9)
KV = Kv(tokens=21, layout="x", weights="0" * 64, arrays={})

EVENTS: dict[str, Any] = {
    "prompted": PromptReady(request=KEY, token_ids=[5, 6], episode=False),
    "episode": PromptReady(request=KEY, token_ids=[5, 6], episode=True),
    "fetched": ProgressFetched(request=KEY, chunks=(), why="gone"),
    "chain": ProgressFetched(request=KEY, chunks=[CHUNK]),
    "started": EngineStarted(request=KEY, at_ns=10**18),
    "tokens": TokensSampled(
        request=KEY,
        token_ids=[7] * 20,
        logprobs=[-1.0] * 20,
        sampler_logprobs=[-1.0] * 20,
        first_token_ns=1,
    ),
    "stopped": RequestFinished(request=KEY, reason="stop"),
    "engine error": RequestFinished(request=KEY, reason="error", error="no more memory"),
    "observed": EnvObserved(request=KEY, token_ids=[8], done=False, tool="", ok=True),
    "done": EnvObserved(request=KEY, token_ids=[8], done=True, tool="", ok=True),
    "rewarded": Rewarded(request=KEY, reward=0.5, raw=None, parts={}),
    "task failed": TaskFailed(request=KEY, error="KeyError", message="'x'"),
    "episode lost": EpisodeLost(request=KEY, message="killed"),
    "encoded": TrajectoryEncoded(request=KEY, value=b"v", headers=(), sha256="0" * 64),
    "too large": TrajectoryEncoded(
        request=KEY, value=bytes(VALUE_BYTES_MAX + 1), headers=(), sha256="0" * 64
    ),
    "encode failed": EncodeFailed(request=KEY, message="log-prob is not <= 0"),
    "exported": EngineExported(request=KEY, kv=None),
    "exported with kv": EngineExported(request=KEY, kv=KV),
    "kv put": KvPut(request=KEY, blob=BLOB),
    "kv not put": KvPut(request=KEY, blob=None, why="no room"),
    "kv fetched": KvFetched(request=KEY, kv=KV),
    "kv not fetched": KvFetched(request=KEY, kv=None, why="another digest"),
    "chunk": ProgressEncoded(request=KEY, value=b"p"),
    "trajectory there": Published(tag=f"t:{KEY}", topic="r.trajectories", partition=0, offset=4),
    "chunk there": Published(tag=f"p:{KEY}", topic="r.progress", partition=0, offset=4),
}


def fresh(resume: Resume | None = None, kv: Blob | None = None) -> Requests:
    requests = Requests(setup_of(epoch=9, stop_timeout_ns=10**9))
    requests.versions = frozenset({0})
    place = PlacedRequest(
        reason="t",
        spec=spec_of(0),
        trajectory=TRAJECTORY,
        sibling=0,
        attempt=1,
        worker="w0",
        epoch=9,
        resume=resume,
        kv=kv,
    )
    requests.place(place, NOW)
    return requests


def give(requests: Requests, *names: str) -> None:
    for name in names:
        event = EVENTS[name]
        if isinstance(event, Published):
            requests.handle_published(event, NOW)
        else:
            requests.handle(event, NOW)


def running(*, episode: bool = False) -> Requests:
    requests = fresh()
    give(requests, "episode" if episode else "prompted")
    requests.fill(0)
    give(requests, "started")
    return requests


def resuming() -> Requests:
    requests = fresh(RESUME)
    give(requests, "prompted")
    return requests


def after(requests: Requests, *names: str) -> Requests:
    give(requests, *names)
    return requests


def leaving() -> Requests:
    requests = after(running(), "tokens")
    requests.leave()
    return requests


def moving(*names: str) -> Requests:
    requests = running()
    requests.move(TRAJECTORY, 1, NOW)
    return after(requests, *names)


def waiting() -> Requests:
    return after(fresh(), "prompted")


MAKE: dict[str, Callable[[], Requests]] = {
    "PROMPTING": fresh,
    "RESUMING": resuming,
    "WAITING": waiting,
    "RUNNING": running,
    "ENVIRONMENT": lambda: after(running(episode=True), "tokens", "stopped"),
    "REWARDING": lambda: after(running(), "tokens", "stopped"),
    "ENCODING": lambda: after(running(), "tokens", "stopped", "rewarded"),
    "LOGGING": lambda: after(running(), "tokens", "stopped", "rewarded", "encoded"),
    "LEAVING": leaving,
    "FETCHING": lambda: after(fresh(RESUME, BLOB), "prompted", "chain"),
    "EXPORTING": lambda: moving("tokens"),
    "RELEASING": lambda: moving("tokens", "exported with kv"),
}


def state_of(requests: Requests) -> Any:
    """All that a refused event must not change."""
    request = requests.by_key.get(KEY)
    plain = {
        name: deepcopy(value)
        for name, value in vars(requests).items()
        if name not in ("by_key", "counts", "out", "setup", "_phases", "off_engine")
    }
    plain["off_engine"] = len(requests.off_engine)
    fields = {}
    if request is not None:
        names = [name for name in RequestState.__dataclass_fields__ if name != "sequence"]
        fields = {name: deepcopy(getattr(request, name)) for name in names}
        fields["tokens"] = list(request.sequence.token_ids)
        fields["segments"] = list(request.sequence.segments)
    return (
        plain,
        fields,
        list(requests.by_key),
        {k: v for k, v in vars(requests)["_phases"].items() if v},
    )
