"""Error classes; the number is the exit code of the command line.

    DoraError
    ├── UsageError         (2)
    ├── ConfigError        (3)
    ├── BusError           (4)
    │   ├── Fenced
    │   ├── OutcomeUnknown
    │   ├── AccessRefused
    │   ├── RecordRefused
    │   │   └── RecordTooLarge
    │   ├── BusFull
    │   ├── TopicMissing
    │   └── LogTruncated
    │       └── LogDamaged
    ├── InvariantBroken    (5)
    ├── ReplayDiverged     (6)
    ├── ResourceError      (7)
    │   └── NoRoom
    ├── SchemaError        (8)
    ├── PolicyError        (9)
    ├── TaskError          (10)
    ├── NonFinite          (11)
    └── RunHalted          (12)

A message is one line; `hint` says what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

MESSAGE_CHARACTERS_MAX: Final = 2000
"""Maximum length of a message, which may quote external text."""

FAIL_BATCH_HINT: Final = "`dora-pipe control fail-batch RUN` ends its groups, then --resume"

_PATH_CHARACTERS_MAX: Final = 200


def printable(text: str) -> str:
    """Return text as one line, with control, separator and bidirectional characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def one_line(text: str, characters_max: int) -> str:
    """Return text as `printable`, shortened."""
    if len(text) > characters_max:
        text = text[: characters_max - 3] + "..."
    return printable(text)


def reason(error: BaseException) -> str:
    """Return an error as one line. Example: ``"OSError: [Errno 5] Input/output error"``."""
    if isinstance(error, DoraError):
        return error.message
    text, kind = str(error), type(error).__name__
    return one_line(f"{kind}: {text}" if text else kind, MESSAGE_CHARACTERS_MAX)


class DoraError(Exception):
    """Base of all errors for users.

    Example: ``raise ConfigError("unknown key `lr_rate`", hint="did you mean `lr`?")``
    """

    exit_code: ClassVar[int] = 1

    waited_out: bool = False
    """Retries are exhausted (`core.loop.retry`); do not restart the role."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = one_line(message, MESSAGE_CHARACTERS_MAX)
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DoraError):
    """Invalid command line."""

    exit_code = 2


class ConfigError(DoraError):
    """Invalid configuration, raised before anything starts."""

    exit_code = 3


class BusError(DoraError):
    """Log that cannot be reached, read or written."""

    exit_code = 4


class Fenced(BusError):
    """Another incarnation owns this exclusive writer; this one must stop."""


class OutcomeUnknown(BusError):
    """Append that may or may not have happened; the role restarts under a new incarnation."""


class AccessRefused(BusError):
    """Client refused by the log's cluster, or cluster untrusted; waiting does not help."""


class RecordRefused(BusError):
    """Record rejected by the log without an append; neither retry nor restart helps."""

    waited_out = True


class RecordTooLarge(RecordRefused):
    """Record above its topic's size limit, which is included if known."""

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
    """Full disk or bus buffer."""


class TopicMissing(BusError):
    """Missing topic of the run."""


class LogTruncated(BusError):
    """Acknowledged records are gone from the log."""


class LogDamaged(LogTruncated):
    """Log file that is malformed or no log."""


class InvariantBroken(DoraError):
    """Violation of C1, C2, C3, a digest or the chain of rounds."""

    exit_code = 5


class ReplayDiverged(DoraError):
    """Different bytes from the same inputs."""

    exit_code = 6


class ResourceError(DoraError):
    """Insufficient memory, disk, device or time."""

    exit_code = 7


class NoRoom(ResourceError):
    """Full disk or store of the policies; the trainer waits for space."""


class SchemaError(DoraError):
    """Unreadable record; `path` is the position inside it."""

    exit_code = 8

    def __init__(self, message: str, *, path: str = "$", hint: str | None = None) -> None:
        path = one_line(path, _PATH_CHARACTERS_MAX)
        message = one_line(message, MESSAGE_CHARACTERS_MAX - _PATH_CHARACTERS_MAX - 10)
        super().__init__(f"{message} (at {path})", hint=hint)
        self.path = path


class PolicyError(DoraError):
    """Unusable weights, tokenizer or model directory."""

    exit_code = 9


class TaskError(DoraError):
    """Unusable data set, environment or reward."""

    exit_code = 10


class NonFinite(DoraError):
    """Non-finite number in a training step, which is not committed.

    The default hint applies to a run's batch.
    """

    exit_code = 11

    def __init__(self, message: str, *, hint: str = FAIL_BATCH_HINT) -> None:
        super().__init__(message, hint=hint)


class RunHalted(DoraError):
    """Too many groups failed; a user must resume the run."""

    exit_code = 12


CHECKOUT: Final = (Path(__file__).parent.parent / "pyproject.toml").is_file()
"""Whether the package runs from a checkout, not a wheel."""


def install_hint(extra: str, *, options: str = "", checkout: bool = CHECKOUT) -> str:
    """Return the command that installs an extra; the package is on no index.

    Example: ``install_hint("torch") == "pip install -e '.[torch]'"`` in a checkout.
    """
    if checkout:
        return f"pip install {options}-e '.[{extra}]'"
    return f"pip install {options}'dora_pipe-VERSION-py3-none-any.whl[{extra}]'"
