"""Batches in parts in simulated runs: the next step begins while a policy is published."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dora_pipe.consumers.trainer.effects import TrainPart
from dora_pipe.sim.paced_port import WorkingPort
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def test_part_of_the_next_step_begins_while_a_policy_is_published() -> None:
    begun, start = list[int](), WorkingPort.start

    def starts(self: WorkingPort, effect: Any) -> None:
        if isinstance(effect, TrainPart) and self._publishing.writing:
            begun.append(effect.decision.step)
        start(self, effect)

    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(WorkingPort, "start", starts)
        result = SeedRun(draw(39)).run()
    assert result.holds, result.line
    assert begun and min(begun) > 0
