"""Starts the processes of every phase, one writer and one reader each; decides their order.

In each repeat everything that stands side by side is measured one after the other: the two sides of
a layer, then the planes. So what the machine does meanwhile spoils a whole repeat and not one side.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

from msgspec.structs import replace

from dora_pipe.bench.dataplane.figures import (
    SIDES,
    DelayFigure,
    LayerFigure,
    LayerRound,
    Load,
    Phase,
    PlaneFigure,
    PlaneRound,
    SplitFigure,
    delay_figure,
    layer_figure,
    plane_figure,
    rate,
    split_figure,
)
from dora_pipe.bench.dataplane.peers import PEERS, QUEUE, QUEUE_ONE, RAW, REDIS
from dora_pipe.bench.dataplane.pipe import PIPE
from dora_pipe.bench.dataplane.process import (
    GROUP_SIZE,
    PARTITIONS,
    WARM,
    Assemble,
    Child,
    Done,
    Layer,
    Publish,
    Side,
    Task,
)
from dora_pipe.bench.dataplane.procfs import cpu_s, listener_of
from dora_pipe.bench.dataplane.servers import environment_of, python_of, serving
from dora_pipe.bus import open_bus
from dora_pipe.bus.port import TopicSpec
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.topics import Topics

TOKENS: Final = (256, 2_048, 16_384, 65_536)

BATCH_GROUPS_MAX: Final = 16
BATCH_TOKENS: Final = 1024 * 1024
ROUTED_BATCH_TOKENS: Final = 128 * 1024
"""A batch at full load has so many groups, or as many as hold so many tokens; with routes, whose
tokens have 393 bytes and not 9, fewer."""

LOAD: Final = 1 / 10
"""Of full load, where latency is measured."""

DELAYS_PER_S: Final = 100.0
"""Records a second, where the layer's own delay is measured."""

LATENCIES_MIN: Final = 200
LATENCY_STRETCH: Final = 4
"""Latency is measured for so many trajectories, in at most so many times `seconds`."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is measured. `kafka` is ``kafka://HOST:PORT[,..]``, or empty: no broker, no layer."""

    kafka: str
    tokens: Sequence[int]
    seconds: float
    repeats: int
    folder: Path
    """For the files of SQLite and of Redis."""
    routes: bool = False
    """Trajectories say which experts of a mixture their tokens passed."""
    layers: bool = True
    """The log's layer by itself, too."""
    peers: Sequence[str] = ()
    """Those of `PEERS` that are measured beside our planes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The rows."""

    layers: list[LayerFigure]
    delays: list[DelayFigure]
    planes: list[PlaneFigure]
    splits: list[SplitFigure]


def bench_dataplane(setup: Setup, say: Say) -> Measured:
    """Measure every length; `say` hears of each. Raises UsageError, BusError, ResourceError."""
    if setup.repeats < 1 or setup.seconds <= 0 or not setup.tokens:
        raise UsageError("a bench needs a length, a repeat and some time")
    if setup.kafka and not _servers(setup.kafka):
        raise UsageError(f"`{setup.kafka}` is not a broker", hint="kafka://HOST:PORT[,HOST:PORT]")
    with serving(setup.peers, _servers(setup.kafka), setup.folder) as peers:
        return _measure(setup, peers, say)


def _measure(setup: Setup, peers: Mapping[str, str], say: Say) -> Measured:
    measured = Measured(layers=[], delays=[], planes=[], splits=[])
    if setup.kafka:
        say("warming up")  # a broker that has just started compiles what it will do
        list(_layers(setup, setup.tokens[0], raw_first=True))
    for tokens in setup.tokens:
        say(f"{tokens} tokens")
        layers: dict[Phase, list[LayerRound]] = {}
        delays: list[LayerRound] = []
        planes: dict[str, list[PlaneRound]] = {}
        for repeat in range(setup.repeats):
            if setup.kafka and setup.layers:
                for phase, one in _layers(setup, tokens, raw_first=repeat % 2 == 0):
                    layers.setdefault(phase, []).append(one)
                delays.append(_delays(setup, tokens))
            for name, plane in _planes(setup, peers, tokens):
                planes.setdefault(name, []).append(plane)
        measured.layers.extend(layer_figure(name, tokens, found) for name, found in layers.items())
        if delays:
            measured.delays.append(delay_figure(tokens, DELAYS_PER_S, delays))
        measured.planes.extend(plane_figure(name, tokens, found) for name, found in planes.items())
        measured.splits.extend(split_figure(name, tokens, found) for name, found in planes.items())
    return measured


def _layers(setup: Setup, tokens: int, *, raw_first: bool) -> Iterator[tuple[Phase, LayerRound]]:
    """One repeat of the three phases; who goes first takes turns."""
    found: dict[Phase, dict[Side, Sequence[Done]]] = {"append": {}, "read": {}, "through": {}}
    for side in SIDES if raw_first else SIDES[::-1]:
        with _topic(setup.kafka) as topic:
            write, read = _layer_tasks(setup, side, topic, tokens)
            appended = _alone(write, total=0)
            found["append"][side] = [appended]
            found["read"][side] = [_alone(read, total=appended.records + WARM)]
        with _topic(setup.kafka) as topic:
            write, read = _layer_tasks(setup, side, topic, tokens)
            found["through"][side] = _together(write, read, behind=WARM)
    yield from found.items()


def _delays(setup: Setup, tokens: int) -> LayerRound:
    """One repeat of single records, on both sides."""
    found: dict[Side, Sequence[Done]] = {}
    for side in SIDES:
        with _topic(setup.kafka) as topic:
            write, read = _layer_tasks(setup, side, topic, tokens, per_s=DELAYS_PER_S)
            found[side] = _together(write, read, behind=WARM)
    return found


