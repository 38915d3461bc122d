"""Progress records of requests that another worker began."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.errors import BusError, SchemaError, reason
from dora_pipe.core.loop.effect_runner import attempt
from dora_pipe.core.loop.retry import FINAL_ERRORS
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.worker.effects import FetchProgress, ProgressFetched
from dora_pipe.producers.worker.sequence import TokenSequence
from dora_pipe.producers.worker.session import CallKey, Session
from dora_pipe.schemas.contexts import prompt_digest
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import EpisodeProgress, Progress, TurnProgress
from dora_pipe.schemas.trajectory_codec import AnyProgress, decode_any_progress

CHAIN_MAX: Final = 4096

CHAIN_TIMEOUT_NS: Final = 10_000_000_000


def chain_error(
    chunks: Sequence[AnyProgress],
    *,
    trajectory: str,
    version: int,
    digest: str,
    tokens: int,
    newest: int | None = None,
) -> str | None:
    """Return why these chunks, oldest first, are not the first `tokens` tokens of the request.

    Runs that mix versions allow later ones up to `newest`, ascending. Positions count from the
    start of the sequence in episodes, else from the end of the prompt.
    """
    if not chunks:
        return "no progress record found"
    at = sampled = 0
    for chunk in chunks:
        if isinstance(chunk, TurnProgress):
            return "the chain contains a call of an agent"
        if type(chunk) is not type(chunks[0]):
            return "the chain mixes records with and without an episode"
        if chunk.trajectory != trajectory:
            return f"a progress record of {chunk.trajectory} is in the chain of {trajectory}"
        later = newest is not None and version < chunk.version <= newest
        if not later and (chunk.version, chunk.digest) != (version, digest):
            return f"a progress record was made by version {chunk.version}, not {version}"
        version, digest = chunk.version, chunk.digest
        if chunk.start != at:
            return f"a progress record starts at token {chunk.start}, not {at}"
        if not _alike(chunks[0].routed_experts, chunk.routed_experts):
            return "the progress records are of models with other experts"
        at += len(chunk.token_ids)
        sampled += sum(chunk.loss_mask) if isinstance(chunk, EpisodeProgress) else at - chunk.start
    if sampled != tokens:
        return f"the progress records reach {sampled} tokens, not {tokens}"
    return None


def _alike(one: Routes | None, other: Routes | None) -> bool:
    return other is None if one is None else other is not None and one.alike(other)


def prompt_error(chunks: Sequence[AnyProgress], prompt_tokens: int) -> str | None:
    """Return why the routed experts belong to another prompt."""
    first = chunks[0]
    routes = first.routed_experts if isinstance(first, Progress) else None
    if routes is None or routes.tokens == prompt_tokens + len(first.token_ids):
        return None
    return f"a progress record has experts of {routes.tokens} tokens"


def sequence_of(chunks: Sequence[AnyProgress]) -> TokenSequence | str:
    """Return the sequence of a valid chain, or why its segments are invalid."""
    parts = [one for one in chunks if isinstance(one, EpisodeProgress)]
    kinds = [one.kind for part in parts for one in part.segments]
    if kinds[:1] != ["prompt"] or "prompt" in kinds[1:] or "model" not in kinds:
        return "the progress records do not begin with one prompt"
    for part in parts:
        samplers = {one.version for one in part.segments if one.kind == "model"}
        if part.segments[-1].kind != "model" or samplers != {part.version}:
            return f"the record from token {part.start} on is not of version {part.version}"
    return TokenSequence.restored(parts)


def session_of(
    chunks: Sequence[AnyProgress],
    *,
    trajectory: str,
    version: int,
    digest: str,
    tokens: int,
) -> Session | str:
    """Return the session of these calls, oldest first, or why they are not its first `tokens`
    tokens."""
    session = Session()
    if not chunks:
        return "no progress record found"
    for at, chunk in enumerate(chunks):
        if not isinstance(chunk, TurnProgress):
            return "the chain contains a record that is no agent call"
        if chunk.trajectory != trajectory:
            return f"a progress record of {chunk.trajectory} is in the chain of {trajectory}"
        if (chunk.version, chunk.digest) != (version, digest):
            return f"a progress record was made by version {chunk.version}, not {version}"
        if chunk.turn != at:
            return f"a progress record is of call {chunk.turn}, not {at}"
        why = session.tree.add(chunk)
        if why:
            return why
        name = CallKey(prompt_digest(session.tree.prompt(at)), chunk.call.occurrence)
        if name in session.answers:
            return f"call {at} was answered before"
        session.answers[name] = at
    if session.tokens_logged != tokens:
        return f"the progress records reach {session.tokens_logged} tokens, not {tokens}"
    return session


@dataclass(slots=True, kw_only=True)
class Reading:
    """Records of one partition, read one by one for a request."""

    request: str
    tp: TopicPartition
    wanted: int
    until_ns: int
    reader: Reader | None = None

    def read(self, bus: Bus) -> Record | None:
        """Return the first record from the wanted offset, if available."""
        try:
            if self.reader is None:
                self.reader = bus.reader({self.tp: self.wanted})
            self.reader.seek(self.tp, self.wanted)
            records = self.reader.poll(timeout_s=0.0, records_max=1)
        except FINAL_ERRORS:
            raise
        except BusError:
            return None
        return records[0] if records else None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


@dataclass(slots=True, kw_only=True)
class _Chain(Reading):
    found: list[AnyProgress] = field(default_factory=list)


class ProgressPort:
    """Reads chains of progress records back to their start; a broken chain is empty."""

    effects: tuple[type, ...] = (FetchProgress,)

    def __init__(self, bus: Bus, topic: str, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._meter = meter
        self._clock = clock
        self._chains: deque[_Chain] = deque()

    def start(self, effect: FetchProgress) -> None:
        chain = _Chain(
            request=effect.request,
            tp=TopicPartition(self._topic, effect.resume.partition),
            wanted=effect.resume.offset,
            until_ns=self._clock.now_ns() + CHAIN_TIMEOUT_NS,
        )
        self._chains.append(chain)

    def poll(self) -> list[Any]:
        if not self._chains:
            return []
        chain = self._chains.popleft()
        events = list(attempt("FetchProgress", partial(self._next, chain), partial(_lost, chain)))
        if events:
            chain.close()
        else:
            self._chains.append(chain)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._chains)

    def close(self) -> None:
        while self._chains:
            self._chains.popleft().close()

    def _next(self, chain: _Chain) -> Iterator[ProgressFetched]:
        with self._meter.spend("bus"):
            record = chain.read(self._bus)
        if record is None:
            if self._clock.now_ns() >= chain.until_ns:
                yield _broken(chain, "timed out reading it")
        elif record.offset != chain.wanted:
            yield _broken(chain, f"there is no record at offset {chain.wanted}")
        else:
            yield from self._add(chain, record)

    def _add(self, chain: _Chain, record: Record) -> Iterator[ProgressFetched]:
        try:
            with self._meter.spend("codec"):
                chunk = decode_any_progress(record.value)
        except SchemaError as error:
            yield _broken(chain, f"the record at offset {record.offset}: {error.message}")
            return
        chain.found.append(chunk)
        if chunk.previous < 0:
            yield ProgressFetched(request=chain.request, chunks=chain.found[::-1])
        elif chunk.previous >= chain.wanted or len(chain.found) >= CHAIN_MAX:
            yield _broken(chain, f"the record at offset {record.offset} names no earlier one")
        chain.wanted = chunk.previous


def _broken(chain: _Chain, why: str) -> ProgressFetched:
    return ProgressFetched(request=chain.request, chunks=(), why=why)


def _lost(chain: _Chain, error: Exception) -> list[ProgressFetched]:
    """Raises BusError: those of a chain were handled before."""
    if isinstance(error, BusError):
        raise error
    return [_broken(chain, reason(error))]
