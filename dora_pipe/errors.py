"""The one family of errors; it decides nothing.

    DoraError
    ├── UsageError         (2)  the command line asks for something that cannot be
    ├── ConfigError        (3)  the configuration is wrong; nothing was started
    ├── BusError           (4)  the log cannot be reached, read or written
    │   ├── Fenced              another incarnation owns this exclusive writer
    │   ├── OutcomeUnknown      an append may or may not have happened
    │   ├── AccessRefused       a wrong password, an untrusted certificate, a missing right
    │   ├── RecordTooLarge      a record is above the limit of its topic
    │   ├── BusFull             the disk, or a bounded buffer, has no room
    │   ├── TopicMissing        a topic of the run does not exist
    │   └── LogTruncated        something acknowledged is gone
    ├── InvariantBroken    (5)  a promise (C1, C2, C3, a digest, the chain) does not hold
    ├── ReplayDiverged     (6)  the same inputs gave other bytes
    ├── ResourceError      (7)  memory, disk, a device, a time limit
    ├── SchemaError        (8)  a record cannot be read; carries the path inside the record
    ├── PolicyError        (9)  weights, tokenizer or model directory cannot be used
    ├── TaskError          (10) a data set, an environment or a reward cannot be used
    └── NonFinite          (11) a step's loss or gradient norm is not a finite number

The number is the exit code of the command line. A message is one line; `hint` says what to do.
"""

from __future__ import annotations

from typing import ClassVar, Final

MESSAGE_CHARACTERS_MAX: Final = 2000
"""A message may quote what came from outside, and that may be of any length."""

_PATH_CHARACTERS_MAX: Final = 200


def one_line(text: str, characters_max: int) -> str:
    """The text on one line and not endless: what a terminal would obey is written as an escape."""
    if len(text) > characters_max:
        text = text[: characters_max - 3] + "..."
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class DoraError(Exception):
    """Base of every error that a user may see.

    Example: ``raise ConfigError("unknown key `lr_rate`", hint="did you mean `lr`?")``
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = one_line(message, MESSAGE_CHARACTERS_MAX)
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DoraError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class ConfigError(DoraError):
    """The configuration is wrong; raised before anything starts."""

    exit_code = 3


class BusError(DoraError):
    """The log cannot be reached, read or written."""

    exit_code = 4


class Fenced(BusError):
    """Another incarnation owns this exclusive writer; this one must stop."""


class OutcomeUnknown(BusError):
    """An append may or may not have happened; the role starts again under a new role epoch."""


class AccessRefused(BusError):
    """The log's cluster refuses this client, or is not trusted by it: no wait mends that."""


class RecordTooLarge(BusError):
    """A record is above the size limit of its topic, which is told where it is known."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        topic: str = "",
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.topic = topic
        self.limit_bytes = limit_bytes


class BusFull(BusError):
    """The disk, or a bounded buffer of the bus, has no room."""


class TopicMissing(BusError):
    """A topic of the run does not exist."""


class LogTruncated(BusError):
    """Something that was acknowledged is gone from the log."""


class InvariantBroken(DoraError):
    """A promise does not hold: C1, C2, C3, a digest, or the chain of rounds."""

    exit_code = 5


class ReplayDiverged(DoraError):
    """The same inputs gave other bytes."""

    exit_code = 6


class ResourceError(DoraError):
    """Memory, disk, a device or a time limit is not enough."""

    exit_code = 7


class SchemaError(DoraError):
    """A record cannot be read; `path` says where inside the record."""

    exit_code = 8

    def __init__(self, message: str, *, path: str = "$", hint: str | None = None) -> None:
        path = one_line(path, _PATH_CHARACTERS_MAX)
        message = one_line(message, MESSAGE_CHARACTERS_MAX - _PATH_CHARACTERS_MAX - 10)
        super().__init__(f"{message} (at {path})", hint=hint)
        self.path = path


class PolicyError(DoraError):
    """Weights, tokenizer or model directory cannot be used."""

    exit_code = 9


class TaskError(DoraError):
    """A data set, an environment or a reward cannot be used."""

    exit_code = 10


class NonFinite(DoraError):
    """A training step's loss or gradient norm is not a finite number; the step is not committed."""

    exit_code = 11
