"""Checks of sampled tokens and agents' calls, without access to worker state.

An answer is identified by its trajectory, prompt, and number among equal prompts of a start of the
agent.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import Record
from dora_pipe.producers.engines.simulated import END_TOKEN, VOCABULARY, mix64
from dora_pipe.producers.worker.effects import AnswerCall
from dora_pipe.schemas.context_tokens import context_of
from dora_pipe.schemas.contexts import place_of, prompt_digest
from dora_pipe.schemas.identity import call_seed, group_of, trajectory_seed
from dora_pipe.schemas.rounds import GroupSpec
from dora_pipe.schemas.trajectory import Trajectory, TurnProgress
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory
from dora_pipe.sim.agents import AgentObserver

TOLERANCE: Final = 1e-4
"""The log stores 32-bit log-probs."""

Answered = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and tokens of an answer."""


@dataclass(slots=True)
class _Start:
    asked: Counter[str] = field(default_factory=Counter)
    seeds: set[int] = field(default_factory=set)
    answered: list[Answered] = field(default_factory=list)


class CallChecks(AgentObserver):
    """Checker that calls `wrong` with a check of `checks.CHECKS` and a description."""

    def __init__(self, wrong: Callable[[str, str], None]) -> None:
        self.counted: Counter[str] = Counter()
        self._wrong = wrong
        self._specs: dict[str, GroupSpec] = {}
        self._starts: dict[tuple[int, str], _Start] = {}
        self._durable: defaultdict[tuple[str, int], set[tuple[int, ...]]] = defaultdict(set)
        self._said: dict[tuple[str, int], tuple[int, ...]] = {}

    def dispatched(self, spec: GroupSpec) -> None:
        self._specs[spec.group] = spec

    def landed(self, record: Record, incarnation: int) -> None:
        """Check a progress or trajectory record."""
        progress = record.topic.endswith(".progress")
        if progress and not self._starts:
            return  # No agent has begun.
        try:
            decoded = (decode_any_progress if progress else decode_trajectory)(record.value)
        except SchemaError:
            return  # Garbage placed by a fault.
        if isinstance(decoded, TurnProgress):
            self._durable[decoded.trajectory, decoded.call.seed].add(tuple(decoded.token_ids))
        elif isinstance(decoded, Trajectory):
            self._trajectory(decoded, incarnation)

    def began(self, incarnation: int, request: str) -> None:
        self._starts[incarnation, request] = _Start()

    def asked(self, incarnation: int, request: str, prompt: Sequence[int]) -> None:
        self._starts[incarnation, request].asked[prompt_digest(prompt)] += 1

    def refused(self, incarnation: int, request: str, prompt: Sequence[int]) -> None:
        self.counted["call refused"] += 1
        self._starts[incarnation, request].asked[prompt_digest(prompt)] -= 1

    def answered(self, incarnation: int, prompt: Sequence[int], answer: AnswerCall) -> None:
        self.counted["call answered"] += 1
        start = self._starts[incarnation, answer.request]
        tokens, trajectory = tuple(answer.token_ids), answer.request.partition("/")[0]
        spec = self._specs[group_of(trajectory)]
        who = f"{trajectory}: the answer to a call of {len(prompt)} tokens"
        seed = self._seed(start, trajectory, prompt, answer)
        if seed is None:
            self._wrong("C1", f"{who} is not one of version {spec.version}")
            return
        start.seeds.add(seed)
        start.answered.append((tuple(prompt), tokens))
        if tokens not in self._durable[trajectory, seed]:
            self._wrong("calls", f"{who} is not in the log")
        self.counted["call answered again"] += (trajectory, seed) in self._said
        before = self._said.setdefault((trajectory, seed), tokens)
        size = min(len(before), len(tokens))
        if before[:size] != tokens[:size]:
            self._wrong("calls", f"{who} was another one before")

    def _seed(
        self, start: _Start, trajectory: str, prompt: Sequence[int], answer: AnswerCall
    ) -> int | None:
        """Return an answer's seed; None if it matches no call."""
        spec, digest = self._specs[group_of(trajectory)], prompt_digest(prompt)
        own = trajectory_seed(spec.seed, int(trajectory.rpartition("-")[2]))
        seeds = (call_seed(own, digest, index) for index in range(start.asked[digest]))
        tokens, logprobs = answer.token_ids, answer.logprobs
        for seed in seeds:
            strange = strange_place(spec.digest, seed, len(prompt), tokens, logprobs)
            if seed not in start.seeds and strange is None:
                return seed
        return None

    def _trajectory(self, trajectory: Trajectory, incarnation: int) -> None:
        token = strange_token(trajectory)
        if token is not None:
            what = (
                f"{trajectory.trajectory}: token {token} is not one of version {trajectory.version}"
            )
            self._wrong("C1", what)
        start = self._starts.get(
            (incarnation, f"{trajectory.trajectory}/{trajectory.meta.attempt}")
        )
        if start is None:
            return
        who, answers = trajectory.trajectory, list(answers_of(trajectory))
        logged, served = Counter(answers), Counter(start.answered)
        for odd, what in ((logged - served, "more than"), (served - logged, "less than")):
            if odd:
                self._wrong("calls", f"{who} has {odd.total()} answers {what} its agent has heard")
        tokens, sampled = (
            sum(len(sampled_ids) for _, sampled_ids in start.answered),
            sum(trajectory.loss_mask),
        )
        if tokens != sampled:
            self._wrong("calls", f"{who} has {sampled} sampled tokens, its agent heard {tokens}")
        length = length_of(answers)
        if trajectory.length != length:
            self._wrong(
                "contexts", f"{who} has {trajectory.length} tokens where {length} are enough"
            )


