"""Token sequence of a request.

Sampled tokens are never rebuilt from text. Each stay in a slot is a segment, so that moves stay
visible.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from dora_pipe.schemas.routes import GrowingRoutes, Routes
from dora_pipe.schemas.trajectory import (
    Progress,
    Segment,
    SegmentKind,
    TurnProgress,
    turns_of,
)
from dora_pipe.schemas.trajectory_codec import AnyProgress

NOT_SAMPLED: Final = array("f", [float("nan")])


class Exchange(NamedTuple):
    """Answered model turn, as token ids."""

    turn: int
    said: list[int]
    answer: list[int]
    tool: str
    ok: bool


class TokenSequence:
    """Growing sequence of a request, or the contexts of a finished session.

    Example: ``s = TokenSequence([5, 6], at_ns=1)``, then per stay ``s.start_stay(2)``,
    ``s.sampled([7], [-0.5], [-0.5])``, ``s.end_stay(3, worker="w0", incarnation=4, version=1)``.
    """

    __slots__ = (
        "_stay_start",
        "_stay_start_ns",
        "_turn",
        "logprobs",
        "loss_mask",
        "prefills",
        "prompt_tokens",
        "routes",
        "sampled_tokens",
        "sampler_logprobs",
        "segments",
        "token_ids",
    )

    def __init__(self, prompt: Sequence[int], *, at_ns: int) -> None:
        self.token_ids = array("i")
        self.logprobs = array("f")
        """NaN for given tokens."""
        self.sampler_logprobs = array("f")
        self.loss_mask = bytearray()
        self.segments: list[Segment] = []
        self.prefills: list[int] = []
        """Sequence lengths at prefills."""
        self.routes = GrowingRoutes()
        self.sampled_tokens = 0
        self.prompt_tokens = len(prompt)
        self._turn = 0
        self._stay_start = 0
        self._stay_start_ns = 0
        self._given("prompt", prompt, at_ns, at_ns)

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def restored(cls, parts: Sequence[Progress]) -> TokenSequence:
        """Build a sequence from a full chain, oldest first."""
        sequence = cls((), at_ns=0)
        sequence.segments.clear()
        for part in parts:
            sequence._append(part)
        sequence.prefills = list(parts[-1].prefills)
        sequence.prompt_tokens = sequence.segments[0].end
        sequence._turn = sequence.segments[-1].turn
        return sequence

    def _append(self, part: Progress) -> None:
        start, first = len(self.token_ids), part.segments[0]
        self.token_ids.extend(part.token_ids)
        self.logprobs.frombytes(np.asarray(part.logprobs, np.float32).tobytes())  # None: NaN
        self.sampler_logprobs.frombytes(np.asarray(part.sampler_logprobs, np.float32).tobytes())
        self.loss_mask.extend(part.loss_mask)
        self.routes.add(part.routed_experts, len(self.token_ids))
        self.sampled_tokens += sum(part.loss_mask)
        for segment in part.segments:
            begin = start + segment.start
            if segment is first and self.segments and _same_stay(self.segments[-1], segment):
                begin = self.segments.pop().start
            self.segments.append(
                msgspec.structs.replace(segment, start=begin, end=start + segment.end)
            )

    def part(self, sampled: int, **made_by: Any) -> tuple[int, list[Segment]]:
        """Return (start, segments) of the next tokens of one version.

        They follow the first `sampled` sampled tokens, with given tokens in between. `made_by`
        (worker, incarnation, version) is the current stay.
        """
        start = self._after(sampled)
        segments: list[Segment] = []
        models = 0  # in `segments`, up to the last model segment
        for segment in self._segments_from(start, made_by):
            if segment.kind == "model":
                if models and segment.version != segments[models - 1].version:
                    break
                models = len(segments) + 1
            begin, end = max(segment.start, start) - start, segment.end - start
            segments.append(msgspec.structs.replace(segment, start=begin, end=end))
        return start, segments[:models]

    def _segments_from(self, start: int, made_by: dict[str, Any]) -> Iterator[Segment]:
        for segment in self.segments:
            if segment.end > start or (
                _is_answer(segment) and segment.start == start
            ):  # may be empty
                yield segment
        if self.in_stay:
            yield Segment(
                kind="model",
                start=self._stay_start,
                end=len(self.token_ids),
                turn=self._turn,
                start_ns=self._stay_start_ns,
                end_ns=self._stay_start_ns,
                **made_by,
            )

    def _after(self, sampled: int) -> int:
        remaining = sampled
        if not remaining:
            return 0
        for segment in self.segments:
            if segment.kind == "model":
                if remaining <= segment.end - segment.start:
                    return segment.start + remaining
                remaining -= segment.end - segment.start
        return self._stay_start + remaining

    @property
    def prompt(self) -> array[int]:
        return self.token_ids[: self.prompt_tokens]

    @property
    def in_stay(self) -> bool:
        return len(self.token_ids) > self.segments[-1].end

    def answered(self, position: int) -> bool:
        return any(_is_answer(segment) and segment.start == position for segment in self.segments)

    def exchanges(self) -> list[Exchange]:
        answered: list[Exchange] = []
        sampled: list[int] = []
        for segment in self.segments[1:]:
            ids = self.token_ids[segment.start : segment.end].tolist()
            if segment.kind == "model":
                sampled += ids
            else:
                answered.append(Exchange(segment.turn, sampled, ids, segment.tool, segment.ok))
                sampled = []
        return answered

    def start_stay(self, at_ns: int, *, imported: bool = False) -> None:
        """Enter a slot, with a prefill unless `imported`."""
        self._stay_start = len(self.token_ids)
        self._stay_start_ns = at_ns
        if not imported:
            self.prefills.append(self._stay_start)

    def sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        sampler_logprobs: Sequence[float],
        routes: Routes | None = None,
    ) -> None:
        """Append sampled tokens; `routes` also cover the given tokens before them."""
        assert len(token_ids) == len(logprobs) == len(sampler_logprobs)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.sampler_logprobs.extend(sampler_logprobs)
        self.loss_mask.extend(b"\x01" * len(token_ids))
        self.routes.add(routes, len(self.token_ids))
        self.sampled_tokens += len(token_ids)

    def end_stay(self, at_ns: int, *, worker: str, incarnation: int, version: int) -> None:
        self._segment(
            "model",
            self._stay_start,
            self._stay_start_ns,
            at_ns,
            worker=worker,
            incarnation=incarnation,
            version=version,
        )

    def reload(self, at_ns: int, *, worker: str, incarnation: int, version: int) -> None:
        """Change the weights; `version` sampled the stay so far."""
        if len(self.token_ids) > self._stay_start:  # else: prefilled again at the same position
            self.end_stay(at_ns, worker=worker, incarnation=incarnation, version=version)
            self.start_stay(at_ns)

    def observed(
        self, token_ids: Sequence[int], *, asked_ns: int, at_ns: int, tool: str, ok: bool
    ) -> None:
        kind: SegmentKind = "tool" if tool else "environment"
        self._given(kind, token_ids, asked_ns, at_ns, tool=tool, ok=ok)
        self._turn += 1

    def branch(self, token_ids: Sequence[int], *, at_ns: int) -> None:
        self._turn = 0
        self._given("prompt", token_ids, at_ns, at_ns)

    @property
    def moves(self) -> int:
        """Number of stays without a prefill."""
        prefilled = set(self.prefills)
        return sum(
            segment.kind == "model" and segment.start not in prefilled for segment in self.segments
        )

    @property
    def turn_tokens(self) -> int:
        """Tokens of the current turn in ended stays."""
        mine = (
            segment
            for segment in self.segments
            if segment.kind == "model" and segment.turn == self._turn
        )
        return sum(segment.end - segment.start for segment in mine)

    @property
    def turns_taken(self) -> int:
        return self._turn

    def answer(self) -> list[int]:
        turns = [ids for kind, ids in turns_of(self.segments, self.token_ids) if kind == "model"]
        return turns[-1] if turns else []

    def turns(self) -> list[list[int]]:
        """Return token ids per turn after the prompt."""
        return [ids for _, ids in turns_of(self.segments, self.token_ids)]

    @property
    def versions(self) -> list[int]:
        return list(
            dict.fromkeys(segment.version for segment in self.segments if segment.kind == "model")
        )

    def sampled_lists(self) -> tuple[list[int], list[float], list[float]]:
        """Return the tokens after the prompt, of one turn, with their log-probs."""
        span = slice(self.prompt_tokens, None)
        logprobs, sampler_logprobs = self.logprobs[span], self.sampler_logprobs[span]
        return self.token_ids[span].tolist(), logprobs.tolist(), sampler_logprobs.tolist()

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
        nothing = NOT_SAMPLED * len(token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(nothing)
        self.sampler_logprobs.extend(nothing)
        self.loss_mask.extend(bytes(len(token_ids)))
        self._segment(kind, start, start_ns, end_ns, tool=tool, ok=ok)

    def _segment(
        self,
        kind: SegmentKind,
        start: int,
        start_ns: int,
        end_ns: int,
        *,
        worker: str = "",
        incarnation: int = -1,
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
                incarnation=incarnation,
                version=version,
                tool=tool,
                ok=ok,
            )
        )


def _is_answer(segment: Segment) -> bool:
    return segment.kind in ("environment", "tool")


def _same_stay(before: Segment, after: Segment) -> bool:
    return before.kind == after.kind == "model" and (
        (before.turn, before.start_ns, before.worker, before.incarnation, before.version)
        == (after.turn, after.start_ns, after.worker, after.incarnation, after.version)
    )


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

    Runs that mix versions allow later ones up to `newest`, ascending.
    """
    if not chunks:
        return "no progress record found"
    position = sampled = 0
    for chunk in chunks:
        if isinstance(chunk, TurnProgress):
            return "the chain contains a call of an agent"
        if chunk.trajectory != trajectory:
            return f"a progress record of {chunk.trajectory} is in the chain of {trajectory}"
        later = newest is not None and version < chunk.version <= newest
        if not later and (chunk.version, chunk.digest) != (version, digest):
            return f"a progress record was made by version {chunk.version}, not {version}"
        version, digest = chunk.version, chunk.digest
        if chunk.start != position:
            return f"a progress record starts at token {chunk.start}, not {position}"
        if not _alike(chunks[0].routed_experts, chunk.routed_experts):
            return "the progress records are of models with other experts"
        position += len(chunk.token_ids)
        sampled += sum(chunk.loss_mask)
    if sampled != tokens:
        return f"the progress records reach {sampled} tokens, not {tokens}"
    return None


def _alike(first: Routes | None, other: Routes | None) -> bool:
    return other is None if first is None else other is not None and first.alike(other)


def sequence_of(chunks: Sequence[AnyProgress]) -> TokenSequence | str:
    """Return the sequence of a valid chain, or why its segments are invalid."""
    parts = [chunk for chunk in chunks if isinstance(chunk, Progress)]
    kinds = [segment.kind for part in parts for segment in part.segments]
    if kinds[:1] != ["prompt"] or "prompt" in kinds[1:] or "model" not in kinds:
        return "the progress records do not begin with one prompt"
    for part in parts:
        samplers = {segment.version for segment in part.segments if segment.kind == "model"}
        if part.segments[-1].kind != "model" or samplers != {part.version}:
            return f"the record from token {part.start} on is not of version {part.version}"
    return TokenSequence.restored(parts)
