"""The worker's port to the handover of KV caches; decides nothing.

Writing, hashing and mapping files takes time that grows with the cache, so it happens in a thread
beside the loop, one cache after the other: the batch goes on meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Final

from dora_pipe.producers.effects import DropKv, FetchKv, KvFetched, KvPut, PutKv
from dora_pipe.producers.handover import Handover
from dora_pipe.transfers.port import Lost

CLOSE_S: Final = 10.0
"""Closing waits so long for a cache that is being written."""


class HandoverPort:
    """Runs a `Handover`; with `in_thread` beside the loop, else at once (virtual time)."""

    effects: tuple[type, ...] = (PutKv, FetchKv, DropKv)

    def __init__(self, handover: Handover, *, in_thread: bool = True) -> None:
        self._handover = handover
        self._in_thread = in_thread
        self._asked: queue.SimpleQueue[PutKv | FetchKv | DropKv | None] = queue.SimpleQueue()
        self._events: deque[KvPut | KvFetched] = deque()
        self._thread: threading.Thread | None = None

    def start(self, effect: PutKv | FetchKv | DropKv) -> None:
        """Queue it, or do it."""
        if not self._in_thread:
            self._do(effect)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="handover", daemon=True)
            self._thread.start()
        self._asked.put(effect)

    def poll(self) -> list[Any]:
        """What is done."""
        events: list[Any] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    @property
    def busy(self) -> bool:
        """Whether something is done and not yet told."""
        return bool(self._events)

    def close(self) -> None:
        """Let what was asked be done, for a while."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _work(self) -> None:
        while (effect := self._asked.get()) is not None:
            self._do(effect)

    def _do(self, effect: PutKv | FetchKv | DropKv) -> None:
        if isinstance(effect, DropKv):
            self._handover.drop(effect.blob)
        elif isinstance(effect, PutKv):
            blob = self._handover.put(effect.label, effect.kv)
            if isinstance(blob, Lost):
                self._events.append(KvPut(request=effect.request, blob=None, why=blob.why))
            else:
                self._events.append(KvPut(request=effect.request, blob=blob))
        else:
            kv = self._handover.fetch(effect.label, effect.blob)
            if isinstance(kv, Lost):
                self._events.append(KvFetched(request=effect.request, kv=None, why=kv.why))
            else:
                self._events.append(KvFetched(request=effect.request, kv=kv))