def answers_of(trajectory: Trajectory) -> Iterator[Answered]:
    """Yield prompt and tokens of each call, in answer order."""
    contexts = trajectory.meta.contexts
    for call in trajectory.meta.calls:
        number, size = place_of(call, contexts)
        ids = context_of(trajectory, number).token_ids[: size + call.end - call.start].tolist()
        yield tuple(ids[:size]), tuple(ids[size:])


def length_of(answers: Sequence[Answered]) -> int:
    """Return the length of a record that stores shared tokens once.

    A call extends the longest context that is a prefix of its prompt, or branches off a common
    prefix.
    """
    contexts: list[tuple[int, ...]] = []
    length = 0
    for prompt, tokens in answers:
        equal = [_common(prompt, context) for context in contexts]
        complete = [index for index, context in enumerate(contexts) if equal[index] == len(context)]
        index = max(complete, key=lambda index: equal[index]) if complete else len(contexts)
        shared = equal[index] if complete else max(equal, default=0)
        contexts[index : index + 1] = [(*prompt, *tokens)]
        length += len(prompt) - shared + len(tokens)
    return length


def _common(first: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(first, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# C1, token by token: simulated tokens are a function of (weights digest, seed, position).


def strange_place(
    digest: str, seed: int, start: int, tokens: Sequence[int], logprobs: Sequence[float | None]
) -> int | None:
    """Return the first token, by index, that these weights do not sample there; else None."""
    base = mix64(int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "big") ^ seed)
    for index, (token, actual) in enumerate(zip(tokens, logprobs, strict=True)):
        drawn = mix64(base ^ (start + index))
        right = drawn % (VOCABULARY - 1)
        right += right >= END_TOKEN
        logprob = -math.log(VOCABULARY) * ((drawn >> 32) + 1) / 2**32
        if token not in (right, END_TOKEN) or actual is None or abs(actual - logprob) > TOLERANCE:
            return index
    return None


def strange_token(trajectory: Trajectory) -> int | None:
    """Return the first position its version does not sample; else None."""
    meta, digest = trajectory.meta, trajectory.digest
    tokens, logprobs = trajectory.token_ids, trajectory.logprobs
    stretches = [
        (call.start, call.end, call.seed, place_of(call, meta.contexts)[1]) for call in meta.calls
    ]
    if not stretches:
        stretches = [
            (segment.start, segment.end, meta.seed, segment.start)
            for segment in trajectory.segments
            if segment.kind == "model"
        ]
    for start, end, seed, before in stretches:
        token = strange_place(digest, seed, before, tokens[start:end], logprobs[start:end])
        if token is not None:
            return start + token
    return None
