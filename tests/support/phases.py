"""A request of a worker in every phase, and every event that a port may bring."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from dora_pipe.producers.effects import (
    EncodeFailed,
    EngineExported,
    EngineStarted,
    KvFetched,
    KvPut,
    Observed,
    ProgressEncoded,
    ProgressFetched,
    Prompted,
    TrajectoryEncoded,
)
from dora_pipe.producers.engines.port import Kv, RequestFinished, TokensSampled
from dora_pipe.producers.moves import move
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import Row
from dora_pipe.producers.tasks.calls import EpisodeLost, Rewarded, TaskFailed
from dora_pipe.producers.transitions import VALUE_BYTES_MAX, take, take_published
from dora_pipe.runtime import Now, Published
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.rounds import PlacedRequest
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
    "prompted": Prompted(request=KEY, token_ids=[5, 6], episode=False),
    "episode": Prompted(request=KEY, token_ids=[5, 6], episode=True),
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
    "observed": Observed(request=KEY, token_ids=[8], done=False, tool="", ok=True),
    "done": Observed(request=KEY, token_ids=[8], done=True, tool="", ok=True),
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
    book = Requests(setup_of(epoch=9, stop_timeout_ns=10**9))
    book.versions = frozenset({0})
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
    book.place(place, NOW)
    return book


def give(book: Requests, *names: str) -> None:
    for name in names:
        event = EVENTS[name]
        if isinstance(event, Published):
            take_published(book, event, NOW)
        else:
            take(book, event, NOW)


def running(*, episode: bool = False) -> Requests:
    book = fresh()
    give(book, "episode" if episode else "prompted")
    book.fill(0)
    give(book, "started")
    return book


def resuming() -> Requests:
    book = fresh(RESUME)
    give(book, "prompted")
    return book


def after(book: Requests, *names: str) -> Requests:
    give(book, *names)
    return book


def leaving() -> Requests:
    book = after(running(), "tokens")
    book.leave()
    return book


def moving(*names: str) -> Requests:
    book = running()
    move(book, TRAJECTORY, 1, NOW)
    return after(book, *names)


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


def state_of(book: Requests) -> Any:
    """All that a refused event must not change."""
    row = book.rows.get(KEY)
    plain = {
        name: deepcopy(value)
        for name, value in vars(book).items()
        if name not in ("rows", "counts", "out", "setup", "_phases")
    }
    fields = {}
    if row is not None:
        names = [name for name in Row.__dataclass_fields__ if name != "sequence"]
        fields = {name: deepcopy(getattr(row, name)) for name in names}
        fields["tokens"] = list(row.sequence.token_ids)
        fields["segments"] = list(row.sequence.segments)
    return plain, fields, list(book.rows), {k: v for k, v in vars(book)["_phases"].items() if v}
