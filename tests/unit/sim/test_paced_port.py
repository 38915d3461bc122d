"""A policy is published beside the trainer's other work, and no update touches what is written."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.consumers.trainer.effects import PolicyPublished, PublishPolicy, TrainPart
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import TakePart
from dora_pipe.sim.paced_port import PublishingPort, WorkingPort
from dora_pipe.sim.role import WorldClock

MANIFEST = Manifest(digest="0" * 64, bytes=0, tensors=())
PUBLISHED = PolicyPublished(
    step=0,
    attempt=0,
    manifest=MANIFEST,
    contributions=Blob(sha256="0" * 64, bytes=0),
    checkpoint=None,
)


class Queue:
    """A port whose effects are done with the next poll."""

    effects: tuple[type, ...] = (TrainPart, PublishPolicy)

    def __init__(self) -> None:
        self.begun: list[Any] = []

    @property
    def busy(self) -> bool:
        return bool(self.begun)

    def start(self, effect: Any) -> None:
        self.begun.append(effect)

    def poll(self) -> list[Any]:
        events = [PUBLISHED for one in self.begun if isinstance(one, PublishPolicy)]
        self.begun.clear()
        return events

    def close(self) -> None:
        self.begun.clear()


def part(minibatches: int) -> TrainPart:
    decision = TakePart(
        step=1,
        attempt=0,
        part=0,
        groups=(),
        settings={"trainer.minibatches": minibatches},
        reason="some have ended",
    )
    return TrainPart(decision=decision, known=None, reference="")  # type: ignore[arg-type]


@pytest.fixture
def clock() -> WorldClock:
    return WorldClock()


@pytest.fixture
def ports(clock: WorldClock) -> tuple[WorkingPort, PublishingPort]:
    def takes_ns(effect: Any) -> int:
        return 10

    publishing = PublishingPort(Queue(), clock, takes_ns, 1)
    return WorkingPort(Queue(), clock, takes_ns, 1, publishing), publishing


def test_gradient_of_a_part_may_be_computed_while_a_policy_is_published(
    ports: tuple[WorkingPort, PublishingPort],
) -> None:
    working, publishing = ports
    publishing.start(PublishPolicy(step=0, attempt=0, checkpoint=False))
    working.start(part(1))
    assert working.due_ns() == publishing.due_ns() == 10


def test_update_waits_until_the_policy_is_published(
    clock: WorldClock, ports: tuple[WorkingPort, PublishingPort]
) -> None:
    working, publishing = ports
    publishing.start(PublishPolicy(step=0, attempt=0, checkpoint=False))
    with pytest.raises(InvariantBroken, match="written: part 0 of step 1 is an update"):
        working.start(part(2))
    clock.ns = 10
    assert publishing.poll() == [PUBLISHED]
    working.start(part(2))
    assert working.due_ns() == 20
