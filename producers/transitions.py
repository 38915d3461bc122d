"""Which event takes a request of a worker from which phase to which.

    place -> PROMPTING -> (RESUMING) -> WAITING -> RUNNING -> REWARDING -> ENCODING -> LOGGING
          -> gone (and reported, with all others of the same turn)
    several turns: RUNNING -> ENVIRONMENT -> WAITING -> RUNNING -> ...
    the worker leaves: RUNNING -> LEAVING (its last progress record) -> gone
    it came with a KV cache: RESUMING -> FETCHING -> WAITING
    it moves: RUNNING -> EXPORTING -> RELEASING -> gone; see `moves`

`_TABLE` and `_ACKNOWLEDGED` are all there is. An event of a request that is not here belongs to one
that was dropped and is ignored; an event that its phase does not know is refused. Both are counted
and change nothing.

A request in ENVIRONMENT holds no slot and no KV cache: its next turn prefills everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from dora_pipe.bus.port import Append
from dora_pipe.producers.effects import (
    EncodeFailed,
    EngineExported,
    EngineStarted,
    FetchProgress,
    KvFetched,
    KvPut,
    Observed,
    ProgressEncoded,
    ProgressFetched,
    Prompted,
    StepEnvironment,
    TrajectoryEncoded,
)
from dora_pipe.producers.engines.port import RequestFinished, TokensSampled
from dora_pipe.producers.moves import (
    exported,
    fetch,
    fetched,
    handed_over,
    left_behind,
    started,
    take_leave,
)
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import ANY_VERSION, Phase, Row
from dora_pipe.producers.sequence import TokenSequence, chain_error
from dora_pipe.producers.tasks.calls import EpisodeLost, Rewarded, TaskFailed
from dora_pipe.runtime import Now, Publish, Published
from dora_pipe.schemas.control import FinishReason, Resume

EPISODE_RESTARTS_MAX: Final = 3
"""Times a request starts again here because its environment died; then it fails."""

VALUE_BYTES_MAX: Final = 64 * 1024 * 1024
"""No reader decodes a larger one. What is above the topic's own limit lies beside the log."""

TRAJECTORY_TAG: Final = "t:"
PROGRESS_TAG: Final = "p:"
"""Tags of what a request publishes; its key follows."""

Handler = Callable[[Requests, Row, Any, Now], None]


def take(book: Requests, event: Any, now: Now) -> None:
    """Take an event of a port to the request that it names."""
    _take(book, event.request, type(event), _TABLE, event, now)


def take_published(book: Requests, event: Published, now: Now) -> None:
    """Take an acknowledgement to the request that its tag names."""
    _take(book, event.tag[2:], event.tag[:2], _ACKNOWLEDGED, event, now)


def _take(
    book: Requests,
    key: str,
    kind: Any,
    table: dict[tuple[Phase, Any], Handler],
    event: Any,
    now: Now,
) -> None:
    row = book.rows.get(key)
    if row is None:
        book.counts["ignored"] += 1
        if isinstance(event, KvPut):
            left_behind(book, event)
        return
    handler = table.get((row.phase, kind))
    if handler is None:
        book.counts["refused"] += 1
        return
    handler(book, row, event, now)


# PROMPTING


def _prompted(book: Requests, row: Row, event: Prompted, now: Now) -> None:
    tokens, context_tokens = len(event.token_ids), book.setup.context_tokens
    if not 1 <= tokens < context_tokens:
        message = f"a prompt of {tokens} tokens does not fit a context of {context_tokens}"
        book.give_up(row, now, "PromptUnfit", message, retryable=False)
        return
    row.sequence = TokenSequence(event.token_ids, at_ns=now.wall_ns)
    row.episode = event.episode
    if row.resume is None or row.episode:
        row.resume = None
        book.wait(row)
        return
    book.enter(row, Phase.RESUMING)
    book.out.effects.append(FetchProgress(request=row.key, resume=row.resume))


def _prompt_failed(book: Requests, row: Row, event: TaskFailed, now: Now) -> None:
    book.give_up(row, now, event.error, event.message, retryable=False)


# RESUMING


def _resumed(book: Requests, row: Row, event: ProgressFetched, now: Now) -> None:
    assert row.resume is not None
    spec = row.place.spec
    why = event.why or chain_error(
        event.chunks,
        trajectory=row.place.trajectory,
        version=spec.version,
        digest=spec.digest,
        tokens=row.resume.tokens,
        newest=book.hosted.version if row.pin == ANY_VERSION else None,
    )
    if why:
        book.counts["progress unusable"] += 1
        row.resume = None
        book.wait(row)
        return
    row.sequence.resume(event.chunks)
    row.weights |= {chunk.version: chunk.digest for chunk in event.chunks}
    row.first_token_ns = event.chunks[0].started_ns
    row.chunk_end = row.resume.tokens
    finish = _finish_of(row, book.setup.context_tokens)
    if finish is None:
        fetch(book, row)
    else:
        book.ended(row, finish, now)


