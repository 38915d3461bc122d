"""Which policy a run had after a step, read from its control topic."""

from __future__ import annotations

from contextlib import closing

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import UsageError
from dora_pipe.schemas.control import RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics

POLL_S = 1.0
"""A log on a broker gives nothing to a reader that does not wait."""


def policy_after(bus: Bus, topics: Topics, version: int) -> tuple[RunStarted, Manifest]:
    """The run's first record and the manifest of a version. Raises UsageError if there is none."""
    at = TopicPartition(topics.control, 0)
    end = bus.end(at)
    first: RunStarted | None = None
    newest = -1
    with closing(bus.reader({at: 0})) as reader:
        while reader.position(at) < end:
            for record in reader.poll(timeout_s=POLL_S):
                if not record.value.startswith((b'{"kind":"run-started', b'{"kind":"step-commit')):
                    continue
                match decode_control(record.value):
                    case RunStarted() as first:
                        newest = 0
                        if version == 0:
                            return first, first.policy
                    case StepCommitted(step=step, policy=policy):
                        newest = step + 1
                        if newest == version and first is not None:
                            return first, policy
                    case _:
                        pass
    raise UsageError(
        f"run {topics.run} has no version {version}", hint=f"its newest version is {newest}"
    )
