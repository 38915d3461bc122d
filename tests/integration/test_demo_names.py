"""The demo takes a name that is free: in the folder of runs, and on a broker that others use."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka import client as kafka_client
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.cli import demo as demo_module
from dora_pipe.cli.demo import demo
from dora_pipe.core.errors import BusError, UsageError
from dora_pipe.launch.run_dir import RunDir
from tests.support.kafka_broker import free_ports, tidied_client


class _Stop(Exception):
    """Raised where the demo would begin to work."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: object, **__: object) -> None:
        raise _Stop

    monkeypatch.setattr(demo_module, "warm", stop)


def name_of(root: Path, *override: str) -> str:
    before = set(root.iterdir())
    with pytest.raises(_Stop):
        demo(root=root, override=list(override))
    (created,) = set(root.iterdir()) - before
    return created.name


@pytest.mark.usefixtures("begun")
def test_names_of_runs_in_the_folder_are_taken(tmp_path: Path) -> None:
    assert [name_of(tmp_path) for _ in range(3)] == ["demo", "demo-2", "demo-3"]


@pytest.mark.parametrize("word", ['run.name="mine"', "model.path=warm"])
def test_what_the_demo_sets_itself_is_refused_before_anything_is_made(
    tmp_path: Path, word: str
) -> None:
    with pytest.raises(UsageError, match="the demo sets it"):
        demo(root=tmp_path, override=[word])
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("begun")
def test_names_of_runs_on_the_broker_are_taken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus()
    bus.create([TopicSpec(name="demo.control"), TopicSpec(name="demo-2.control")])
    monkeypatch.setattr(RunDir, "open_bus", lambda *_: bus)
    assert name_of(tmp_path, "bus.url=kafka://somewhere:9092") == "demo-3"


@pytest.mark.usefixtures("begun")
def test_a_broker_that_is_not_there_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_client, "CONNECT_LIMIT_S", 0.5)
    (port,) = free_ports(1)
    with tidied_client(), pytest.raises(BusError, match=f"127.0.0.1:{port}"):
        demo(root=tmp_path, override=[f"bus.url=kafka://127.0.0.1:{port}"])
    assert list(tmp_path.iterdir()) == []