def _finish_of(row: Row, context_tokens: int) -> FinishReason | None:
    """How a resumed request had ended already, so that no slot may sample behind its end."""
    sequence, params = row.sequence, row.params
    if sequence.token_ids[-1] in params.stop_ids:
        return "stop"
    if sequence.sampled_tokens >= params.max_tokens or len(sequence) >= context_tokens:
        return "length"
    return None


# RUNNING


def _sampled(book: Requests, row: Row, event: TokensSampled, now: Now) -> None:
    row.sequence.sampled(event.token_ids, event.logprobs, event.sampler_logprobs)
    book.tokens_total += len(event.token_ids)
    if row.first_token_ns is None:
        row.first_token_ns = event.first_token_ns
    if not row.episode:
        book.grown(row)


def _finished(book: Requests, row: Row, event: RequestFinished, now: Now) -> None:
    setup = book.setup
    row.sequence.end_stay(
        now.wall_ns, worker=setup.worker, epoch=setup.epoch, version=row.hosted.version
    )
    if event.reason == "error":
        book.broken(row, event.error or "the engine gave no reason", now)
    elif row.episode and event.reason == "stop":
        book.enter(row, Phase.ENVIRONMENT)
        row.asked_ns = now.wall_ns
        answer = row.sequence.answer()
        book.out.effects.append(StepEnvironment(request=row.key, token_ids=answer))
    else:
        book.ended(row, event.reason, now)


def _chunk_encoded(book: Requests, row: Row, event: ProgressEncoded, now: Now) -> None:
    append = Append(
        topic=book.setup.topics.progress,
        partition=row.place.spec.partition,
        key=row.place.trajectory.encode(),
        value=event.value,
    )
    book.out.publish.append(Publish(record=append, tag=PROGRESS_TAG + row.key))


def _chunk_needless(book: Requests, row: Row, event: ProgressEncoded, now: Now) -> None:
    """The request finished while its progress was encoded: nobody will ever go on from there."""
    book.counts["progress needless"] += 1


def _chunk_published(book: Requests, row: Row, event: Published, now: Now) -> None:
    row.resume = Resume(tokens=row.chunk_end, partition=event.partition, offset=event.offset)
    row.chunk_open = False
    if row.phase is Phase.LEAVING:
        book.last_chunk(row)
    elif row.phase is Phase.RELEASING:
        take_leave(book, row, now)
    elif row.phase is Phase.RUNNING:
        book.grown(row)


# ENVIRONMENT


def _observed(book: Requests, row: Row, event: Observed, now: Now) -> None:
    """What does not fit the context is not appended; unless it is the end, it ends by length."""
    sequence, setup = row.sequence, book.setup
    fits = len(sequence) + len(event.token_ids) <= setup.context_tokens
    if fits:
        sequence.observed(
            event.token_ids,
            asked_ns=row.asked_ns,
            at_ns=now.wall_ns,
            tool=event.tool,
            ok=event.ok,
        )
    full = not fits or len(sequence) >= setup.context_tokens
    spent = sequence.sampled_tokens >= row.params.max_tokens
    if event.done:
        book.ended(row, "environment", now)
    elif full or spent or sequence.turns_taken >= setup.turns_max:
        book.ended(row, "length", now)
    else:
        book.wait(row)


def _environment_failed(book: Requests, row: Row, event: TaskFailed, now: Now) -> None:
    book.broken(row, f"{event.error}: {event.message}", now)


def _episode_lost(book: Requests, row: Row, event: EpisodeLost, now: Now) -> None:
    """Nothing of the episode was kept anywhere, so the request starts again from its prompt."""
    if not book.keeps(row):
        book.hand_back(row, now)
    elif row.restarts >= EPISODE_RESTARTS_MAX:
        book.give_up(row, now, "EpisodeLost", event.message, retryable=True)
    else:
        book.counts["episodes started again"] += 1
        book.start_again(row)


# REWARDING


