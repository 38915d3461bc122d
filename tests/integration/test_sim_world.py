"""The world by itself: equal seeds give equal logs, time moves by events, the dead stay dead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.bus.memory import AppendFault, FaultPlan
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.sim.parts import WorkerPlan
from dora_pipe.sim.role import ORCHESTRATOR, TRAINER, FaultModel, Role
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import SECOND_NS, World
from tests.support.bus_steps import ScriptedFaults
from tests.support.cluster import make_config

PLANS = tuple(WorkerPlan(name=f"w{number}", slots=4, prefetch=2) for number in range(3))


def log_digest(world: World) -> str:
    parts = [
        repr((tp, record.offset, record.key, record.headers)).encode() + record.value
        for tp, held in sorted(world.log._partitions.items())
        for record in held.records
    ]
    return sha256_hex(*parts)


def test_run_without_faults_ends_and_is_clean() -> None:
    with World(make_config(), workers=PLANS) as world:
        assert world.run(until_ns=100 * SECOND_NS)
        report = audit(world.bus, world.topics, world.store.root)
    assert report.holds and report.finished and report.steps == 8
    assert {role.end for _, role in world.ends} == {"ended", "left"}


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_worker_with_a_wrong_clock_does_its_work(rate: float) -> None:
    plans = (WorkerPlan(name="w0", slots=4, prefetch=2, rate=rate),)
    with World(make_config(run__steps=3), workers=plans) as world:
        assert world.run(until_ns=100 * SECOND_NS)


SCRIPT = """
from tests.integration.test_sim_world import seed_digest
print(seed_digest(5))
"""


def seed_digest(seed: int) -> str:
    seed_run, digests = SeedRun(draw(seed)), []
    close = World.close

    def closing(self: World) -> None:
        digests.append(log_digest(self))
        close(self)

    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(World, "close", closing)
        assert seed_run.run().holds
    return digests[0]


def test_equal_seeds_give_equal_logs_in_every_process() -> None:
    here = seed_digest(5)
    forked = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert forked.stdout.split()[-1] == here


class Away(FaultModel):
    def __init__(self, name: str, appends: int) -> None:
        self.name, self.appends = name, appends

    def born(self, role: Role) -> FaultPlan:
        if role.name != self.name or role.number > len(PLANS) + 1:
            return ScriptedFaults()
        failed = AppendFault(kind="failed")
        return ScriptedFaults(appends=dict.fromkeys(range(5, 5 + self.appends), failed))


def test_others_go_on_while_a_role_waits_for_its_bus() -> None:
    with World(make_config(), workers=PLANS, faults=Away("w1", 12)) as world:
        assert world.run(until_ns=100 * SECOND_NS)
        waited = [role for _, role in world.ends if role.name == "w1"]
        assert waited[-1].bus.appends > 12
        assert audit(world.bus, world.topics, None).holds


def test_role_that_is_killed_while_it_waits_never_wakes_up() -> None:
    with World(make_config(), workers=PLANS, faults=Away("w1", 400)) as world:
        world.run(until_ns=SECOND_NS // 2)
        asleep = world.present("w1")
        assert asleep is not None
        world.after(0, lambda: world.kill(asleep))
        assert world.run(until_ns=200 * SECOND_NS)
        assert [role for _, role in world.ends if role is asleep] == [asleep]
        assert asleep.end == "killed"
        assert audit(world.bus, world.topics, None).holds


@pytest.mark.parametrize("name", [ORCHESTRATOR, TRAINER])
def test_zombie_of_an_exclusive_role_appends_nothing(name: str) -> None:
    with World(make_config(), workers=PLANS) as world:
        world.run(until_ns=SECOND_NS)
        zombie = world.present(name)
        assert zombie is not None
        world.pause(zombie, SECOND_NS)
        world.start(name)
        assert world.run(until_ns=100 * SECOND_NS)
        assert zombie.end.startswith("Fenced")
        assert audit(world.bus, world.topics, None).holds
