"""How a request that changes its worker is let go here and taken up there, with its KV cache.

Let go: what runs leaves the engine with its KV cache (EXPORTING); then its last tokens go to the
progress topic and the cache to the handover, beside each other (RELEASING); when both are done,
`request released` says where they lie. What does not run is released at once, as it came.

Taken up: as every request that goes on from a progress record, with the cache fetched behind it
(FETCHING). A cache that is lost on any of these ways costs a prefill and is counted, with the
reason; the tokens are the same.

A request of several turns stays where it is: its environment lives here.
"""

from __future__ import annotations

from dora_pipe.producers.effects import (
    DropKv,
    EngineExport,
    EngineExported,
    EngineStarted,
    FetchKv,
    KvFetched,
    KvPut,
    PutKv,
)
from dora_pipe.producers.handover import label_of
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import MOVING, WAITING_PHASES, Phase, Row, key_of
from dora_pipe.producers.tasks.calls import Forget
from dora_pipe.runtime import Now
from dora_pipe.schemas.control import RequestReleased

# Letting go


def move(book: Requests, trajectory: str, attempt: int, now: Now) -> None:
    """A decision wants a request to go on elsewhere; one that is about to end here, ends here."""
    row = book.rows.get(key_of(trajectory, attempt))
    if row is not None and row.episode:
        book.counts["moves of episodes refused"] += 1
    elif row is not None and row.phase is Phase.RUNNING:
        book.enter(row, Phase.EXPORTING)
        book.out.effects.append(EngineExport(request=row.key))
    elif row is not None and row.phase in WAITING_PHASES:
        _release(book, row, now)
    elif row is not None and row.phase in MOVING:
        book.counts["moved twice"] += 1
    else:
        book.counts["moved too late"] += 1


def exported(book: Requests, row: Row, event: EngineExported, now: Now) -> None:
    """It is out of the engine. A request without a token of its own has nothing to go on from."""
    book.enter(row, Phase.RELEASING)
    sequence, kv = row.sequence, event.kv
    if kv is not None and sequence.sampled_tokens and kv.tokens == len(sequence) - 1:
        row.kv_open = True
        label = label_of(row.place.trajectory, sequence.token_ids)
        book.out.effects.append(PutKv(request=row.key, label=label, kv=kv))
    take_leave(book, row, now)


def handed_over(book: Requests, row: Row, event: KvPut, now: Now) -> None:
    """Its KV cache lies where another worker finds it, or was not kept."""
    row.kv_open, row.blob = False, event.blob
    if event.blob is None:
        book.counts[f"KV cache not handed over: {event.why}"] += 1
    take_leave(book, row, now)


def take_leave(book: Requests, row: Row, now: Now) -> None:
    """Release it, as soon as its tokens are durable and its KV cache is handed over."""
    if book.all_durable(row) and not row.kv_open:
        _release(book, row, now)


def left_behind(book: Requests, event: KvPut) -> None:
    """The KV cache of a request that was dropped while it was handed over."""
    if event.blob is not None:
        book.out.effects.append(DropKv(blob=event.blob))


def _release(book: Requests, row: Row, now: Now) -> None:
    setup, place = book.setup, row.place
    record = RequestReleased(
        at_ns=now.wall_ns,
        worker=setup.worker,
        epoch=setup.epoch,
        trajectory=place.trajectory,
        attempt=place.attempt,
        resume=row.resume,
        kv=row.blob if row.resume is not None else None,
        left_ns=now.wall_ns - (now.mono_ns - row.since_ns) if row.phase is Phase.RELEASING else 0,
    )
    book.say(place.trajectory, record)
    book.counts["released"] += 1
    book.let_go(row)
    if row.phase is Phase.PROMPTING:
        book.out.effects.append(Forget(request=row.key))
    book.gone(row)


# Taking up


def fetch(book: Requests, row: Row) -> None:
    """All its tokens are there: get the KV cache that belongs to them, if it has one."""
    if row.blob is None:
        book.wait(row)
        return
    book.enter(row, Phase.FETCHING)
    label = label_of(row.place.trajectory, row.sequence.token_ids)
    book.out.effects.append(FetchKv(request=row.key, label=label, blob=row.blob))


def fetched(book: Requests, row: Row, event: KvFetched, now: Now) -> None:
    """It waits for a slot, with its KV cache or without."""
    row.kv = event.kv
    if event.kv is None:
        row.blob = None
        book.counts[f"KV cache not fetched: {event.why}"] += 1
    book.wait(row)


def started(book: Requests, row: Row, event: EngineStarted, now: Now) -> None:
    """It has its slot; whatever it came with is used up."""
    book.run(row, event.at_ns, imported=event.imported)
    if event.imported:
        book.counts["KV caches imported"] += 1
    elif event.why:
        book.counts[f"KV cache not imported: {event.why}"] += 1
    if row.blob is not None:
        book.drop_kv(row)
