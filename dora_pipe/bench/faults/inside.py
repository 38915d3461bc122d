"""Meets the moments inside of an append, without a hook in production code.

SQLite calls a trace with each statement as it begins: the rows are in when COMMIT does. The Kafka
client is wrapped in the process that is to be struck, and only there: an exclusive writer's
records are acknowledged when its commit begins; a plain writer has no commit, and is met when its
first record was handed to the client, which sends it a moment later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from dora_pipe.bench.faults.order import Point
from dora_pipe.bus.sqlite_file import SqliteFile

_BEGIN: Final = "begin_transaction"
_SEND: Final = "send"
_COMMIT: Final = "commit_transaction"


class Inside(Protocol):
    """Knows when an append is in its middle."""

    def arm(self, point: Point, strike: Callable[[], None]) -> None:
        """Strike once, inside of the append that comes next."""
        ...


class SqliteInside:
    """Of the connection of one writer."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def arm(self, point: Point, strike: Callable[[], None]) -> None:
        """See Inside."""
        commits = [point]

        def on(statement: str) -> None:
            if statement == "COMMIT" and commits:
                _strike(commits.pop(), strike)

        self._file.connection.set_trace_callback(on)


class KafkaInside:
    """Of all producers of this process; a role has one."""

    def arm(self, point: Point, strike: Callable[[], None]) -> None:
        """See Inside."""
        from kafka import KafkaProducer

        whole = {name: getattr(KafkaProducer, name) for name in (_BEGIN, _SEND, _COMMIT)}
        exclusive = []

        def meet() -> None:
            for name, method in whole.items():
                setattr(KafkaProducer, name, method)
            _strike(point, strike)

        def begin(producer: Any) -> Any:
            exclusive.append(True)
            return whole[_BEGIN](producer)

        def send(producer: Any, *arguments: Any, **named: Any) -> Any:
            future = whole[_SEND](producer, *arguments, **named)
            if not exclusive:
                meet()
            return future

        def commit(producer: Any, *arguments: Any, **named: Any) -> Any:
            meet()
            return whole[_COMMIT](producer, *arguments, **named)

        for name, method in ((_BEGIN, begin), (_SEND, send), (_COMMIT, commit)):
            setattr(KafkaProducer, name, method)


def _strike(point: Point, strike: Callable[[], None]) -> None:
    if point.moment == "commit":
        threading.Timer(point.delay_s, strike).start()
    else:
        strike()
