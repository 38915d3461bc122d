"""One process of the bench of moves, with an engine; decides nothing.

It is started as `python -m dora_pipe.bench.moves_child SETUP` and answers one line of JSON with
another, until its input ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.bench.moves_engine import open_engine, vocabulary_of
from dora_pipe.core.clock import SystemClock
from dora_pipe.producers.engines.port import EngineRequest, Kv, SamplingParams, TokensSampled
from dora_pipe.producers.worker.kv_handover import KvHandover, label_of
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.port import Lost

RUNNING_TOKENS: Final = 8
"""What the request has sampled before it moves."""
TOKENS_MAX: Final = 16_384
TOKEN: Final = b"a bench's own: both ends are here"
HOST: Final = "127.0.0.1"
_SEED: Final = 21


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told once."""

    engine: str
    model: str
    directory: str
    """Of the model, for an engine that reads one."""
    context_tokens: int
    shared: str
    """Directory that both processes see."""
    own: str
    """Directory of this one."""


class Run(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have a request that has so many tokens after one more step."""

    tokens: int


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hand the request over, after that step; here it then stands before it again."""

    way: str


class Answer(msgspec.Struct, kw_only=True):
    """What was done, and how long it took. `began_ns` and `ended_ns` are the monotonic clock."""

    token_ids: list[int] = []
    sampled: int = 0
    sha256: str = ""
    bytes: int = 0
    peer: str = ""
    began_ns: int = 0
    ended_ns: int = 0
    export_ms: float = 0.0
    put_ms: float = 0.0
    fetch_ms: float = 0.0
    import_ms: float = 0.0
    prefill_ms: float = 0.0
    next_token: tuple[int, float] = (-1, 0.0)


class TakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on with a request that was let go, until it has its next token."""

    way: str
    request: Answer


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The same without its cache."""

    request: Answer


Ask = Run | LetGo | TakeUp | Prefill
_ASK: Final = msgspec.json.Decoder(Ask)


class Moving:
    """One end of moves."""

    def __init__(self, setup: Setup) -> None:
        from dora_pipe.store.transfers.flight import FlightTransfers, Identity

        self._vocabulary = vocabulary_of(setup.model)
        self._engine = open_engine(
            setup.engine, setup.model, Path(setup.directory), setup.context_tokens
        )
        clock = SystemClock()
        self._flight = FlightTransfers(
            MappedFiles(Path(setup.own) / "handover", clock=clock),
            Identity(token=TOKEN, run="bench", host=HOST),
            stored=Path,
            linger_s=0.0,
        )
        self._ways = {
            "files": KvHandover(MappedFiles(Path(setup.shared) / "handover", clock=clock)),
            "flight": KvHandover(self._flight),
        }
        self._request = EngineRequest(
            request="r", token_ids=[], sampled=0, seed=_SEED, params=SamplingParams(max_tokens=1)
        )

    def do(self, ask: Ask) -> Answer:
        """What is asked for."""
        if isinstance(ask, Run):
            return self._run(ask)
        if isinstance(ask, LetGo):
            return self._let_go(ask)
        return self._take_up(ask) if isinstance(ask, TakeUp) else self._prefill(ask)

    def close(self) -> None:
        """Forget what was offered."""
        self._flight.close()
        for way in self._ways.values():
            way.clear()

    def _run(self, ask: Run) -> Answer:
        chance = np.random.default_rng(ask.tokens)
        prompt = chance.integers(0, self._vocabulary, ask.tokens - RUNNING_TOKENS).tolist()
        params = SamplingParams(max_tokens=TOKENS_MAX)
        self._request = replace(self._request, token_ids=prompt, sampled=0, params=params, kv=None)
        self._engine.add(self._request)
        while self._engine.kv_used_tokens < ask.tokens - 2:
            self._engine.step()
        self._export()
        return Answer()

    def _let_go(self, ask: LetGo) -> Answer:
        before = self._request
        self._engine.add(before)
        self._engine.step()
        answer = Answer(began_ns=time.monotonic_ns())
        with _timed(answer, "export_ms"):
            kv = self._export()
        label = label_of("bench", self._request.token_ids)
        with _timed(answer, "put_ms"):
            blob = self._ways[ask.way].put(label, kv)
        assert not isinstance(blob, Lost), blob
        answer.token_ids, answer.sampled = list(self._request.token_ids), self._request.sampled
        self._request = before
        answer.sha256, answer.bytes, answer.peer = blob.sha256, blob.bytes, blob.peer
        return answer

    def _export(self) -> Kv:
        """Take the request out; it is then what goes on from there."""
        exported = self._engine.export("r")
        assert exported is not None and exported.kv is not None
        assert exported.sampled is not None
        tokens = [*self._request.token_ids, *exported.sampled.token_ids]
        sampled = self._request.sampled + len(exported.sampled.token_ids)
        kv: Kv = exported.kv
        self._request = replace(self._request, token_ids=tokens, sampled=sampled, kv=kv)
        return kv

    def _take_up(self, ask: TakeUp) -> Answer:
        answer, way = ask.request, self._ways[ask.way]
        blob = Blob(sha256=answer.sha256, bytes=answer.bytes, peer=answer.peer)
        with _timed(answer, "fetch_ms"):
            kv = way.fetch(label_of("bench", answer.token_ids), blob)
        assert not isinstance(kv, Lost), kv
        with _timed(answer, "import_ms"):
            answer.next_token = self._next_token(answer, kv)
        answer.ended_ns = time.monotonic_ns()
        way.drop(blob)
        return answer

    def _prefill(self, ask: Prefill) -> Answer:
        with _timed(ask.request, "prefill_ms"):
            ask.request.next_token = self._next_token(ask.request, None)
        return ask.request

    def _next_token(self, answer: Answer, kv: Kv | None) -> tuple[int, float]:
        """Take a request up until it has its next token, and let it go."""
        request = EngineRequest(
            request="r",
            token_ids=answer.token_ids,
            sampled=answer.sampled,
            seed=_SEED,
            params=SamplingParams(max_tokens=TOKENS_MAX),
            emit_every=1,
            kv=kv,
        )
        self._engine.add(request)
        while True:
            for event in self._engine.step():
                assert isinstance(event, TokensSampled)
                self._engine.cancel("r")
                return event.token_ids[0], event.logprobs[0]


@contextmanager
def _timed(answer: Answer, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    setattr(answer, name, (time.perf_counter() - start) * 1e3)


def serve(do: Callable[[Ask], Answer]) -> None:
    """Answer line by line. What anybody else prints goes to the standard error: vLLM prints."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(do(_ASK.decode(line))) + b"\n")
            answers.flush()


def main() -> None:
    """Be one end until the input ends."""
    moving = Moving(msgspec.json.decode(sys.argv[1], type=Setup))
    try:
        serve(moving.do)
    finally:
        moving.close()


if __name__ == "__main__":
    main()
