"""Checks of progress records of requests that another worker began."""

from __future__ import annotations

from collections.abc import Sequence

from dora_pipe.producers.worker.sequence import TokenSequence
from dora_pipe.producers.worker.session import CallKey, Session
from dora_pipe.schemas.contexts import prompt_digest
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import EpisodeProgress, Progress, TurnProgress
from dora_pipe.schemas.trajectory_codec import AnyProgress


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
