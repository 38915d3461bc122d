"""The one family of errors; it decides nothing.

    DoraError
    ├── UsageError         (2)  the command line asks for something that cannot be
    ├── ConfigError        (3)  the configuration is wrong; nothing was started
    ├── BusError           (4)  the log cannot be reached, read or written
    │   ├── Fenced              another incarnation owns this exclusive writer
    │   ├── OutcomeUnknown      an append may or may not have happened
    │   ├── AccessRefused       a wrong password, an untrusted certificate, a missing right
    │   ├── RecordRefused       the log refuses a record; no retry mends it
    │   │   └── RecordTooLarge  a record is above the limit of its topic
    │   ├── BusFull             the disk, or a bounded buffer, has no room
    │   ├── TopicMissing        a topic of the run does not exist
    │   └── LogTruncated        something acknowledged is gone
    │       └── LogDamaged      the log's file is malformed, or not a log at all
    ├── InvariantBroken    (5)  a promise (C1, C2, C3, a digest, the chain) does not hold
    ├── ReplayDiverged     (6)  the same inputs gave other bytes
    ├── ResourceError      (7)  memory, disk, a device, a time limit
    │   └── NoRoom              the disk or the store below the policies is full
    ├── SchemaError        (8)  a record cannot be read; carries the path inside the record
    ├── PolicyError        (9)  weights, tokenizer or model directory cannot be used
    ├── TaskError          (10) a data set, an environment or a reward cannot be used
    ├── NonFinite          (11) an advantage, loss, gradient or weight is not a finite number
    └── RunHalted          (12) too many groups fail: the run was stopped and can be resumed

The number is the exit code of the command line. A message is one line; `hint` says what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

MESSAGE_CHARACTERS_MAX: Final = 2000
"""A message may quote what came from outside, and that may be of any length."""

FAIL_BATCH_HINT: Final = "`dora-pipe tell RUN fail-batch` ends this batch's groups, then --resume"

_PATH_CHARACTERS_MAX: Final = 200


def printable(text: str) -> str:
    """The text on one line, and nothing in it that a terminal obeys: control characters, line and
    paragraph separators, marks that turn the direction of writing are written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def one_line(text: str, characters_max: int) -> str:
    """The text as `printable` has it, and not endless."""
    if len(text) > characters_max:
        text = text[: characters_max - 3] + "..."
    return printable(text)


def reason(error: BaseException) -> str:
    """Why something failed, in one line. Example: ``"OSError: [Errno 5] Input/output error"``."""
    if isinstance(error, DoraError):
        return error.message
    said, kind = str(error), type(error).__name__
    return one_line(f"{kind}: {said}" if said else kind, MESSAGE_CHARACTERS_MAX)


class DoraError(Exception):
    """Base of every error that a user may see.

    Example: ``raise ConfigError("unknown key `lr_rate`", hint="did you mean `lr`?")``
    """

    exit_code: ClassVar[int] = 1

    waited_out: bool = False
    """It was waited for as long as anybody waits (`core.retry`): to start again would wait anew."""

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


class RecordRefused(BusError):
    """The log refuses a record and appended nothing; neither a retry nor a restart mends it."""

    waited_out = True


class RecordTooLarge(RecordRefused):
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


class LogDamaged(LogTruncated):
    """The log's file is malformed, or not a log: what was in it cannot be read, now or later."""


class InvariantBroken(DoraError):
    """A promise does not hold: C1, C2, C3, a digest, or the chain of rounds."""

    exit_code = 5


class ReplayDiverged(DoraError):
    """The same inputs gave other bytes."""

    exit_code = 6


class ResourceError(DoraError):
    """Memory, disk, a device or a time limit is not enough."""

    exit_code = 7


class NoRoom(ResourceError):
    """The disk, or the store, below the policies has no room. The trainer waits for some."""


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
    """A number of a training step is not finite; the step is not committed.

    Its hint is the way out for a run's batch, where no other is given.
    """

    exit_code = 11

    def __init__(self, message: str, *, hint: str = FAIL_BATCH_HINT) -> None:
        super().__init__(message, hint=hint)


class RunHalted(DoraError):
    """Too many groups fail; nothing more is decided until a user resumes the run."""

    exit_code = 12


CHECKOUT: Final = (Path(__file__).parent.parent / "pyproject.toml").is_file()
"""Whether this package runs from a checkout and not from a wheel."""


def install_hint(extra: str, *, options: str = "", checkout: bool = CHECKOUT) -> str:
    """The command that installs an extra: the package is on no index, so its name installs nothing.

    Example: ``install_hint("torch") == "pip install -e '.[torch]'"`` in a checkout.
    """
    if checkout:
        return f"pip install {options}-e '.[{extra}]'"
    return f"pip install {options}'dora_pipe-VERSION-py3-none-any.whl[{extra}]'"