def _rewarded(book: Requests, row: Row, event: Rewarded, now: Now) -> None:
    if math.isfinite(event.reward):
        row.reward, row.reward_raw = event.reward, event.raw
        row.reward_parts = dict(event.parts)
    else:
        row.reward_error = f"NoAnswer: the reward is {event.reward}"
    row.rewarded_ns = now.wall_ns
    book.encode(row)


def _reward_failed(book: Requests, row: Row, event: TaskFailed, now: Now) -> None:
    row.reward_error = f"{event.error}: {event.message}"
    row.rewarded_ns = now.wall_ns
    book.encode(row)


# ENCODING, LOGGING


def _encoded(book: Requests, row: Row, event: TrajectoryEncoded, now: Now) -> None:
    if len(event.value) > VALUE_BYTES_MAX:
        message = f"a trajectory of {len(event.value)} bytes is above {VALUE_BYTES_MAX}"
        book.give_up(row, now, "RecordTooLarge", message, retryable=False)
        return
    row.sha256, row.value_bytes = event.sha256, len(event.value)
    append = Append(
        topic=book.setup.topics.trajectories,
        partition=row.place.spec.partition,
        key=row.place.spec.group.encode(),
        value=event.value,
        headers=event.headers,
    )
    book.enter(row, Phase.LOGGING)
    book.out.publish.append(Publish(record=append, tag=TRAJECTORY_TAG + row.key))


def _encode_failed(book: Requests, row: Row, event: EncodeFailed, now: Now) -> None:
    book.give_up(row, now, "SchemaError", event.message, retryable=False)


def _logged(book: Requests, row: Row, event: Published, now: Now) -> None:
    book.logged(row, event.offset)


_FINISHED: Final = (Phase.REWARDING, Phase.ENCODING, Phase.LOGGING)

_TABLE: Final[dict[tuple[Phase, Any], Handler]] = {
    (Phase.PROMPTING, Prompted): _prompted,
    (Phase.PROMPTING, TaskFailed): _prompt_failed,
    (Phase.PROMPTING, EpisodeLost): _episode_lost,
    (Phase.RESUMING, ProgressFetched): _resumed,
    (Phase.FETCHING, KvFetched): fetched,
    (Phase.WAITING, EngineStarted): started,
    (Phase.WAITING, EpisodeLost): _episode_lost,
    (Phase.RUNNING, TokensSampled): _sampled,
    (Phase.RUNNING, RequestFinished): _finished,
    (Phase.RUNNING, ProgressEncoded): _chunk_encoded,
    (Phase.RUNNING, EncodeFailed): _encode_failed,
    (Phase.RUNNING, EpisodeLost): _episode_lost,
    (Phase.ENVIRONMENT, Observed): _observed,
    (Phase.ENVIRONMENT, TaskFailed): _environment_failed,
    (Phase.ENVIRONMENT, EpisodeLost): _episode_lost,
    (Phase.REWARDING, Rewarded): _rewarded,
    (Phase.REWARDING, TaskFailed): _reward_failed,
    (Phase.REWARDING, EpisodeLost): _episode_lost,
    (Phase.ENCODING, TrajectoryEncoded): _encoded,
    (Phase.ENCODING, EncodeFailed): _encode_failed,
    (Phase.EXPORTING, TokensSampled): _sampled,
    (Phase.EXPORTING, RequestFinished): _finished,
    (Phase.EXPORTING, EngineExported): exported,
    (Phase.EXPORTING, ProgressEncoded): _chunk_encoded,
    (Phase.EXPORTING, EncodeFailed): _encode_failed,
    (Phase.RELEASING, KvPut): handed_over,
    (Phase.RELEASING, ProgressEncoded): _chunk_encoded,
    (Phase.RELEASING, EncodeFailed): _encode_failed,
    (Phase.LEAVING, ProgressEncoded): _chunk_encoded,
    (Phase.LEAVING, EncodeFailed): _encode_failed,
    **{(phase, ProgressEncoded): _chunk_needless for phase in _FINISHED},
}

_ACKNOWLEDGED: Final[dict[tuple[Phase, Any], Handler]] = {
    (Phase.LOGGING, TRAJECTORY_TAG): _logged,
    (Phase.RUNNING, PROGRESS_TAG): _chunk_published,
    (Phase.LEAVING, PROGRESS_TAG): _chunk_published,
    (Phase.EXPORTING, PROGRESS_TAG): _chunk_published,
    (Phase.RELEASING, PROGRESS_TAG): _chunk_published,
    **{(phase, PROGRESS_TAG): _chunk_published for phase in _FINISHED},
}

REQUEST_EVENTS: Final = tuple(dict.fromkeys(kind for _, kind in _TABLE))
"""The events that `take` takes."""
