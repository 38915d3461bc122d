"""Errors for records that a broker refuses: size or timestamp.

The client splits a batch that is too large until one record is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kafka import errors as kafka_errors

from dora_pipe.bus.checks import record_bytes
from dora_pipe.core.errors import RecordRefused, RecordTooLarge
from dora_pipe.core.pure.records import Append

TOO_LARGE: Final = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
REFUSED: Final = (
    *TOO_LARGE,
    kafka_errors.InvalidTimestampError,
    kafka_errors.InvalidRecordError,
)
"""Errors that a retry cannot fix."""

_RANGE: Final = re.compile(r"Timestamp (-?\d+) .*within \[(-?\d+), ?(-?\d+)\]")
_MS_PER_H: Final = 3_600_000


def refusal(
    error: Exception, record: Append, settings: Mapping[str, str], max_record_bytes: int
) -> RecordRefused:
    """Return the error; `settings` are the topic's current ones."""
    if isinstance(error, TOO_LARGE):
        return RecordTooLarge(
            f"the Kafka broker refuses a record of {record_bytes(record)} bytes for topic "
            f"{record.topic}, whose max.message.bytes is {settings['max.message.bytes']}",
            hint="raise together: the topic's max.message.bytes, and the brokers' "
            "replica.fetch.max.bytes; or lower bus.max_record_bytes for new runs",
            topic=record.topic,
            limit_bytes=max_record_bytes,
        )
    text = " ".join(str(error).split())
    match = _RANGE.search(text)
    if match or isinstance(error, kafka_errors.InvalidTimestampError):
        how = _difference(match, settings) if match else f"differs from the broker's: {text}"
        return RecordRefused(
            f"the Kafka broker refuses a record for topic {record.topic} for its time: this "
            f"machine's clock {how}",
            hint="set the clocks of this machine and of the brokers (NTP), or set "
            f"message.timestamp.type=LogAppendTime for topic {record.topic}",
        )
    return RecordRefused(f"the Kafka broker refuses a record for topic {record.topic}: {text}")


def _difference(match: re.Match[str], settings: Mapping[str, str]) -> str:
    sent, first, last = map(int, match.groups())
    if sent > last:
        broker = last - int(settings.get("message.timestamp.after.max.ms", _MS_PER_H))
        return f"is {(sent - broker) / _MS_PER_H:.1f} h ahead of the broker's"
    broker = first + int(settings.get("message.timestamp.before.max.ms", _MS_PER_H))
    return f"is {(broker - sent) / _MS_PER_H:.1f} h slow compared with the broker's"
