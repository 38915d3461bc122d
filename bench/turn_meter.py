"""Measures the parts of a turn of the orchestrator's machine; decides nothing.

Times are CPU time of the loop's thread, so that what else the machine does does not count; `wall`
is the longest turn as the clock has it, with the thread beside it that writes snapshots.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from dora_pipe.orchestrator import machine
from dora_pipe.orchestrator.digest import Leaves

_PARTS: Final = (
    "decide",
    "encode",
    "digest",
    "snapshot",
    "waits",
    "gc",
    "wait_gc",
    "turn",
    "wall",
)


class Meter:
    """Milliseconds that each part took of one turn, the most of all turns."""

    def __init__(self) -> None:
        self.most_ms = dict.fromkeys(_PARTS, 0.0)
        self.turns_ms: list[float] = []
        """Of each turn of the bus, with those that followed at once."""
        self._now_ms: defaultdict[str, float] = defaultdict(float)
        self._since_s = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the parts of the machine's turns while the block lasts."""
        with ExitStack() as stack:
            for owner, name, part in (
                (machine, "decide", "decide"),
                (machine, "seal", "encode"),
                (machine, "body_of", "snapshot"),
                (machine, "waits", "waits"),
                (Leaves, "digest", "digest"),
                (Leaves, "settle", "share"),
            ):
                timed = self._timed(getattr(owner, name), part)
                stack.enter_context(mock.patch.object(owner, name, timed))
            gc.callbacks.append(self._collecting)
            stack.callback(gc.callbacks.remove, self._collecting)
            yield

    def tidied(self, tidy: Callable[[], None]) -> None:
        """The loop waits; a turn of the bus comes next."""
        cpu_s = time.thread_time()
        tidy()
        spent_ms = (time.thread_time() - cpu_s) * 1e3
        self.most_ms["wait_gc"] = max(self.most_ms["wait_gc"], spent_ms)
        self.turns_ms.append(0.0)

    def whole(self, react: Callable[[], Any]) -> Any:
        """One turn."""
        self._now_ms.clear()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        found = react()
        self._now_ms["turn"] = (time.thread_time() - cpu_s) * 1e3
        self._now_ms["wall"] = (time.perf_counter() - wall_s) * 1e3
        self.turns_ms[-1] += self._now_ms["turn"]
        self._now_ms["digest"] = max(self._now_ms["digest"], self._now_ms.pop("share", 0.0))
        for part, spent in self._now_ms.items():
            self.most_ms[part] = max(self.most_ms[part], spent)
        return found

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._now_ms[part] += (time.thread_time() - began_s) * 1e3

        return timed

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since_s = time.thread_time()
        else:
            self._now_ms["gc"] += (time.thread_time() - self._since_s) * 1e3
