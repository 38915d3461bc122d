"""Look up the policy after a step, and the run's first record."""

from __future__ import annotations

from contextlib import closing, suppress

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.account import RunAccount, StepEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.schemas.control import AnyControl, RunStarted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics


class _Policies:
    def __init__(self, bus: Bus, topics: Topics) -> None:
        self.by_version: dict[int, Manifest] = {}
        self._account = RunAccount()
        with closing(LogFollower(bus, topics, self)) as follower:
            while follower.advance():
                pass

    def fact(self, offset: int, fact: AnyControl) -> None:
        for event in self._account.fact(offset, fact):
            if isinstance(event, StepEnded):
                self.by_version[event.fact.step + 1] = event.fact.policy

    def round(self, round_: Round, offset: int) -> None:
        self._account.round(round_, offset)


def newest_version(bus: Bus, topics: Topics) -> int:
    """Return the newest version; 0 before the first step. Raises BusError, LogTruncated."""
    return max(_Policies(bus, topics).by_version, default=0)


def policy_after(bus: Bus, topics: Topics, version: int) -> tuple[RunStarted, Manifest]:
    """Return the first record and the manifest of a version. Raises UsageError if there is none."""
    first = run_started_in(bus, topics)
    if first is not None and version == 0:
        return first, first.policy
    policies = {} if first is None else _Policies(bus, topics).by_version
    if first is not None and version in policies:
        return first, policies[version]
    newest = -1 if first is None else max(policies, default=0)
    raise UsageError(
        f"run {topics.run} has no version {version}", hint=f"its newest version is {newest}"
    )


def run_started_in(bus: Bus, topics: Topics) -> RunStarted | None:
    partition = TopicPartition(topics.control, 0)
    with closing(records_of(bus, {partition: bus.end(partition)})) as records:
        for record in records:
            with suppress(SchemaError):
                fact = decode_control(record.value)
                if isinstance(fact, RunStarted):
                    return fact
    return None
