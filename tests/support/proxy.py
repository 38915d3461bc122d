"""TCP proxy between client and broker with faults.

    with Proxy(lambda: broker.address("PROXIED")) as proxy:
        proxy.stall()  # connections stay open, nothing passes
        proxy.flow()  # held data passes
        proxy.reset()  # RST on every connection; new ones are accepted
        proxy.drop_answers()  # answers are lost, requests arrive
        proxy.slow(64_000)  # bytes per second, each way

Each direction of a connection has a thread; all end with the proxy.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

HOST = "127.0.0.1"
PIECE_BYTES = 16_384
TICK_S = 0.01
CONNECT_S = 30.0


class Proxy:
    """Proxy to `target`, which is called for each connection."""

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(TICK_S)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._stalled = threading.Event()
        self._dropping = threading.Event()
        self._closed = threading.Event()
        self._bytes_per_s: float | None = None
        self.dropped_bytes = 0
        """Bytes of lost answers."""
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._listener.getsockname()[1]}"

    def stall(self) -> None:
        self._stalled.set()

    def flow(self) -> None:
        for entry in (self._stalled, self._dropping):
            entry.clear()
        self._bytes_per_s = None

    def drop_answers(self) -> None:
        self._dropping.set()

    def slow(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    def reset(self) -> int:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for side in pair:
                with suppress(OSError):
                    linger = struct.pack("ii", 1, 0)
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    side.close()
        return len(pairs)

    def close(self) -> None:
        self._closed.set()
        self.flow()
        self._threads[0].join()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            host, port = self._target().rsplit(":", 1)
            try:
                server = socket.create_connection((host, int(port)), timeout=CONNECT_S)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            for source, sink, answers in ((client, server, False), (server, client, True)):
                with suppress(OSError):  # closed by `reset`; the pump ends
                    source.settimeout(TICK_S)
                words = (source, sink, answers)
                thread = threading.Thread(target=self._pump, args=words, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while not self._closed.is_set():
                piece = self._piece(source)
                if piece is None:
                    continue
                if not piece:
                    break
                while self._stalled.is_set() and not self._closed.is_set():
                    time.sleep(TICK_S)
                if self._bytes_per_s is not None:
                    time.sleep(len(piece) / self._bytes_per_s)
                if answers and self._dropping.is_set():
                    self.dropped_bytes += len(piece)
                    continue
                sink.settimeout(None)
                sink.sendall(piece)
                sink.settimeout(TICK_S)
        except OSError:
            pass
        for entry in (source, sink):
            with suppress(OSError):
                entry.close()

    def _piece(self, source: socket.socket) -> bytes | None:
        try:
            return source.recv(PIECE_BYTES)
        except TimeoutError:
            return None
