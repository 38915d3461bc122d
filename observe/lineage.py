"""Which policy a run had after a step, and the run's first record."""

from __future__ import annotations

from contextlib import closing, suppress

from dora_pipe.bus.base import records_until
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.catalogue.account import RunAccount, StepEnded
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.schemas.control import AnyControl, RunStarted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics


class _Wanted:
    """Waits for the step that makes a version, and that counts."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.newest = 0
        self.policy: Manifest | None = None
        self._account = RunAccount()

    def fact(self, offset: int, fact: AnyControl) -> None:
        for event in self._account.fact(offset, fact):
            if isinstance(event, StepEnded):
                self.newest = event.fact.step + 1
                if self.newest == self.version:
                    self.policy = event.fact.policy

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        self._account.round(round_, offset)


def newest_version(bus: Bus, topics: Topics) -> int:
    """Of a log that is read to its end; 0 before the first step. Raises BusError, LogTruncated."""
    wanted = _Wanted(version=-1)
    with closing(LogFollower(bus, topics, wanted)) as follower:
        while follower.advance():
            pass
    return wanted.newest


def policy_after(bus: Bus, topics: Topics, version: int) -> tuple[RunStarted, Manifest]:
    """The run's first record and the manifest of a version. Raises UsageError if there is none."""
    first, newest = _run_started(bus, topics), -1
    if first is not None and version == 0:
        return first, first.policy
    if first is not None:
        wanted = _Wanted(version)
        with closing(LogFollower(bus, topics, wanted)) as follower:
            while wanted.policy is None and follower.advance():
                pass
        if wanted.policy is not None:
            return first, wanted.policy
        newest = wanted.newest
    raise UsageError(
        f"run {topics.run} has no version {version}", hint=f"its newest version is {newest}"
    )


def _run_started(bus: Bus, topics: Topics) -> RunStarted | None:
    """The first one: it begins the log, or is close to it."""
    at = TopicPartition(topics.control, 0)
    with closing(bus.reader({at: 0})) as reader:
        for record in records_until(reader, {at: bus.end(at)}):
            with suppress(SchemaError):
                fact = decode_control(record.value)
                if isinstance(fact, RunStarted):
                    return fact
    return None