def _layer_tasks(
    setup: Setup, side: Side, topic: str, tokens: int, *, per_s: float = 0.0
) -> tuple[Layer, Layer]:
    servers = _servers(setup.kafka)
    append = Layer(
        side=side,
        does="append",
        servers=servers,
        topic=topic,
        tokens=tokens,
        seconds=setup.seconds,
        per_s=per_s,
    )
    return append, replace(append, does="read")


def _planes(
    setup: Setup, peers: Mapping[str, str], tokens: int
) -> Iterator[tuple[str, PlaneRound]]:
    """One repeat of every plane: full load first, because a tenth is a tenth of that."""
    kafka = [("kafka", setup.kafka)] if setup.kafka else []
    for name, address in (*kafka, *peers.items(), ("sqlite", "sqlite:"), (PIPE, PIPE)):
        full = _plane(
            setup, address, tokens, batch_of(tokens, routes=setup.routes), setup.seconds, per_s=0.0
        )
        per_s = rate(full.published, full.assembled) * LOAD
        seconds = min(max(setup.seconds, LATENCIES_MIN / per_s), LATENCY_STRETCH * setup.seconds)
        light = _plane(setup, address, tokens, 0, seconds, per_s=per_s)
        yield name, PlaneRound(full=full, light=light)


def batch_of(tokens: int, *, routes: bool = False) -> int:
    """Trajectories of a batch at full load; whole groups."""
    groups = (ROUTED_BATCH_TOKENS if routes else BATCH_TOKENS) // (tokens * GROUP_SIZE)
    return GROUP_SIZE * max(1, min(BATCH_GROUPS_MAX, groups))


def _plane(
    setup: Setup, address: str, tokens: int, batch: int, seconds: float, *, per_s: float
) -> Load:
    """Publish and assemble at once."""
    with ExitStack() as stack:
        run = f"bench-{uuid4().hex[:12]}"
        fds: tuple[int, ...] = ()
        ends = (address, address)
        if address == PIPE:
            fds = os.pipe()
            for fd in fds:
                stack.callback(os.close, fd)
            ends = (f"{PIPE}:{fds[1]}", f"{PIPE}:{fds[0]}")
        elif address == "sqlite:":
            path = setup.folder / f"{run}.sqlite"
            stack.callback(_remove, path)
            ends = (f"sqlite:{path}",) * 2
        claims = setup.folder / f"{run}.claims"
        stack.callback(shutil.rmtree, claims, ignore_errors=True)
        if log := _log_of(ends[0]):
            stack.enter_context(_topic(log, Topics(run).trajectories))
        write = Publish(
            address=ends[0],
            run=run,
            tokens=tokens,
            seconds=seconds,
            per_s=per_s,
            routes=setup.routes,
            claims=str(claims),
        )
        read = Assemble(
            address=ends[1], run=run, batch=batch, routes=setup.routes, claims=str(claims)
        )
        broker = _Broker(address)
        published, assembled = _together(write, read, behind=0, fds=fds)
        return Load(published=published, assembled=assembled, broker_s=broker.spent_s())


def _alone(task: Layer, *, total: int) -> Done:
    with Child(task) as child:
        child.await_ready()
        child.go()
        child.send_total(total)
        return child.done()


def _together(
    write: Task, read: Task, *, behind: int, fds: Sequence[int] = ()
) -> tuple[Done, Done]:
    """The reader learns the total when the writer is done; `behind` more lie before its start."""
    kind = "" if isinstance(write, Layer) else write.address.partition(":")[0]
    like = partial(Child, pass_fds=fds, python=python_of(kind), environment=environment_of(kind))
    with like(write) as writer, like(read) as reader:
        writer.await_ready()
        reader.await_ready()
        reader.go()
        writer.go()
        written = writer.done()
        reader.send_total(written.records + behind)
        return written, reader.done()


def _log_of(address: str) -> str:
    """The log in which a plane needs a topic; empty where it needs none."""
    kind, _, rest = address.partition(":")
    if kind == RAW:
        return f"kafka://{rest}"
    return "" if kind in (PIPE, *PEERS) else address


class _Broker:
    """CPU time of the servers behind an address since now."""

    def __init__(self, address: str) -> None:
        kind, _, rest = address.partition(":")
        servers = rest if kind in (RAW, REDIS) else _servers(address)
        ports = [int(each.rpartition(":")[2]) for each in servers.split(",") if each]
        self._pids = [listener_of(port) for port in ports]
        if kind in (QUEUE, QUEUE_ONE):
            self._pids.append(None)
        self._before_s = self._now_s()

    def spent_s(self) -> float | None:
        """CPU seconds; None if one of them is not on this machine, or not known."""
        return None if None in self._pids else self._now_s() - self._before_s

    def _now_s(self) -> float:
        return sum(cpu_s(pid) for pid in self._pids if pid is not None)


@contextmanager
def _topic(address: str, name: str = "") -> Iterator[str]:
    """A topic of its own; on a broker it is deleted when nobody writes to it any more."""
    topic = name or f"bench-{uuid4().hex[:12]}"
    bus = open_bus(address)
    try:
        bus.create([TopicSpec(name=topic, partitions=PARTITIONS)])
    finally:
        bus.close()
    yield topic
    if _servers(address):
        from dora_pipe.bench.dataplane.raw import drop_topics

        drop_topics(_servers(address), [topic])


def _servers(address: str) -> str:
    """The brokers of an address; empty where it names none."""
    kind, _, rest = address.partition("://")
    return rest.strip("/") if kind == "kafka" else ""


def _remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
