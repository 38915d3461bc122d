"""Agent endpoint with its process; the test plays the worker's machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dora_pipe.config import model
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.sessions.endpoint import SessionPort
from dora_pipe.producers.sessions.frames import EndpointSetup, SourceSetup
from dora_pipe.producers.worker.effects import (
    AnswerCall,
    CallAsked,
    CloseSession,
    OpenSession,
    RefuseCall,
)

Said = AnswerCall | RefuseCall
CONTEXT_TOKENS = 4096


def source_setup(*, chat: bool = True, **task: Any) -> SourceSetup:
    config = model.Task(kind="calculator", agent="agent:run", **task)
    return SourceSetup(sources=("train",), task=config, sampling=model.Sampling(), chat=chat)


class Stage:
    """`SessionPort` driven by a thread; `answer` answers calls and may be replaced.

    Example: ``with stage(assets, lambda asked: answer(asked, ids)) as one: one.open("g-0/0")``.
    """

    def __init__(self, port: SessionPort, answer: Callable[[CallAsked], Said | None]) -> None:
        self.port = port
        self.calls: list[CallAsked] = []
        self.events: list[Any] = []
        self.answer = answer
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self, request: str) -> tuple[str, str]:
        self.tell(OpenSession(request=request, source="train"))
        address = self.port.addresses.of(request)
        return address.base_url, address.api_key

    def end(self, request: str) -> None:
        self.tell(CloseSession(request=request))

    def tell(self, effect: Any) -> None:
        with self._lock:
            self.port.start(effect)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.port.close()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                for event in self.port.poll():
                    self.events.append(event)
                    if isinstance(event, CallAsked):
                        self.calls.append(event)
                        answer = self.answer(event)
                        if answer is not None:
                            self.port.start(answer)
            time.sleep(0.001)


@contextmanager
def stage(
    assets: Path,
    answer: Callable[[CallAsked], Said | None],
    *,
    listen: str = "127.0.0.1:0",
    **task: Any,
) -> Iterator[Stage]:
    setup = EndpointSetup(
        listen=listen,
        assets=str(assets),
        started_ns=10**18,
        model="policy",
        context_tokens=CONTEXT_TOKENS,
        sources=(source_setup(**task),),
    )
    stage = Stage(SessionPort(setup), answer)
    try:
        yield stage
    finally:
        stage.close()


def says(assets: Path, words: Mapping[int, str] | str) -> Callable[[CallAsked], AnswerCall]:
    tokenizer = Tokenizer(assets)
    count = iter(range(10**6))

    def answer(asked: CallAsked) -> AnswerCall:
        text = words if isinstance(words, str) else words[next(count)]
        ids = tokenizer.reading("parse").ids(text)
        return AnswerCall(
            request=asked.request,
            call=asked.call,
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish="stop",
            prompt_tokens=len(asked.token_ids),
        )

    return answer
