"""Workers on machines of their own: a drained one's requests and everybody's weights go by wire."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from pathlib import Path

import pytest

from dora_pipe.bus import open_bus
from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.schemas.control import (
    Command,
    RequestReleased,
    StepCommitted,
    WorkerJoined,
    decode_control,
)
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics, merged
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.transfers.open import TOKEN_VARIABLE
from tests.support.user_run import WAIT_S, call, furnish, start, until

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone("a worker is drained between two tokens of its requests"),
]

RUN = "tiny"
TOPICS = Topics(RUN)
DRAINED = "w1"
TOKEN = "a token that only this run knows"
SETTINGS = """
[transfers]
kind = "flight"
host = "127.0.0.1"
[bus]
url = "sqlite:{folder}/log.sqlite"
[store]
url = "file://{folder}/store"
"""
LONG = (
    ("steps = 3", "steps = 4"),
    ("max_tokens = 12", "max_tokens = 480"),
    ("prompts_per_step = 2", "prompts_per_step = 5"),
    ("max_model_len = 64", "max_model_len = 512\ncheckpoint_tokens = 16"),
    ("prompts = 4", "prompts = 0\n[staleness]\nmax_staleness = 0"),
)
SLOW_LAYERS = 12
"""Of the model: with fewer a request may have ended before its worker hears that it is drained."""


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shared = folder / "shared"
        shared.mkdir()
        self.config = furnish(shared, num_hidden_layers=SLOW_LAYERS) / "config.toml"
        text = self.config.read_text() + SETTINGS.format(folder=folder)
        for old, new in LONG:
            assert old in text
            text = text.replace(old, new)
        self.config.write_text(text)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, *words: str, name: str = "") -> None:
        location = self.folder / (name or role)
        location.mkdir()
        named = ("--name", name) if name else ()
        self.running[name or role] = start(location, role, str(self.config), *named, *words)

    def output(self, machine: str) -> str:
        return (self.folder / machine / "said").read_text()

    def bus(self) -> Bus:
        return open_bus(f"sqlite:{self.folder}/log.sqlite")

    def facts(self) -> list[object]:
        return [decode_control(value) for value in self._values(TOPICS.control)]

    def samples(self) -> bool:
        statuses = [decode_metrics(value) for value in self._values(TOPICS.metrics)]
        texts = [
            status
            for status in statuses
            if isinstance(status, WorkerStatus) and status.worker == DRAINED
        ]
        last = reduce(merged, texts, None)
        return last is not None and last.version > 0 and last.active > 1 and bool(last.progress)

    def _values(self, topic: str) -> list[bytes]:
        if not (self.folder / "log.sqlite").exists():
            return []
        with closing(self.bus()) as bus:
            if topic not in bus.topics():
                return []
            tp = TopicPartition(topic, 0)
            return [record.value for record in records_of(bus, {tp: bus.end(tp)})]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    site = Site(tmp_path)
    yield site
    for process in site.running.values():
        process.kill()
        process.wait()


def test_caches_and_weights_go_from_machine_to_machine(site: Site) -> None:
    site.start("orchestrator")
    for name in ("w0", DRAINED, "w2"):
        site.start("worker", name=name)
    site.start("trainer")
    until(site.samples)
    command = Command(at_ns=0, user="u", verb="drain", args={"worker": DRAINED})
    with closing(site.bus()) as bus:
        bus.writer().append([Append(topic=TOPICS.control, value=encode(command))])
    codes = {name: process.wait(WAIT_S) for name, process in site.running.items()}
    assert set(codes.values()) == {0}, {name: site.output(name) for name in codes}

    facts = site.facts()
    assert len([fact for fact in facts if isinstance(fact, StepCommitted)]) == 4
    assert len([fact for fact in facts if isinstance(fact, WorkerJoined)]) == 3
    released = [fact for fact in facts if isinstance(fact, RequestReleased) and fact.kv is not None]
    peers = {release.kv.peer for release in released if release.kv is not None}
    assert len(peers) >= 1 and all(peer.startswith("grpc://127.0.0.1:") for peer in peers)

    counted = "".join(site.output(name) for name in ("w0", "w2"))
    assert "'KV caches imported'" in counted and "KV cache not" not in counted
    came = [line for line in counted.splitlines() if " came from grpc://" in line]
    assert came, "no worker got weights from a peer"
    assert all(TOKEN not in site.output(name) for name in codes)
    moved = sorted({release.trajectory for release in released})[:3]
    prove(site, moved)


def prove(site: Site, moved: list[str]) -> None:
    other = site.folder / "orchestrator" / "runs" / RUN
    assert call(other, "audit", ".") == 0, (other / "said").read_text()
    names = [*moved]
    assert call(other, "replay", ".", *names) == 0, (other / "said").read_text()
