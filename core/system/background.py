"""Event loop in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Event loop in its own thread, usable from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._starting = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Continue a coroutine in the loop."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                args = (self._loop,)
                threading.Thread(target=self._forever, args=args, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _forever(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._stopped:
            # A user's task that exits ends the loop's turn, not the other calls.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        loop.close()
