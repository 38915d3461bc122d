"""Batches in parts in simulated runs: what an audit says of who comes first."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.report import AuditReport
from dora_pipe.cli.audit_tables import print_report
from dora_pipe.consumers.trainer.effects import TrainPart
from dora_pipe.sim.paced_port import WorkingPort
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def played(seed: int) -> AuditReport:
    """The audit of a drawn run."""
    found = list[Any]()
    close = World.close

    def close_read(self: World) -> None:
        found.append(audit(self.bus, self.topics, self.store.root))
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "close", close_read)
        result = SeedRun(draw(seed)).run()
    assert result.holds, result.line
    report: AuditReport = found[0]
    return report


def test_audit_says_lengths_and_rewards_of_trained_siblings_by_their_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = draw(7).config
    assert config.trainer.parts > 1 and config.staleness.max_staleness == 0
    report = played(7)
    every, *parts = report.parts
    assert every.part == 0 and [one.part for one in parts] == [*range(1, len(parts) + 1)]
    assert len(parts) == config.trainer.parts
    assert every.siblings == sum(one.siblings for one in parts) > 0
    for name in ("tokens", "seconds"):
        mean, shares = getattr(every, name), [getattr(one, name) for one in parts]
        total = sum(one.count * (one.value or 0) for one in shares)
        assert mean.value == pytest.approx(total / mean.count)
        assert len({one.value for one in shares}) > 1
    print_report(report)
    assert "trained siblings by the part of their batch" in capsys.readouterr().out


def test_part_of_the_next_step_begins_while_a_policy_is_published() -> None:
    begun, start = list[int](), WorkingPort.start

    def starts(self: WorkingPort, effect: Any) -> None:
        if isinstance(effect, TrainPart) and self._publishing.writing:
            begun.append(effect.decision.step)
        start(self, effect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkingPort, "start", starts)
        result = SeedRun(draw(3)).run()
    assert result.holds, result.line
    assert begun and min(begun) > 0


def test_audit_of_a_run_without_parts_says_nothing_of_them() -> None:
    assert draw(1).config.trainer.parts == 1
    assert played(1).parts == ()
