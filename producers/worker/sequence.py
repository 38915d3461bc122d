"""The sequence that the pieces of a request become; decides nothing.

Tokens are kept as they were sampled and never made again from text. What an environment says is
appended behind them, with mask 0. Every stretch of tokens that one worker sampled in one go is a
segment of its own, so that a request that went on elsewhere shows where.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from dora_pipe.schemas.routes import GrowingRoutes, Routes
from dora_pipe.schemas.trajectory import (
    EpisodeProgress,
    Progress,
    Segment,
    SegmentKind,
    turns_of,
)

NOT_SAMPLED: Final = array("f", [float("nan")])
"""The log-prob of a token that was given."""


class Exchange(NamedTuple):
    """A turn of the model that was answered, as token ids."""

    turn: int
    said: list[int]
    answer: list[int]
    tool: str
    ok: bool


class TokenSequence:
    """The growing sequence of one request; of a finished session its contexts, in order.

    Example: ``s = TokenSequence([5, 6], at_ns=1)``, then per stay in a slot ``s.start_stay(2)``,
    ``s.sampled([7], [-0.5], [-0.5])``, ``s.end_stay(3, worker="w0", epoch=4, version=1)``.

    Its arrays go into a record as they lie here: no token becomes an object again.
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
        """NaN for what was given."""
        self.sampler_logprobs = array("f")
        self.loss_mask = bytearray()
        self.segments: list[Segment] = []
        self.prefills: list[int] = []
        """Lengths of the sequence at which a KV cache was filled by prefill."""
        self.routes = GrowingRoutes()
        """Of a mixture's tokens, where they are asked for."""
        self.sampled_tokens = 0
        self.prompt_tokens = len(prompt)
        self._turn = 0
        self._stay_start = 0
        self._stay_start_ns = 0
        self._given("prompt", prompt, at_ns, at_ns)

    def __len__(self) -> int:
        return len(self.token_ids)

    def resume(self, chunks: Sequence[Progress]) -> None:
        """Take over what earlier stays sampled; `chunks` are a whole chain, oldest first.

        Their segments end where they started, in time: a chunk does not say when it ended.
        """
        assert self.sampled_tokens == 0 and chunks[0].start == 0
        for chunk in chunks:
            start = len(self.token_ids)
            self.sampled(
                chunk.token_ids, chunk.logprobs, chunk.sampler_logprobs, chunk.routed_experts
            )
            last = self.segments[-1]
            made_by = (chunk.worker, chunk.epoch, chunk.version)
            if last.kind == "model" and (last.worker, last.epoch, last.version) == made_by:
                start = self.segments.pop().start
            self._segment(
                "model",
                start,
                chunk.started_ns,
                chunk.started_ns,
                worker=chunk.worker,
                epoch=chunk.epoch,
                version=chunk.version,
            )
        self.prefills = list(chunks[-1].prefills)

    @classmethod
    def restored(cls, parts: Sequence[EpisodeProgress]) -> TokenSequence:
        """The sequence of an episode; `parts` are a whole chain, oldest first."""
        made = cls((), at_ns=0)
        made.segments.clear()
        for part in parts:
            made._append(part)
        made.prefills = list(parts[-1].prefills)
        made.prompt_tokens = made.segments[0].end
        made._turn = made.segments[-1].turn
        return made

    def _append(self, part: EpisodeProgress) -> None:
        start, first = len(self.token_ids), part.segments[0]
        self.token_ids.extend(part.token_ids)
        self.logprobs.frombytes(np.asarray(part.logprobs, np.float32).tobytes())  # None is NaN.
        self.sampler_logprobs.frombytes(np.asarray(part.sampler_logprobs, np.float32).tobytes())
        self.loss_mask.extend(part.loss_mask)
        self.routes.add(part.routed_experts, len(self.token_ids))
        self.sampled_tokens += sum(part.loss_mask)
        for one in part.segments:
            begin = start + one.start
            if one is first and self.segments and _same_stay(self.segments[-1], one):
                begin = self.segments.pop().start
            self.segments.append(msgspec.structs.replace(one, start=begin, end=start + one.end))

    def part(self, sampled: int, **made_by: Any) -> tuple[int, list[Segment]]:
        """What one version has sampled behind the first `sampled` sampled tokens, with all that
        stands before it and in between: (start, segments counted from there).

        `made_by` (worker, epoch, version) is of the present stay, if there is one.
        """
        start = self._after(sampled)
        found: list[Segment] = []
        models = 0  # of `found`, up to the last segment of the model
        for one in self._segments_from(start, made_by):
            if one.kind == "model":
                if models and one.version != found[models - 1].version:
                    break
                models = len(found) + 1
            begin, end = max(one.start, start) - start, one.end - start
            found.append(msgspec.structs.replace(one, start=begin, end=end))
        return start, found[:models]

    def _segments_from(self, start: int, made_by: dict[str, Any]) -> Iterator[Segment]:
        """Those that reach beyond a place, the present stay last."""
        for one in self.segments:
            if one.end > start or (_is_answer(one) and one.start == start):  # It may be empty.
                yield one
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
        """Length of the sequence when so many tokens had been sampled; 0 for none."""
        left = sampled
        if not left:
            return 0
        for one in self.segments:
            if one.kind == "model":
                if left <= one.end - one.start:
                    return one.start + left
                left -= one.end - one.start
        return self._stay_start + left

    @property
    def in_stay(self) -> bool:
        """Whether its last tokens were sampled in a stay that has not ended."""
        return len(self.token_ids) > self.segments[-1].end

    def answered(self, place: int) -> bool:
        """Whether what was answered to the model begins at this place."""
        return any(_is_answer(one) and one.start == place for one in self.segments)

    def exchanges(self) -> list[Exchange]:
        """Every turn of the model that was answered, in order."""
        found: list[Exchange] = []
        said: list[int] = []
        for one in self.segments[1:]:
            ids = self.token_ids[one.start : one.end].tolist()
            if one.kind == "model":
                said += ids
            else:
                found.append(Exchange(one.turn, said, ids, one.tool, one.ok))
                said = []
        return found

    def cut(self) -> bool:
        """Forget what was answered to the last turn of the model, and stays without a token;
        whether there was an answer."""
        answered = False
        while len(self.segments) > 1:
            last = self.segments[-1]
            if last.kind == "model" and last.end > last.start:
                break
            answered |= last.kind != "model"
            self.segments.pop()
        end, self._turn = self.segments[-1].end, self.segments[-1].turn
        del self.token_ids[end:], self.logprobs[end:], self.sampler_logprobs[end:]
        del self.loss_mask[end:]
        self.routes.cut(end)
        self.prefills = [one for one in self.prefills if one < end]
        return answered

    def start_stay(self, at_ns: int, *, imported: bool = False) -> None:
        """The sequence goes into a slot: everything so far is prefilled, or was `imported`."""
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
        """Append tokens that the policy sampled; the three arrays are of equal length. `routes` are
        of them and of what was given before them."""
        assert len(token_ids) == len(logprobs) == len(sampler_logprobs)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.sampler_logprobs.extend(sampler_logprobs)
        self.loss_mask.extend(b"\x01" * len(token_ids))
        self.routes.add(routes, len(self.token_ids))
        self.sampled_tokens += len(token_ids)

    def end_stay(self, at_ns: int, *, worker: str, epoch: int, version: int) -> None:
        """The sequence left its slot."""
        self._segment(
            "model",
            self._stay_start,
            self._stay_start_ns,
            at_ns,
            worker=worker,
            epoch=epoch,
            version=version,
        )

    def reload(self, at_ns: int, *, worker: str, epoch: int, version: int) -> None:
        """The weights change under the stay; `version` has sampled it so far."""
        if len(self.token_ids) > self._stay_start:  # else it is prefilled again at the same place
            self.end_stay(at_ns, worker=worker, epoch=epoch, version=version)
            self.start_stay(at_ns)

    def observed(
        self, token_ids: Sequence[int], *, asked_ns: int, at_ns: int, tool: str, ok: bool
    ) -> None:
        """Append what the environment or a tool answered; the next turn begins behind it."""
        kind: SegmentKind = "tool" if tool else "environment"
        self._given(kind, token_ids, asked_ns, at_ns, tool=tool, ok=ok)
        self._turn += 1

    def branch(self, token_ids: Sequence[int], *, at_ns: int) -> None:
        """Open another context, which begins with these tokens; its turns are counted anew."""
        self._turn = 0
        self._given("prompt", token_ids, at_ns, at_ns)

    @property
    def moves(self) -> int:
        """How often a stay began with the KV cache of the one before it: without a prefill."""
        prefilled = set(self.prefills)
        return sum(one.kind == "model" and one.start not in prefilled for one in self.segments)

    @property
    def turn_tokens(self) -> int:
        """Tokens of the present turn of the model that were sampled in stays which have ended."""
        mine = (one for one in self.segments if one.kind == "model" and one.turn == self._turn)
        return sum(one.end - one.start for one in mine)

    @property
    def turns_taken(self) -> int:
        """Turns of the model that an environment has answered."""
        return self._turn

    def answer(self) -> list[int]:
        """Token ids of the last turn of the model; empty before the first."""
        turns = [ids for kind, ids in turns_of(self.segments, self.token_ids) if kind == "model"]
        return turns[-1] if turns else []

    def turns(self) -> list[list[int]]:
        """Token ids of every turn but the prompt, in order; stays of one turn are one."""
        return [ids for _, ids in turns_of(self.segments, self.token_ids)]

    @property
    def versions(self) -> list[int]:
        """The versions that have sampled it, in order, each once."""
        return list(dict.fromkeys(one.version for one in self.segments if one.kind == "model"))

    def stretch(self, start: int, *, now: int) -> tuple[int, int]:
        """(version, end): one version has sampled [start, end), counted after the prompt.

        `now` is the version of the present stay. Only for sequences of a single turn.
        """
        at, version, end = self.prompt_tokens + start, now, len(self.token_ids)
        for segment in reversed(self.segments):
            if segment.kind != "model" or segment.end <= at:
                break
            if segment.version != version:
                version, end = segment.version, segment.end
        return version, end - self.prompt_tokens

    def sampled_from(self, start: int, end: int) -> tuple[list[int], list[float], list[float]]:
        """Sampled tokens [start, end), counted after the prompt, with both log-probs.

        Only for sequences of a single turn, whose tokens after the prompt are all sampled.
        """
        at = slice(self.prompt_tokens + start, self.prompt_tokens + end)
        logprobs, sampler_logprobs = self.logprobs[at], self.sampler_logprobs[at]
        return self.token_ids[at].tolist(), logprobs.tolist(), sampler_logprobs.tolist()

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
        epoch: int = -1,
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
                epoch=epoch,
                version=version,
                tool=tool,
                ok=ok,
            )
        )


def _is_answer(segment: Segment) -> bool:
    return segment.kind in ("environment", "tool")


def _same_stay(before: Segment, one: Segment) -> bool:
    """Whether a segment goes on with the one that stands before it."""
    return before.kind == one.kind == "model" and (
        (before.turn, before.start_ns, before.worker, before.epoch, before.version)
        == (one.turn, one.start_ns, one.worker, one.epoch, one.version)
    )
