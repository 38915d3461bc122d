"""Roles on several machines: each has a folder of its own; they share the log and the store."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.schemas.control import RoleStarted, StepCommitted, WorkerJoined
from tests.support.kafka_broker import KafkaBroker
from tests.support.user_run import WAIT_S, answer, call, facts_of, furnish, start, until

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 30
"""Long enough for two machines to be lost, missed and replaced."""
LEASE_S = 3.0


class Site:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.run = folder.name  # the broker has the runs of the other tests too
        shared = folder / "shared"
        shared.mkdir()
        self.config = furnish(shared) / "config.toml"
        text = self.config.read_text().replace('name = "tiny"', f'name = "{self.run}"')
        text = text.replace("lease_s = 5.0", f"lease_s = {LEASE_S}")
        text = text.replace("steps = 3", f"steps = {STEPS}")
        text += f'[bus]\nurl = "{url}"\n[store]\npath = "{folder / "store"}"\n'
        self.config.write_text(text)
        self._all: list[subprocess.Popen[bytes]] = []

    def machine(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def start(self, machine: str, *words: str) -> subprocess.Popen[bytes]:
        role, *rest = words
        self._all.append(start(self.machine(machine), role, str(self.config), *rest))
        return self._all[-1]

    def output(self, machine: str) -> str:
        return (self.machine(machine) / "said").read_text()

    def facts(self) -> list[object]:
        return facts_of(f"{self.url}/{self.run}")

    def steps(self) -> list[int]:
        return [fact.step for fact in self.facts() if isinstance(fact, StepCommitted)]

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def site(tmp_path: Path, kafka_broker: KafkaBroker) -> Iterator[Site]:
    site = Site(tmp_path, f"kafka://{kafka_broker.bootstrap}")
    yield site
    site.close()


def lose(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_run_outlives_the_machines_of_its_orchestrator_and_of_a_worker(site: Site) -> None:
    first = site.start("a", "orchestrator")
    w0 = site.start("b", "worker", "--name", "w0")
    w1 = site.start("c", "worker", "--name", "w1")
    trainer = site.start("d", "trainer")
    until(lambda: len(site.steps()) >= 2)
    lose(first)
    second = site.start("e", "orchestrator")
    before = len(site.steps())
    until(lambda: len(site.steps()) >= before + 2)
    lose(w0)
    w2 = site.start("f", "worker", "--name", "w2")
    codes = {
        name: process.wait(WAIT_S)
        for name, process in zip("edcf", (second, trainer, w1, w2), strict=True)
    }
    assert codes == dict.fromkeys("edcf", 0), "\n".join(map(site.output, "edcf"))

    facts = site.facts()
    assert site.steps() == list(range(STEPS))
    assert {fact.worker for fact in facts if isinstance(fact, WorkerJoined)} == {"w0", "w1", "w2"}
    roles = [fact for fact in facts if isinstance(fact, RoleStarted)]
    assert [fact.role for fact in roles].count("orchestrator") == 2
    assert not list(site.machine("b").rglob("config.toml")), "a worker needs none"
    late = [("orchestrator",), ("trainer",), ("worker", "--name", "w3")]
    for role, *words in late:  # as Kubernetes does, which knows of no end
        assert site.start("h", role, *words).wait(WAIT_S) == 0, site.output("h")
    assert site.steps() == list(range(STEPS))
    prove(site)


def prove(site: Site) -> None:
    other = site.machine("g")
    shown = answer(other, "config", str(site.config))
    assert shown.returncode == 0, shown.stderr
    (other / "config.toml").write_text(shown.stdout)
    assert call(other, "audit", ".") == 0, site.output("g")
    assert call(other, "replay", ".", "--from", str(STEPS - 3)) == 0, site.output("g")
    assert "3 of 3 steps bit-equal" in site.output("g")


def test_topics_may_be_made_before_by_somebody_who_may(site: Site) -> None:
    assert call(site.machine("a"), "log", "create", str(site.config)) == 0, site.output("a")
    assert call(site.machine("b"), "log", "create", str(site.config)) == 0, site.output("b")
    assert f"{site.run}.trajectories: 4 partitions" in site.output("b")
    words = ("-o", "bus.partitions=5")
    assert call(site.machine("c"), "log", "create", str(site.config), *words) != 0
    assert f"{site.run}.trajectories" in site.output("c")
    words = ("-o", 'bus.url=""')
    assert call(site.machine("d"), "log", "create", str(site.config), *words) == 3
    assert "this run uses SQLite" in site.output("d")


def test_an_orchestrator_elsewhere_refuses_what_a_resumed_run_cannot_change(site: Site) -> None:
    first = site.start("a", "orchestrator")
    until(lambda: any(isinstance(fact, RoleStarted) for fact in site.facts()))
    lose(first)
    words = ("-o", "rollout.group_size=3")
    assert call(site.machine("b"), "orchestrator", str(site.config), *words) == 3
    assert "a resumed run cannot change rollout.group_size" in site.output("b")
    assert not list(site.machine("b").rglob("config.toml"))
