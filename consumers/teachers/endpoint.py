"""Teacher on an OpenAI completions endpoint with `prompt_logprobs`, as in vLLM.

Results depend on the endpoint's batching: not bitwise repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from dora_pipe.consumers.objectives.advantage import FLOAT32_MAX
from dora_pipe.consumers.teachers.teacher import Row, Scores
from dora_pipe.core.errors import NonFinite, ResourceError
from dora_pipe.core.system.json_endpoint import LOOP, EndpointAway, JsonEndpoint

ANSWER_BYTES_MAX: Final = 256 << 20
"""About a hundred bytes per token."""

PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 15.0
"""Retry backoff doubles up to this."""

_TURN_S: Final = 0.2


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    index: int
    prompt_logprobs: list[dict[int, _TokenLogprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    model: str
    batch: int = 8
    concurrency: int = 8
    timeout_s: float = 60.0
    retries_max: int = 5


class EndpointTeacher:
    """Teacher that scores trajectories as prompts, sampling one discarded token each."""

    repeatable = False

    def __init__(self, url: str, options: EndpointOptions, *, key: str = "") -> None:
        self.waits_for = ""
        self._options = options
        self._endpoint = JsonEndpoint(
            "the teacher",
            url,
            key=key,
            timeout_s=options.timeout_s,
            concurrency=options.concurrency,
            bytes_max=ANSWER_BYTES_MAX,
        )

    def name(self) -> str:
        """Return the model's name; excludes the address."""
        return f"endpoint {self._options.model}"

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        """See `Teacher`. Raises ResourceError if requests are rejected or keep failing."""
        size, turn = self._options.batch, asyncio.Semaphore(self._options.concurrency)
        starts = {
            LOOP.run(self._ask(rows[start : start + size], turn)): start
            for start in range(0, len(rows), size)
        }
        logprobs: list[list[float]] = [[] for _ in rows]
        requests, remaining = len(starts), set(starts)
        try:
            while remaining:
                self.waits_for = f"{self._endpoint.where}: {len(remaining)} of {requests}"
                self.waits_for += " requests open"
                done, remaining = wait(remaining, _TURN_S, FIRST_COMPLETED)
                for future in done:
                    answer = future.result()
                    logprobs[starts[future] : starts[future] + len(answer)] = answer
                if not done:
                    yield
        finally:
            for future in remaining:
                future.cancel()
            self.waits_for = ""
        return logprobs

    async def _ask(self, rows: Sequence[Row], turn: asyncio.Semaphore) -> list[list[float]]:
        options, pause_s = self._options, PAUSE_S
        body = {
            "model": options.model,
            "prompt": [np.asarray(ids).tolist() for ids, _ in rows],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        async with turn:
            for _ in range(options.retries_max):
                with suppress(EndpointAway):
                    return self._read(await self._endpoint.ask("/completions", body), rows)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            try:
                return self._read(await self._endpoint.ask("/completions", body), rows)
            except EndpointAway as error:
                lasted = f"{error.message} (asked {options.retries_max + 1} times)"
                hint = "no data is lost: continue this step with run --resume when it answers"
                given_up = ResourceError(lasted, hint=hint)
                given_up.waited_out = True
                raise given_up from error

    def _read(self, answer: bytes, rows: Sequence[Row]) -> list[list[float]]:
        where = self._endpoint.where
        try:
            choices = msgspec.json.decode(answer, type=_Completion).choices
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResourceError(f"the answer of {where} is not a completion: {error}") from None
        by_place = {choice.index: choice.prompt_logprobs for choice in choices}
        logprobs = []
        for index, (ids, mask) in enumerate(rows):
            by_position = by_place.get(index)
            if by_position is None or len(by_position) != len(ids):
                raise ResourceError(
                    f"{where} returned no log-probs of the prompt",
                    hint="it must support `prompt_logprobs` and token ids as prompts, like vLLM",
                )
            positions = [position for position in range(1, len(ids)) if mask[position]]
            logprobs.append(
                [_of(by_position[position], ids[position], where) for position in positions]
            )
        return logprobs


def _of(by_token: dict[int, _TokenLogprob] | None, token: int, where: str) -> float:
    own = None if by_token is None else by_token.get(token)
    if own is None:
        raise ResourceError(f"{where} has no log-prob of token {token} in the prompt")
    if not abs(own.logprob) <= FLOAT32_MAX:
        raise NonFinite(f"{where} returned log-prob for token {token}: {own.logprob}")
    return float(np.float32(own.logprob))
