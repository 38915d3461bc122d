"""Teacher on an OpenAI completions endpoint with `prompt_logprobs`, as in vLLM.

Results depend on the endpoint's batching: not bitwise repeatable.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from dora_pipe.consumers.objectives.advantage import FLOAT32_MAX
from dora_pipe.consumers.teachers.teacher import Row, Scores
from dora_pipe.core.errors import DoraError, NonFinite, ResourceError
from dora_pipe.core.system.json_endpoint import EndpointAway, JsonEndpoint

ANSWER_BYTES_MAX: Final = 256 << 20
"""About a hundred bytes per token."""

PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 15.0
"""Retry backoff doubles up to this."""

_TURN_S: Final = 0.2

Numbered = tuple[int, Sequence[Row]]
Said = tuple[int, list[list[float]] | DoraError]


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
        size = self._options.batch
        todo: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        for start in range(0, len(rows), size):
            todo.put((start, rows[start : start + size]))
        requests = todo.qsize()
        done: queue.SimpleQueue[Said] = queue.SimpleQueue()
        over = threading.Event()
        # Daemon threads: process exit does not wait for an answer.
        threads = [
            threading.Thread(
                target=self._ask_all, args=(todo, done, over), name="teacher", daemon=True
            )
            for _ in range(min(self._options.concurrency, requests))
        ]
        for thread in threads:
            thread.start()
        logprobs: list[list[float]] = [[] for _ in rows]
        try:
            for answered in range(requests):
                self.waits_for = f"{self._endpoint.where}: {requests - answered} of {requests}"
                self.waits_for += " requests open"
                start, answer = yield from _next(done, threads)
                if isinstance(answer, DoraError):
                    raise answer
                logprobs[start : start + len(answer)] = answer
        finally:
            over.set()
            self.waits_for = ""
        return logprobs

    def _ask_all(
        self,
        todo: queue.SimpleQueue[Numbered],
        done: queue.SimpleQueue[Said],
        over: threading.Event,
    ) -> None:
        while not over.is_set():
            try:
                start, rows = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((start, self._ask(rows, over)))
            except DoraError as error:
                done.put((start, error))

    def _ask(self, rows: Sequence[Row], over: threading.Event) -> list[list[float]]:
        options, pause_s = self._options, PAUSE_S
        body = {
            "model": options.model,
            "prompt": [np.asarray(ids).tolist() for ids, _ in rows],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        for _ in range(options.retries_max):
            try:
                return self._read(self._endpoint.post("/completions", body), rows)
            except EndpointAway:
                if over.wait(pause_s):
                    break
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        try:
            return self._read(self._endpoint.post("/completions", body), rows)
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


def _next(
    done: queue.SimpleQueue[Said], threads: Sequence[threading.Thread]
) -> Generator[None, None, Said]:
    while True:
        asked = any(thread.is_alive() for thread in threads)
        try:
            return done.get(timeout=_TURN_S)
        except queue.Empty:
            assert asked, "the teacher is closed"
            yield
