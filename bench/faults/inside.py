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
    """Of all producers of this process that are, or are not, exclusive; a role has one of each."""

    def __init__(self, *, exclusive: bool) -> None:
        self._exclusive = exclusive

    def arm(self, point: Point, strike: Callable[[], None]) -> None:
        """See Inside."""
        from kafka import KafkaProducer

        name = _COMMIT if self._exclusive else _SEND
        whole = getattr(KafkaProducer, name)

        def commit(producer: Any, *arguments: Any, **named: Any) -> Any:
            setattr(KafkaProducer, name, whole)
            _strike(point, strike)
            return whole(producer, *arguments, **named)

        def send(producer: Any, *arguments: Any, **named: Any) -> Any:
            future = whole(producer, *arguments, **named)
            if producer.config["transactional_id"] is None:  # the other one may be at it too
                setattr(KafkaProducer, name, whole)
                _strike(point, strike)
            return future

        setattr(KafkaProducer, name, commit if self._exclusive else send)


def _strike(point: Point, strike: Callable[[], None]) -> None:
    if point.moment == "commit":
        threading.Timer(point.delay_s, strike).start()
    else:
        strike()
